"""Sharded tensor files, one part per process: `torch.distributed.checkpoint` with safetensors, nothing unpickled.

    shards.write(folder, shards.stage(tensors), group)   # every process of the group; plain tensors or DTensors
    shards.read(folder, tensors)                         # in place, into whatever layout these tensors have
    shards.whole(folder)                                 # name -> whole tensor

A file holds the parts of one process and their offsets in the whole tensors (`DCP_SHARDING_INFO` in its header), so
readers may use a different layout than the writers. torch's own format keeps a pickle, `.metadata`, beside its files;
the Hugging Face format does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: A file is assembled in memory before it is written, so it should not be large.
FILE_BYTES = 1 << 30

Tensors = Mapping[str, torch.Tensor]

# torch warns when a process saves or reads alone, which is intended here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def stage(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Copies of this process's parts in host memory."""
    copies = BlockingAsyncStager().stage({name: tensor.detach() for name, tensor in tensors.items()})
    return dict(copies)


def write(folder: Path, tensors: Tensors, group: ProcessGroup | None = None) -> None:
    """Write this process's parts into `folder` and sync them. Without a group this process is the only one.

    Raises OSError if writing fails.
    """
    if not tensors:
        return
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_files(tensors), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise _cause(error) from error


def read(folder: Path, into: Tensors) -> None:
    """Fill tensors in place from the files. Every process reads only what it needs, without the others.

    Raises ValueError for tensors that are missing or have another shape.
    """
    saved = shapes(folder)
    wrong = [name for name, tensor in into.items() if saved.get(name) != tuple(tensor.shape)]
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{folder}: {name} is {saved.get(name, 'missing')}, but {tuple(into[name].shape)} is needed"
            + (f" (and {len(wrong) - 1} more)" if wrong[1:] else "")
        )
    if into:
        state = {name: tensor.detach() for name, tensor in into.items()}
        load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def is_sharded(folder: str | Path) -> bool:
    """Whether `write` made the files in this folder."""
    return any(Path(folder).glob("shard-*.safetensors"))


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in the folder; empty if it does not exist."""
    if not folder.is_dir():
        return {}
    return {name: tuple(entry.size) for name, entry in _described(folder).items()}


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """Name -> whole tensor, in host memory."""
    tensors = {n: torch.empty(entry.size, dtype=entry.properties.dtype) for n, entry in _described(folder).items()}
    read(folder, tensors)
    return tensors


def _described(folder: Path) -> Mapping[str, TensorStorageMetadata]:
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: entry for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def _files(tensors: Tensors) -> dict[str, int]:
    """Name -> file number, from 1; the same on every process, since names and whole sizes are."""
    numbers, size = {}, 0
    number = 1
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > FILE_BYTES:
            number, size = number + 1, 0
        numbers[name] = number
        size += tensor.nbytes
    return numbers


def _cause(error: CheckpointException) -> BaseException:
    """The OSError of any process, if there is one; else torch's collected error with all stacks."""
    failures = (failure[0] for failure in error.failures.values())
    return next((failure for failure in failures if isinstance(failure, OSError)), error)
