"""`hone eval`: one or several models on the same problems with the same random streams, every sample kept."""
