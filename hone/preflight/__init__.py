"""Before a run: checks, plans, a look at the machine and the data."""
