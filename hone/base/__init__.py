"""What every room needs and what knows nothing of language models: errors, settings, files, processes, HTTP."""
