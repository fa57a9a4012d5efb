"""Before a run: checks, plans, and inspection of the machine and the data."""
