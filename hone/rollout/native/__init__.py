"""Generation in the training process, over our own key/value cache."""

from hone.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine"]
