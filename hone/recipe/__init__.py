"""Every setting, the rules about them, and how recipes are read."""
