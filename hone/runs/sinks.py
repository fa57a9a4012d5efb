"""Copies of a run's metrics for TensorBoard, trackio and Weights & Biases: `sinks: [tensorboard]` in a recipe.

Sinks only copy: a thread reads metrics.jsonl and evals.jsonl of the run folder from time to time, independently of
training, and a few answers of every step: as text in TensorBoard, as traces in trackio, and in W&B as one table to
which rows are added. RUN/sinks/NAME.json records what was copied, so that a resumed run continues the same curves
without duplicates. A sink that fails is recorded as an event, and the run continues.

    tensorboard --logdir runs      # RUN/sinks/tensorboard
    trackio show --project hone    # where trackio keeps its data (TRACKIO_DIR)
    wandb sync RUN/sinks/wandb     # with WANDB_MODE=offline; else it is sent during the run
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from hone.base import checksums, jsonl
from hone.base.settings import UserError
from hone.base.visible import visible
from hone.runs.layout import rollout_files
from hone.runs.retention import MEASURES

EVERY = 10.0  # seconds between looks at the run folder
PROJECT = "hone"
_EVAL_NUMBERS = ("response_tokens", "reflection_rate")


#: Answers of a step that are copied: evenly spaced over its groups. `hone view` shows all of them.
SAMPLES = 4
_COLUMNS = ("step", "problem_id", "index", "verdict", "total", "advantage", "tokens", "prompt", "text")


class Sink(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Some rows of rollouts/step_N.jsonl, their text made visible."""
        ...

    def flush(self) -> None:
        """Make sure that what was written survives a kill of the process."""
        ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path, name: str, run_id: str, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step: after a kill, new rows replace those that were written but not recorded as copied
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """TensorBoard reads Markdown, in which indented text is shown as it is."""
        for i, row in enumerate(rows):
            about = f"{row.get('verdict')}, reward {row.get('total')}, {row.get('tokens')} tokens"
            body = "\n".join(f"    {line}" for line in f"{row.get('prompt')}\n{row.get('text')}".split("\n"))
            self.writer.add_text(f"rollouts/{i}", f"    {about}\n\n{body}", step)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB:
    def __init__(self, folder: Path, name: str, run_id: str, first_step: int) -> None:
        import wandb

        (folder / "wandb").mkdir(parents=True, exist_ok=True)
        config = _settings(folder.parent)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=name, id=run_id, resume="allow",
            dir=str(folder / "wandb"), config=config,
        )  # fmt: skip
        self.run.define_metric("*", step_metric="step")
        self.table = wandb.Table(columns=list(_COLUMNS), log_mode="INCREMENTAL")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step, **values})

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self.table.add_data(step, *(row.get(name) for name in _COLUMNS[1:]))
        self.run.log({"step": step, "rollouts": self.table})

    def flush(self) -> None:
        """Nothing to do: wandb writes to its own file immediately."""

    def close(self) -> None:
        self.run.finish()


class Trackio:
    def __init__(self, folder: Path, name: str, run_id: str, first_step: int) -> None:
        import trackio

        self.run = trackio.init(
            project=PROJECT,
            name=f"{name}-{run_id[:6]}",
            resume="allow",
            config=_settings(folder.parent),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import trackio

        for i, row in enumerate(rows):
            messages = [
                {"role": "user", "content": str(row.get("prompt", ""))},
                {"role": "assistant", "content": str(row.get("text", ""))},
            ]
            about = {name: row.get(name) for name in _COLUMNS[1:-2]}
            self.run.log({f"rollouts/{i}": trackio.Trace(messages=messages, metadata=about)}, step=step)

    def flush(self) -> None:
        """Nothing to do: trackio sends its rows within half a second, and closing waits for that."""

    def close(self) -> None:
        self.run.finish()


SINKS: dict[str, Callable[[Path, str, str, int], Sink]] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WandB,
}


def check_installed(names: Iterable[str]) -> None:
    """Raises UserError for a sink whose package is missing."""
    missing = sorted(name for name in names if find_spec(name) is None)
    if missing:
        raise UserError(
            f"sinks: {', '.join(missing)} not installed here; run `pip install {' '.join(missing)}`, or remove it from "
            "the recipe"
        )


class Copy:
    """One run folder and one sink; opened when there is something to copy."""

    def __init__(self, folder: Path, kind: str, name: str) -> None:
        self.folder, self.kind, self.name = folder, kind, name
        self.path = folder / "sinks" / f"{kind}.json"
        remedy = f"remove it, and all is copied again, to a new run of {kind}"
        state: Mapping[str, Any] = checksums.read_json(self.path, dict, remedy) if self.path.exists() else {}
        self.run_id: str = state.get("id") or uuid.uuid4().hex[:12]
        self.last: int = state.get("last_step", -1)  # of metrics.jsonl
        self.evals: list[str] = state.get("evals", [])  # "label step" of those copied
        self.last_rollouts: int = state.get("last_rollouts", self.last)
        self.sink: Sink | None = None

    def copy(self) -> int:
        """Copy new rows; returns their number."""
        rows = [
            (row["step"], _numbers(row)) for row in jsonl.read(self.folder / "metrics.jsonl") if row["step"] > self.last
        ]
        evals = [(f"{row['label']} {row['step']}", row) for row in jsonl.read(self.folder / "evals.jsonl")]
        evals = [(key, row) for key, row in evals if key not in self.evals]
        samples = [(step, path) for step, path in rollout_files(self.folder) if step > self.last_rollouts]
        if not rows and not evals and not samples:
            return 0
        if self.sink is None:
            self.sink = SINKS[self.kind](self.folder / "sinks", self.name, self.run_id, self.last + 1)
        both = [(row["step"], _eval_numbers(row)) for _, row in evals] + rows
        for step, values in sorted(both, key=lambda pair: pair[0]):
            self.sink.write(step, values)
        for step, path in samples:
            self.sink.write_samples(step, some_of(jsonl.read(path)))
        self.sink.flush()
        self.last = max([self.last, *(step for step, _ in rows)])
        self.last_rollouts = max([self.last_rollouts, *(step for step, _ in samples)])
        self.evals += [key for key, _ in evals]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        state = {"id": self.run_id, "last_step": self.last, "evals": self.evals, "last_rollouts": self.last_rollouts}
        jsonl.replace(self.path, json.dumps(state))
        return len(both)

    def close(self) -> None:
        if self.sink is not None:
            self.sink.close()


@contextlib.contextmanager
def copying(folder: Path, kinds: Sequence[str], name: str) -> Iterator[None]:
    """Context manager that copies while its block runs, and once more at its end."""
    if not kinds:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=_work, args=(folder, dict.fromkeys(kinds), name, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=120)  # a service that hangs does not block the run


def _work(folder: Path, kinds: Iterable[str], name: str, stop: threading.Event) -> None:
    copies = [Copy(folder, kind, name) for kind in kinds]
    while copies:
        ended = stop.wait(EVERY)
        for copy in list(copies):
            try:
                copy.copy()
                if ended:
                    copy.close()
            except Exception as error:  # the network or the service's code failed: the run continues without it
                copies.remove(copy)
                _failed(folder, copy.kind, error)
        if ended:
            return


def some_of(rows: Sequence[Mapping[str, Any]], count: int = SAMPLES) -> list[dict[str, Any]]:
    """At most `count` of the rows, evenly spaced from the first on; invisible characters in text are made visible."""
    chosen = [rows[i * len(rows) // count] for i in range(count)] if len(rows) > count else rows
    return [{name: visible(v) if isinstance(v, str) else v for name, v in row.items()} for row in chosen]


def _failed(folder: Path, kind: str, error: Exception) -> None:
    message = (
        f"{kind}: {type(error).__name__}: {str(error)[:300]}; nothing more is copied there until the run is resumed"
    )
    print(visible(f"[sink_failed] {message}"), file=sys.stderr, flush=True)
    jsonl.append(folder / "events.jsonl", {"step": None, "kind": "sink_failed", "message": message})


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in row.items()
        if key != "step" and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }


def _eval_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    prefix = f"eval/{row['label']}"
    numbers: dict[str, float] = {}
    for name in (name for name in MEASURES if name in row):
        numbers |= {f"{prefix}/{name}": row[name]["value"]}
        numbers |= {f"{prefix}/{name}_{end}": row[name][end] for end in ("low", "high")}
    numbers |= {f"{prefix}/{key}": row[key] for key in _EVAL_NUMBERS if key in row}
    return _numbers(numbers)


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "config.resolved.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}
