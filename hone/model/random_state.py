"""Random numbers that leave those of everybody else alone."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def own_random_numbers(device: torch.device) -> AbstractContextManager[None]:
    """What is drawn within leaves the random state of the host and of this device as it was. Other devices, which are
    those of other processes, are not touched."""
    fork: AbstractContextManager[None] = torch.random.fork_rng([device] if device.type == "cuda" else [])
    return fork
