"""Models to talk to: over HTTP as OpenAI's API has it, or at a prompt (`hone.serve.sample`)."""
