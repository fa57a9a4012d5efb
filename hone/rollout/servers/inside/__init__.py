"""Code that runs inside a server's own process; it imports nothing of hone."""
