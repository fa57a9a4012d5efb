"""Draws without disturbing the global RNG state."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def own_random_numbers(device: torch.device) -> AbstractContextManager[None]:
    """Context manager in which draws do not change the RNG state of the host and of this device. Other devices, which
    belong to other processes, are unaffected."""
    fork: AbstractContextManager[None] = torch.random.fork_rng([device] if device.type == "cuda" else [])
    return fork
