"""Serving models: over HTTP with OpenAI's API, or at a prompt (`hone.serve.sample`)."""
