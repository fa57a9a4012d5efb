"""Statistics on samples: pure functions."""
