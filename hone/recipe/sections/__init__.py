"""The sections of a recipe; they import nothing heavy."""
