"""An extension of vLLM's workers: digests of the loaded weights, and a weight layout that updates reach.

    PYTHONPATH=hone/rollout/servers/inside VLLM_SERVER_DEV_MODE=1 \
        python -m vllm.entrypoints.openai.api_server --model ... --worker-extension-cls hone_worker.Extension

It is loaded by the interpreter that runs vLLM, which need not have hone: it imports only torch and vLLM.
`hone.rollout.identity` uses the same `digest` for the policy's weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

#: Elements converted to int64 at once.
CHUNK = 1 << 24
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: torch.Tensor) -> int:
    """A checksum of the bits of a matrix [R, C]: sum of bits * (2 * column + 1), modulo 2**64. A vector is one column.

    The digest of stacked tensors (q, k and v in one) is the sum of their digests, and rows of zeros that pad a
    vocabulary do not change it. It does not depend on the order of rows; the log-prob probe does.
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
    """name -> [dtype, digest]; the digest as text, since JSON would round it. Emptied tensors are left out."""
    return {
        name.replace(".base_layer.", "."): [str(p.dtype).removeprefix("torch."), str(digest(p))]
        for name, p in parameters
        if p.numel()
    }


def adapter_matrices(runner: Any, packed: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, torch.Tensor]]:
    """A and B of the adapter that was loaded last, by peft's names; vLLM keeps B times alpha / rank.

    The buffers have room for the largest rank; the rest is zeros, which do not change a digest. Layers without an
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
        """Digests of this worker's tensors, and the checkpoint's tensors that each was stacked from."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
        parts = {whole: list(names) for whole, names in packed.items()}
        tensors = (*model.named_parameters(), *adapter_matrices(self.model_runner, packed))  # type: ignore[attr-defined]
        return {"tensors": digests(tensors), "parts": parts}


def keep_weights_plain() -> None:
    """Turn off oneDNN weight packing in vLLM's CPU build: in-place updates do not reach the packed copies, so that it
    would silently keep serving the old weights. Without packing, small batches are slower but correct."""
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _custom_ops._supports_onednn = False


if __name__ == "hone_worker":  # in a worker; the policy's side only uses `digest`, and must not import vLLM
    keep_weights_plain()
