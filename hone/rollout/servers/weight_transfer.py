"""Transfer of weights to a server, in folders that are complete or absent.

transfer = WeightTransfer(Path("serving"), adapter=True)
first = transfer.export(policy, version=0)    # serving/base_000 and serving/adapter_000000
second = transfer.export(policy, version=1)   # the same base, serving/adapter_000001
transfer.drop(first, second)                  # the server holds the second: serving/adapter_000000 goes
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hone.learn.policy import Policy


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """Exported weights for a server: a whole model, or an adapter and its base."""

    version: int
    model: Path  # a plain Hugging Face checkpoint
    adapter: Path | None = None  # in peft's format; `model` is then its base
    rank: int = 0  # of the adapter

    @property
    def folders(self) -> set[Path]:
        return {self.model} | ({self.adapter} if self.adapter else set())


class WeightTransfer:
    """Exports weights for a server. `adapter`: export adapters alone, and their base only when a hard reset made a new
    one; else merge them."""

    def __init__(self, folder: Path, *, adapter: bool = False) -> None:
        self._folder, self._adapter = folder, adapter
        self._clean = False

    def export(self, policy: Policy, version: int) -> ServedWeights:
        if not self._clean:  # remove the weights of an earlier run
            for old in (path for kind in ("version", "base", "adapter") for path in self._folder.glob(f"{kind}_*")):
                shutil.rmtree(old)
            self._clean = True
        if not self._adapter or policy.lora is None:
            return ServedWeights(version, self._write(f"version_{version:06d}", policy.export))
        base = self._folder / f"base_{len(policy.resets):03d}"
        if not base.exists():
            self._write(base.name, policy.export_base)
        adapter = self._write(f"adapter_{version:06d}", policy.export_adapter)
        return ServedWeights(version, base.resolve(), adapter, policy.lora.rank)

    def drop(self, old: ServedWeights, new: ServedWeights | None = None) -> None:
        """Remove the old weights that the new ones do not use."""
        for folder in old.folders - (new.folders if new else set()):
            shutil.rmtree(folder, ignore_errors=new is None)  # at the end of a run they may be gone

    def _write(self, name: str, export: Callable[[Path], None]) -> Path:
        """Export into a folder of that name, atomically."""
        final, aside = self._folder / name, self._folder / f".writing_{name}"
        for partial in self._folder.glob(".writing_*"):
            shutil.rmtree(partial)
        aside.mkdir(parents=True)
        export(aside)
        if final.exists():  # the same version again, as after a refused sync
            shutil.rmtree(final)
        os.replace(aside, final)
        return final.resolve()
