"""What every room needs, independent of language models: errors, settings, files, processes, HTTP."""
