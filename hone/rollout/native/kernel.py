"""Decode attention in C++ (`decode.cpp`), compiled on this machine at first use, which takes a few seconds.

Computes `attention.decode_attention` in one pass over the keys and values. PyTorch's batched products stream them at a
third of what one core can read, and here a row's result does not depend on the other rows. CPU, float32.

    kernel = load()                   # raises CannotCompile with the reason
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from hone.model.scoring import Scoring

SOURCE = Path(__file__).with_name("decode.cpp")
HEAD_SIZES = (16, 32, 48, 64, 80, 96, 112, 128, 192, 256, 512)
ROWS_PER_THREAD = 16  # fewer are not worth another thread
COMPILE_SECONDS = 120.0

_log = logging.getLogger(__name__)


class CannotCompile(Exception):
    """The kernel cannot be compiled on this machine; the message says why."""


class Kernel:
    """`decode.cpp`, loaded."""

    compile_seconds: float | None = None  # if this process has compiled it

    def __init__(self, library: Path, compile_seconds: float | None = None) -> None:
        self.compile_seconds = compile_seconds
        self._call = ctypes.CDLL(str(library)).hone_decode_attention
        self._call.argtypes = [ctypes.c_void_p] * 12 + [ctypes.c_int64] * 11 + [ctypes.c_float] * 2
        self._call.restype = ctypes.c_int
        self._threads: ThreadPoolExecutor | None = None

    @staticmethod
    def fits(query: Tensor, value: Tensor) -> bool:
        """Whether it was compiled for these sizes: query [..., D], value [..., Dv]."""
        known = query.shape[-1] in HEAD_SIZES and value.shape[-1] in HEAD_SIZES
        return query.device.type == "cpu" and query.dtype == torch.float32 and known

    def __call__(
        self,
        query: Tensor,  # [B, H, 1, D]
        prompt: tuple[Tensor, Tensor],  # keys [Hkv, P, Lp, D] and values [Hkv, P, Lp, Dv]
        suffix: tuple[Tensor, Tensor],  # keys [Hkv, B, capacity, D] and values [Hkv, B, capacity, Dv]
        rows: Tensor,  # [4, B] int64: the prompt's place, first position seen in it, its length, first column seen
        end: int,  # one past the last column
        scoring: Scoring,  # its window is already in `rows`
    ) -> Tensor:
        """Returns [B, 1, H, Dv]."""
        batch, heads, _, size = query.shape
        kv_heads, prompts, longest, _ = prompt[0].shape
        value_size = prompt[1].shape[-1]
        if suffix[0].shape[-1] != size or prompt[0].shape[-1] != size or suffix[1].shape[-1] != value_size:
            raise ValueError("the kernel needs keys of the query's size and values of one size")
        query = query.contiguous()
        out = query.new_empty(batch, 1, heads, value_size)
        shape = (batch, prompts, kv_heads, heads // kv_heads, size, value_size, longest, suffix[0].shape[2], end)
        sinks = None if scoring.sinks is None else scoring.sinks.detach().float().contiguous()
        tensors = (query, *prompt, *suffix)
        assert all(x.is_contiguous() for x in (*tensors, rows)), "the kernel needs dense arrays"
        pointers = [x.data_ptr() for x in (*tensors, *rows.unbind(0))]
        pointers += [0 if sinks is None else sinks.data_ptr(), out.data_ptr()]

        def some(first: int, last: int) -> None:
            work = query.new_empty(4 * (longest + end))
            if self._call(*pointers, work.data_ptr(), first, last, *shape, scoring.scaling, scoring.softcap or 0.0):
                raise ValueError(f"head sizes {size} and {value_size} are not of {HEAD_SIZES}")

        shares = max(1, min(torch.get_num_threads(), batch // ROWS_PER_THREAD))
        bounds = [batch * i // shares for i in range(shares + 1)]
        if self._threads is None and shares > 1:
            self._threads = ThreadPoolExecutor(torch.get_num_threads() - 1, "hone-decode")
        others = [self._threads.submit(some, *b) for b in pairwise(bounds[1:])] if self._threads else []
        some(0, bounds[1])
        for other in others:
            other.result()
        return out


@functools.cache
def load() -> Kernel:
    """The kernel, compiled at first use on this machine. Raises CannotCompile."""
    compiler = os.environ.get("CXX") or "c++"
    path = shutil.which(compiler)
    if path is None:
        raise CannotCompile(f"there is no C++ compiler ({compiler})")
    command = [path, *_flags(platform.machine())]
    key = [SOURCE.read_text(), *command, _run([path, "--version"]), platform.platform(), _cpu()]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hone"
    library = folder / f"decode-{hashlib.sha256(chr(0).join(key).encode()).hexdigest()[:24]}.so"
    seconds = None
    if not library.exists():
        started = time.monotonic()
        _log.info("compiling the decode kernel, once for this machine: some seconds")  # never within an answer's output
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as aside:
                made = Path(aside) / library.name
                _run([*command, str(SOURCE), "-o", str(made)])
                made.replace(library)  # atomically: another process may look for it
            seconds = time.monotonic() - started
        except OSError as error:
            raise CannotCompile(f"{folder} cannot be written: {error}") from error
    try:
        return Kernel(library, seconds)
    except OSError as error:
        raise CannotCompile(f"{library} cannot be loaded: {error}") from error


def _flags(machine: str) -> Sequence[str]:
    """Reordered sums are allowed, since vectorising needs them; infinities and subnormals behave as usual."""
    here = ("-march=native", "-mprefer-vector-width=512") if machine in ("x86_64", "AMD64") else ("-mcpu=native",)
    reorder = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-freciprocal-math", "-fno-math-errno")
    return "-std=c++17", "-O3", "-fPIC", "-shared", "-Wno-psabi", *here, *reorder


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"{command[0]}: {error}") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["nothing"])[0]
        raise CannotCompile(f"{command[0]} failed with exit code {done.returncode}: {reason}")
    return done.stdout


def _cpu() -> str:
    """The CPU that the code is compiled for: machines of different kinds may share the folder."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    lines = info.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
