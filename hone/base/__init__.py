"""What every part needs and that knows nothing of language models: errors, settings, files, processes, HTTP, progress."""
