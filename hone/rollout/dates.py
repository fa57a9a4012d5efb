"""The date that chat templates write into prompts ("Today Date: ..."): one for a whole run, also after it was resumed.

pin(folder)                          # when a run begins: remembers today in the run folder, unless it has a date
with prompt_date(date_of(folder)):   # prompts are rendered as on that day
    ...
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

FILE = "prompt_date.txt"

_DATE: ContextVar[datetime.date | None] = ContextVar("hone_prompt_date", default=None)


def pin(folder: Path) -> None:
    """The date of the run in `folder` is that of its start."""
    if not (folder / FILE).exists():
        (folder / FILE).write_text(f"{datetime.date.today().isoformat()}\n")


def date_of(folder: Path) -> datetime.date | None:
    """The date of the run in `folder`, or of the pipeline that it is a stage of. None: it has none."""
    for path in (folder / FILE, folder.parent / FILE):
        if path.is_file():
            return datetime.date.fromisoformat(path.read_text().strip())
    return None


def date_for(folder: Path) -> datetime.date:
    """The date of the run in `folder`; of none, today's."""
    return date_of(folder) or now()


def now() -> datetime.date:
    """The date to render prompts with: the pinned one, else today's."""
    return _DATE.get() or datetime.date.today()


@contextmanager
def prompt_date(date: datetime.date | None) -> Iterator[None]:
    """For the duration prompts are rendered as on this day; None: as today."""
    token = _DATE.set(date)
    try:
        yield
    finally:
        _DATE.reset(token)
