"""hone: reinforcement-learning post-training for reasoning language models."""

__version__ = "0.1.0"
