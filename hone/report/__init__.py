"""The report of a run: one HTML file without JavaScript, figures and tables beside it."""
