"""The sections of a recipe; their imports are light."""
