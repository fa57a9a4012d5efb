"""An extension of vLLM's workers: tells digests of the weights that are held, and keeps them where updates reach them.

    PYTHONPATH=hone/rollout/servers/inside VLLM_SERVER_DEV_MODE=1 \
        python -m vllm.entrypoints.openai.api_server --model ... --worker-extension-cls hone_worker.Extension

It is loaded by the interpreter that runs vLLM, which need not have hone: it imports torch and vLLM only.
`hone.rollout.identity` uses the same `digest` for the policy's side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

#: Elements that are widened to int64 at once.
CHUNK = 1 << 24
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: torch.Tensor) -> int:
    """A checksum of the bits of a matrix [R, C]: sum of bits * (2 * column + 1), modulo 2**64. A vector is one column.

    It adds up over tensors that are stacked on each other (q, k and v in one), and rows of zeros that fill up a
    vocabulary do not count. The order of rows is not seen; the log-prob probe sees that.
    """
    flat = tensor.detach().contiguous()
    bits = flat.view(_BITS[flat.element_size()]).reshape(-1, flat.shape[-1] if flat.ndim > 1 else 1)
    columns = bits.shape[1]
    odd = 2 * torch.arange(columns, device=bits.device, dtype=torch.int64) + 1
    total = 0
    rows = max(1, CHUNK // max(columns, 1))
    for start in range(0, bits.shape[0], rows):
        total += int((bits[start : start + rows].sum(0, dtype=torch.int64) * odd).sum())
    return total % 2**64


def digests(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, list[str]]:
    """name -> [dtype, digest]; the digest as text, which JSON keeps whole. Tensors moved elsewhere are left out."""
    return {
        name.replace(".base_layer.", "."): [str(p.dtype).removeprefix("torch."), str(digest(p))]
        for name, p in parameters
        if p.numel()
    }


def adapter_matrices(runner: Any, packed: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, torch.Tensor]]:
    """A and B of the adapter that was loaded last, by peft's names; vLLM keeps B times alpha / rank.

    They stand in buffers for the largest rank; the rest is zeros, which a digest does not count. Layers without an
    adapter have zeros too.
    """
    if getattr(runner, "lora_manager", None) is None:
        return
    manager = runner.lora_manager._adapter_manager
    loaded = [(n, slot) for slot, n in enumerate(manager.lora_index_to_id) if n is not None]
    if not loaded:
        return
    slot = max(loaded)[1]
    for name, layer in manager.modules.items():
        where, _, last = name.rpartition(".")
        kinds = {"lora_A": layer.lora_a_stacked, "lora_B": layer.lora_b_stacked}
        for kind, buffers in kinds.items():
            buffers = (buffers,) if isinstance(buffers, torch.Tensor) else buffers
            for part, buffer in zip(packed.get(last, [last]), buffers, strict=True):
                yield f"{where}.{part}.{kind}.weight".removeprefix("."), buffer[slot, 0]


class Extension:
    """Methods that `/collective_rpc` of vLLM's server can call."""

    def hone_digests(self) -> dict[str, Any]:
        """Digests of this worker's tensors, and which of the checkpoint's they were put together from."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
        parts = {whole: list(names) for whole, names in packed.items()}
        tensors = (*model.named_parameters(), *adapter_matrices(self.model_runner, packed))  # type: ignore[attr-defined]
        return {"tensors": digests(tensors), "parts": parts}


def keep_weights_plain() -> None:
    """vLLM's CPU build packs the weights of linear layers for oneDNN when it loads them, and in-place updates do not
    reach the packed copies: it would go on with the old weights and say nothing. Without packing it is slower at
    small batches and right."""
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _custom_ops._supports_onednn = False


if __name__ == "hone_worker":  # in a worker; the policy's side only uses `digest`, and must not import vLLM
    keep_weights_plain()
