"""The stages of a pipeline: the training loop, supervised training, generation."""
