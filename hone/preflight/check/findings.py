"""The results of checks, and how they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the result; a warning or failure says what to change."""

    level: Level
    name: str
    message: str
    subject: str = ""  # what it is about; only the first finding about a subject is shown


def distinct(findings: Iterable[Finding]) -> list[Finding]:
    """Merge the findings of several problems: one per subject, and no pass of a check that failed or warned."""
    all_ = list(findings)
    worse = {f.name for f in all_ if f.level != "pass"}
    first = {(f.level, f.name, f.subject): f for f in reversed(all_) if f.level != "pass" or f.name not in worse}
    return [f for f in all_ if first.get((f.level, f.name, f.subject)) is f]


def lines(findings: Sequence[Finding]) -> str:
    """One line per finding, and a last line with the counts."""
    width = max(len(f.name) for f in findings)
    shown = [f"{'FAIL' if f.level == 'fail' else f.level}  {f.name:{width}}  {f.message}" for f in findings]
    counts = [f"{sum(f.level == level for f in findings)} {level}" for level in ("pass", "warn", "fail")]
    return "\n".join([*shown, ", ".join(counts)])
