"""`hone doctor`: checks whether this machine is ready, and says what to do if it is not.

ok    torch          2.13.0, 2 threads, cpu (AVX512)
warn  disk           3.1 GB free in .; checkpoints and rollouts need 5 GB: free some, or set runs=/another/disk
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from hone.base.extras import needed

#: extra -> the modules that it installs
EXTRAS = {
    "lora": ("peft",),
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "ray": ("ray",),
    "math": ("math_verify",),
    "gym": ("reasoning_gym",),
    "serve": ("starlette", "uvicorn"),
    "data": ("datasets",),
    "sinks": ("wandb", "tensorboard", "trackio"),
}

LOWEST_PYTHON = (3, 10)

#: package -> (lowest version, first version that is too new)
RANGES = {"torch": ((2, 11), None), "transformers": ((5, 17), (6,)), "pydantic": ((2, 8), None)}

SLOW_GFLOPS = 10.0  # a single modern core with a good BLAS reaches 50 or more in float32


@dataclass(frozen=True)
class Diagnosis:
    name: str
    level: Literal["ok", "warn", "fail"]
    text: str  # the state; for warn and fail also the remedy


def examine() -> int:
    """Print one line per check. Returns the exit code: 1 if anything failed."""
    worst = 0
    for check in CHECKS:
        for finding in check():
            print(f"{finding.level:5} {finding.name:14} {finding.text}", flush=True)
            worst |= finding.level == "fail"
    return int(worst)


def python() -> Iterator[Diagnosis]:
    text = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info[:2] < LOWEST_PYTHON:
        yield Diagnosis("python", "fail", f"{text}; hone needs 3.10 or newer: make a new environment with it")
    else:
        yield Diagnosis("python", "ok", text)


def packages() -> Iterator[Diagnosis]:
    """Versions, without importing anything heavy."""
    for name, (lowest, too_new) in RANGES.items():
        wanted = f">={_dotted(lowest)}" + (f",<{_dotted(too_new)}" if too_new else "")
        remedy = f"pip install '{name}{wanted}'"
        try:
            installed = version(name)
        except PackageNotFoundError:
            yield Diagnosis(name, "fail", f"not installed: {remedy}")
            continue
        number = tuple(int(part) for part in installed.split("+")[0].split(".")[:2] if part.isdecimal())
        if number < lowest or (too_new and number >= too_new):
            yield Diagnosis(name, "fail", f"{installed}, hone works with {wanted}: {remedy}")
        else:
            yield Diagnosis(name, "ok", installed)


def extras() -> Iterator[Diagnosis]:
    there = [name for name, modules in EXTRAS.items() if all(map(importlib.util.find_spec, modules))]
    absent = [name for name in EXTRAS if name not in there]
    text = f"installed: {', '.join(there) or 'none'}"
    if absent:
        text += f"; not needed until used: {', '.join(absent)} ({needed(absent[0])})"
    yield Diagnosis("extras", "ok", text)


def device() -> Iterator[Diagnosis]:
    """Import torch and multiply matrices: a wrong build or a slow BLAS is noticed here, not after an hour."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of another build or CUDA version
        yield Diagnosis("device", "fail", f"torch does not import ({error}); install it again for this machine")
        return
    threads, cores = (
        torch.get_num_threads(),
        len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
    )
    text = f"{threads} threads, {torch.backends.cpu.get_cpu_capability()}"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        text = f"cuda: {', '.join(names)}; {text}"
        if not torch.cuda.is_bf16_supported():
            yield Diagnosis("bfloat16", "warn", "not supported by this GPU; hone computes in float32")
    elif shutil.which("nvidia-smi"):
        remedy = "install a CUDA build of torch, or check `nvidia-smi`"
        yield Diagnosis(
            "device", "warn", f"an NVIDIA driver is here, but torch {torch.__version__} sees no GPU; {remedy}"
        )
    if cores and threads > cores:
        yield Diagnosis(
            "threads", "warn", f"{threads} threads on {cores} cores slow each other down: set OMP_NUM_THREADS={cores}"
        )
    yield Diagnosis("device", "ok", f"{text}" if "cuda" in text else f"cpu; {text}")
    x = torch.randn(768, 768)
    x @ x
    start = time.perf_counter()
    for _ in range(5):
        x @ x
    speed = 5 * 2 * 768**3 / (time.perf_counter() - start) / 1e9
    if speed < SLOW_GFLOPS:
        remedy = "if the machine is not busy, install torch from its official wheels"
        yield Diagnosis("speed", "warn", f"{speed:.0f} GFLOP/s in float32 is slow; {remedy}")
    else:
        yield Diagnosis("speed", "ok", f"{speed:.0f} GFLOP/s in float32")


def compiler() -> Iterator[Diagnosis]:
    """Checks the kernel for generation on a CPU; compiles it on first use."""
    from hone.rollout.native import kernel

    try:
        kernel.load()
    except kernel.CannotCompile as reason:
        remedy = "install a C++ compiler (c++), or set rollout.compiled: false"
        yield Diagnosis("compiler", "warn", f"generation on a CPU is slower without its kernel: {reason}; {remedy}")
    else:
        yield Diagnosis("compiler", "ok", "the kernel of generation on a CPU is compiled")


def disk() -> Iterator[Diagnosis]:
    free = shutil.disk_usage(".").free / 1e9
    text = f"{free:.1f} GB free in {Path.cwd()}"
    if free < 5:
        remedy = "free some, or put runs on another disk: runs=/path"
        yield Diagnosis("disk", "fail" if free < 1 else "warn", f"{text}; checkpoints and rollouts need 5 GB: {remedy}")
    else:
        yield Diagnosis("disk", "ok", text)


def memory() -> Iterator[Diagnosis]:
    import psutil

    free = psutil.virtual_memory().available / 1e9
    if free < 3:
        remedy = "close other programs, or lower tokens_per_microbatch and rollout.max_sequences"
        yield Diagnosis(
            "memory", "fail" if free < 1 else "warn", f"{free:.1f} GB available, the demo needs 3 GB: {remedy}"
        )
    else:
        yield Diagnosis("memory", "ok", f"{free:.1f} GB available")


def writable() -> Iterator[Diagnosis]:
    folder = Path("runs") if Path("runs").is_dir() else Path()
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        remedy = "change its permissions, or put runs elsewhere: runs=/path"
        yield Diagnosis("runs", "fail", f"{folder.resolve()} cannot be written to ({error.strerror}); {remedy}")
    else:
        yield Diagnosis("runs", "ok", f"{Path('runs').resolve()} is writable")


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


CHECKS: tuple[Callable[[], Iterator[Diagnosis]], ...] = (
    *(python, packages, extras),
    *(device, compiler, disk, memory, writable),
)
