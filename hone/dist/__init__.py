"""The processes of a run: which there are, and what they add up."""
