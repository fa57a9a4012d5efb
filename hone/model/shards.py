"""Tensors in files, each process its own part: `torch.distributed.checkpoint` with safetensors, nothing unpickled.

    shards.write(folder, shards.stage(tensors), group)   # every process of the group; plain tensors or DTensors
    shards.read(folder, tensors)                         # in place, into whatever layout these tensors have
    shards.whole(folder)                                 # everything, put together, by name

A file holds the parts of one process, and where in the whole tensor each belongs (`DCP_SHARDING_INFO` in its header):
who reads need not have the layout of who wrote. `.metadata`, which torch's own format keeps beside its files, is a
pickle; the format for Hugging Face has none.
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

#: A file is put together in memory before it is written, so it should not be large.
FILE_BYTES = 1 << 30

Tensors = Mapping[str, torch.Tensor]

# torch says so whenever one process saves by itself, or each reads by itself, as it is meant here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def stage(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Copies in the memory of the host, of this process's parts."""
    copies = BlockingAsyncStager().stage({name: tensor.detach() for name, tensor in tensors.items()})
    return dict(copies)


def write(folder: Path, tensors: Tensors, group: ProcessGroup | None = None) -> None:
    """This process's parts into `folder`, synced to the disk. None without a group: this process is the only one.

    Raises OSError as the disk does.
    """
    if not tensors:
        return
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_files(tensors), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise _cause(error) from error


def read(folder: Path, into: Tensors) -> None:
    """Fill tensors from the files. Every process reads what it needs by itself.

    Raises ValueError for tensors that are not there, or have another shape.
    """
    there = shapes(folder)
    wrong = [name for name, tensor in into.items() if there.get(name) != tuple(tensor.shape)]
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{folder}: {name} is {there.get(name, 'not there')}, and {tuple(into[name].shape)} is needed"
            + (f" (and {len(wrong) - 1} more)" if wrong[1:] else "")
        )
    if into:
        state = {name: tensor.detach() for name, tensor in into.items()}
        load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def is_sharded(folder: str | Path) -> bool:
    """Whether `write` made the files in this folder."""
    return any(Path(folder).glob("shard-*.safetensors"))


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor there; none if there is no such folder."""
    if not folder.is_dir():
        return {}
    return {name: tuple(entry.size) for name, entry in _described(folder).items()}


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor there, in one piece, in the memory of the host."""
    tensors = {n: torch.empty(entry.size, dtype=entry.properties.dtype) for n, entry in _described(folder).items()}
    read(folder, tensors)
    return tensors


def _described(folder: Path) -> Mapping[str, TensorStorageMetadata]:
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def _files(tensors: Tensors) -> dict[str, int]:
    """Name -> number of the file that it goes to, from 1; every process has the same names and whole sizes."""
    numbers, size = {}, 0
    number = 1
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > FILE_BYTES:
            number, size = number + 1, 0
        numbers[name] = number
        size += tensor.nbytes
    return numbers


def _cause(error: CheckpointException) -> BaseException:
    """The error of the disk, on whichever process it was; else torch's collection, with the stack of each."""
    failures = (failure[0] for failure in error.failures.values())
    return next((failure for failure in failures if isinstance(failure, OSError)), error)
