"""Which device a run uses: `device: cpu` or `device: cuda` in a recipe; by default the GPU if there is one."""

from __future__ import annotations

import os
import sys
from typing import Literal

from hone.base.settings import UserError

Device = Literal["auto", "cpu", "cuda"]


def select(device: Device) -> None:
    """Makes this process, and those that it starts, use `device`. Call it before CUDA is used.

    `cpu` hides the GPUs from PyTorch (`CUDA_VISIBLE_DEVICES`), since a process that has started CUDA keeps memory on
    the GPU. Raises UserError if that is too late, or if there is no GPU for `cuda`.
    """
    if device == "auto":
        return
    if device == "cpu":
        started = "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()
        if started:
            raise UserError("device: cpu: this process already uses a GPU; start a new one, or leave the setting out")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "device: cuda: PyTorch sees no GPU here (hone doctor says more); leave the setting out, or give cpu"
        )
