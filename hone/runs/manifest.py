"""The facts needed to reproduce a run: code, versions, hardware, the user's files."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import hone
from hone.grade.targets import source_of


def manifest(seed: int) -> dict[str, Any]:
    """The contents of manifest.json."""
    packages = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "pydantic")
    return {
        "code_version": code_version(),
        "seed": seed,
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in packages}},
        "hardware": {
            "machine": platform.machine(),
            "system": platform.system(),
            "cpus": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def user_files(config: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the files with the user's functions, by their names in the recipe."""
    sources = {name: source_of(name) for name in config.get("reward", {}).get("parts", {}) if ":" in name}
    return {name: hashlib.sha256(source).hexdigest() for name, source in sources.items() if source is not None}


def code_version() -> str:
    """The package version, with the commit when run from a checkout."""
    root = Path(hone.__file__).parent.parent
    if not (root / ".git").exists() or shutil.which("git") is None:
        return hone.__version__
    answer = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=10
    )
    return f"{hone.__version__}+{answer.stdout.strip() or 'unknown'}"
