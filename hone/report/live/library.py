"""The runs that a page shows: their list, their state, and the index of each stage.

    library = Library.at(Path("runs"))          # a folder of runs; or one run: Path("runs/demo")
    library.summaries()                         # the list of runs
    library.stage("demo", "rl").browser         # the rollouts of a stage, indexed in the background while it is viewed

Nothing is written to a run. Paths are resolved and must lie inside the run that they belong to.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hone.base.settings import UserError
from hone.base.visible import visible
from hone.report.live.index import RolloutIndex, Row, index_file
from hone.report.live.query import Browser
from hone.report.live.tail import read_from
from hone.report.live.views import number
from hone.report.read import ROUTINE, WARNINGS
from hone.report.why import weights_of
from hone.runs import listing
from hone.runs.layout import inside
from hone.runs.retention import MEASURES, measured

#: Seconds between two refreshes of a stage that is being viewed, and how long after the last request it counts as
#: viewed.
EVERY, VIEWED = 2.0, 30.0
#: While nothing changes, looking takes at most this share of a core, but is repeated after `MOST` seconds.
SHARE, MOST = 0.002, 10.0
#: Files of rows that a page may ask for.
ROW_FILES = ("metrics", "timings", "evals", "events", "costs")
#: Points of a sparkline, and steps over which the rate is measured.
SPARK, RATE_STEPS = 60, 10
#: The name, in addresses, of the only stage of a run without stages.
ONLY = "-"


class Series:
    """The rows of one file that grows, reduced to some columns, and its last row."""

    def __init__(self, folder: Path, file: str, names: tuple[str, ...]) -> None:
        self.folder, self.file, self.names = folder, file, names
        self.columns: dict[str, list[Any]] = {name: [] for name in names}
        self.last: Row = {}
        self._offset = self._mark = 0

    def refresh(self) -> None:
        while True:
            piece = read_from(self.folder, self.file, self._offset, self._mark)
            if piece.again:
                self.columns, self.last = {name: [] for name in self.names}, {}
            for row in piece.rows:
                for name, column in self.columns.items():
                    column.append(row.get(name))
                self.last = row
            self._offset, self._mark = piece.offset, piece.mark
            if not piece.more:
                return


class StageFolder:
    """One stage: its settings and rows, and its rollouts, which are indexed in a thread while it is viewed."""

    def __init__(self, name: str, folder: Path, run: Path, kind: str = "") -> None:
        self.name, self.folder, self.run, self._kind = name, folder, run, kind
        self.metrics = Series(folder, "metrics.jsonl", ("step", "reward/mean", "accuracy", "loss"))
        self.timings = Series(folder, "timings.jsonl", ("seconds",))
        self.evals = Series(folder, "evals.jsonl", ("label", "step", *MEASURES))
        self._browser: Browser | None = None
        self._asked = 0.0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.trouble = ""  # why the rollouts could not be indexed

    @property
    def config(self) -> Row:
        return read_object(self.folder, "config.resolved.json")

    @property
    def weights(self) -> dict[str, float]:
        """The parts of the reward and their weights."""
        return weights_of(self.config)

    @property
    def checkpoints(self) -> list[int]:
        """Steps whose checkpoint is there."""
        names = (re.fullmatch(r"step_(\d+)", path.name) for path in (self.folder / "checkpoints").glob("step_*"))
        return sorted(int(name[1]) for name in names if name)

    @property
    def browser(self) -> Browser:
        """The rollouts; each access keeps the index up to date for a while."""
        with self._lock:
            self._asked = time.monotonic()
            if self._browser is None:
                self._browser = Browser(RolloutIndex(self.folder, index_file(self.folder)))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._index, args=(self._browser.index,), daemon=True)
                self._thread.start()
            return self._browser

    def _index(self, index: RolloutIndex) -> None:
        while time.monotonic() - self._asked < VIEWED:
            began, changed = time.thread_time(), False
            try:
                changed = index.refresh()
                self.trouble = ""
            except OSError as error:  # the disk may be readable later; the page shows the error
                self.trouble = f"the rollouts cannot be read: {error}"
            used = time.thread_time() - began
            time.sleep(EVERY if changed else min(MOST, max(EVERY, used / SHARE)))

    def summary(self) -> Row:
        for series in (self.metrics, self.timings, self.evals):
            series.refresh()
        config, steps = self.config, self.metrics.columns["step"]
        kind = str(config.get("stage") or self._kind or "?")
        planned = config.get("steps") if kind in ("rl", "distil") else None
        done = steps[-1] + 1 if steps and isinstance(steps[-1], int) else 0
        label = "reward/mean" if kind in ("rl", "distil") else "loss"
        return {
            "name": self.name,
            "kind": kind,
            "started": (self.folder / "manifest.json").is_file(),
            "finished": (self.folder / "model").is_dir(),
            "done": done,
            "planned": planned if isinstance(planned, int) else None,
            "seconds_left": self._seconds_left(planned, done),
            "spark": {"name": label, "values": _thinned(self.metrics.columns[label])},
            "reward": self.metrics.last.get("reward/mean"),
            "validation": self._validation(),
            "rollouts": (self.folder / "rollouts").is_dir(),
        }

    def _seconds_left(self, planned: object, done: int) -> float | None:
        recent = [s for s in self.timings.columns["seconds"][-RATE_STEPS:] if isinstance(s, (int, float))]
        if not isinstance(planned, int) or not recent:
            return None
        return round(max(0, planned - done) * sum(recent) / len(recent), 1)

    def _validation(self) -> Row | None:
        """The latest evaluation: its interval, what it measured, its label and step."""
        names = ("label", "step", *MEASURES)
        rows = [dict(zip(names, row)) for row in zip(*(self.evals.columns[name] for name in names))]
        rows = [row for row in rows if row["label"] in ("validation", "after", "before")]
        if not rows:
            return None
        latest = rows[-1]
        measure = measured({name: latest[name] for name in MEASURES if isinstance(latest[name], dict)})
        if measure is None:
            return None
        return {**measure[1], "measure": measure[0], "label": latest["label"], "step": latest["step"]}


class Library:
    """The runs of a folder, or a single one, which need not exist yet."""

    def __init__(self, root: Path, only: str | None = None) -> None:
        self.root, self.only = root, only
        self._stages: dict[Path, StageFolder] = {}
        self._lock = threading.Lock()

    @classmethod
    def at(cls, path: Path) -> Library:
        """A folder of runs, or a run, which `hone train` may create later. Raises UserError for a file."""
        path = path.expanduser().resolve()
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file; give a run folder, or the folder that contains the runs")
        if listing.is_run(path) or not path.exists():
            return cls(path.parent, path.name)
        return cls(path)

    def runs(self) -> dict[str, Path]:
        """Run folders by the name that is shown."""
        if self.single is not None:
            return {visible(self.single): self.root / self.single}
        folder = self.root if self.only is None else self.root / self.only
        return {visible(path.name): path for path in listing.runs_in(folder)}

    @property
    def single(self) -> str | None:
        """The name of the only run; None if there may be several. A missing folder may become a folder of runs."""
        if self.only is None:
            return None
        folder = self.root / self.only
        several = folder.is_dir() and not listing.is_run(folder) and bool(listing.runs_in(folder))
        return None if several else self.only

    def folder_of(self, run: str) -> Path:
        """The folder of a run by the name that is shown. Raises UserError if there is no such run."""
        if self.single is None:  # by its name, so that a request about one run does not list them all
            folder = (self.root if self.only is None else self.root / self.only) / run
            if folder.name == run == visible(run) and not run.startswith(".") and listing.is_run(folder):
                return folder
        listed = self.runs().get(run)
        if listed is None:
            raise UserError(f"no run {run} in {self.root}")
        return listed

    def stages(self, run: str) -> list[StageFolder]:
        """The stages of a run in order. Raises UserError if there is no such run."""
        folder = self.folder_of(run)
        stages = [(ONLY, folder, "")]
        listed = read_objects(folder, "stages.json")
        if listed:
            stages = [(str(row.get("name")), folder / str(row.get("folder")), str(row.get("kind"))) for row in listed]
        own = [one for one in stages if one[1].resolve().is_relative_to(folder.resolve())]
        with self._lock:
            for name, path, kind in own:
                self._stages.setdefault(path, StageFolder(visible(name), path, folder, kind))
            return [self._stages[path] for _, path, _ in own]

    def stage(self, run: str, stage: str) -> StageFolder:
        """A stage of a run. Raises UserError if there is no such stage."""
        for one in self.stages(run):
            if one.name == stage:
                return one
        raise UserError(f"run {run} has no stage {stage}")

    def summary(self, run: str) -> Row:
        """State of a run and of its stages."""
        folder, stages = self.folder_of(run), self.stages(run)
        newest = max((modified(stage.folder / "metrics.jsonl") for stage in stages), default=0.0)
        newest = newest or modified(folder)
        return {
            "name": run,
            "state": listing.state(folder) if listing.is_run(folder) else "waiting",
            "since": round(newest, 1),
            "now": round(time.time(), 1),
            "warnings": sorted(WARNINGS),
            "routine": sorted(ROUTINE),
            "stages": [stage.summary() for stage in stages],
        }

    def summaries(self) -> list[Row]:
        """All runs, the most recently written first."""
        return sorted((self.summary(name) for name in self.runs()), key=lambda row: -float(row["since"]))


def read_object(folder: Path, name: str) -> Row:
    """The object in a JSON file; empty if it is absent, or unreadable because it is being written or damaged."""
    value = _read_json(folder, name)
    return value if isinstance(value, dict) else {}


def read_objects(folder: Path, name: str) -> list[Row]:
    """The objects of a JSON list; empty if it is absent or unreadable."""
    value = _read_json(folder, name)
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _read_json(folder: Path, name: str) -> Any:
    path = inside(folder, name)
    try:
        return None if path is None else json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return None


def modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _thinned(values: list[Any]) -> list[float | int | None]:
    """At most `SPARK` values, evenly spaced, including the last."""
    numbers = [value if isinstance(value, (int, float)) else None for value in values]
    width = max(1, -(-len(numbers) // SPARK))
    kept = numbers[::-width][::-1]
    return [None if value is None else number(float(value)) for value in kept]


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted keys; lists stay whole."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values
