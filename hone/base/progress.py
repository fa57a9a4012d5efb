"""Progress of long work: a bar with the remaining time on a terminal, periodic lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hone.base.visible import visible

#: Seconds between lines without a terminal.
LINE_EVERY = 10.0


class Clock:
    """Measures the seconds of each part of a step."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._parts: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """Add the time since the last lap to `part`."""
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def rest(self) -> None:
        """Discard the time since the last lap."""
        now = time.perf_counter()
        self._start += now - self._last
        self._last = now

    def count(self, parts: Mapping[str, float]) -> None:
        """Add parts of this thread's time that were measured elsewhere."""
        self._parts |= parts
        self._start -= sum(parts.values())

    def beside(self, parts: Mapping[str, float]) -> None:
        """Add parts that another thread spent meanwhile; they do not count towards the total."""
        self._parts |= parts

    @property
    def parts(self) -> dict[str, float]:
        return dict(self._parts)

    def seconds(self) -> dict[str, float]:
        return {"seconds": time.perf_counter() - self._start, **self._parts}


class Track:
    """`total` steps of something called `title`. Use as a context manager."""

    def __init__(
        self, title: str, total: int, done: int = 0, shown: bool = True, poll_stop: Callable[[], None] | None = None
    ) -> None:
        """`shown`: whether this process prints (one of several does). `poll_stop` is called often within a step."""
        self._poll_stop = poll_stop
        self.title, self.total, self.done, self._first, self._shown = title, total, done, done, shown
        self._started = self._said = time.monotonic()
        self._bar: Progress | None = None
        if shown and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(title, total=total, completed=done, note="")
            self._inner = self._bar.add_task("  generating", total=1, visible=False, note="")

    def __enter__(self) -> Track:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()
        elif kind is None and self.done > self._first:
            self._line("done")

    def advance(self, note: str = "") -> None:
        """Count one more finished step and show `note`."""
        self.done += 1
        if self._bar:
            self._bar.update(self._task, completed=self.done, note=visible(note))
            self._bar.update(self._inner, visible=False)
        elif time.monotonic() - self._said >= LINE_EVERY:
            self._line(note)

    def inner(self, done: int, total: int) -> None:
        """Show progress within the step, such as finished sequences."""
        if self._poll_stop is not None:
            self._poll_stop()
        if self._bar:
            self._bar.update(self._inner, completed=done, total=total, visible=done < total)

    def say(self, text: str) -> None:
        """Print a separate line above the bar."""
        text = visible(text)
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self._shown:
            print(text, file=sys.stderr, flush=True)

    def _line(self, note: str) -> None:
        self._said = now = time.monotonic()
        rate = (now - self._started) / max(1, self.done - self._first)
        remaining = rate * (self.total - self.done)
        self.say(
            f"{self.title} {self.done}/{self.total}  {_clock(now - self._started)} left {_clock(remaining)}  {note}"
        )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
