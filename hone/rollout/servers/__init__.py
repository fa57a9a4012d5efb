"""Engines behind servers: vLLM and SGLang."""
