"""After a run: evaluation, two-model evaluation, verification of recipes."""
