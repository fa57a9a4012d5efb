"""The date that chat templates write into prompts ("Today Date: ..."): one for the whole run, also after it is resumed.

pin(folder)                          # when a run begins: stores today's date in the run folder, unless it has one
with prompt_date(date_of(folder)):   # prompts are rendered with that date
    ...
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from hone.base import sealed
from hone.base.settings import UserError

FILE = "prompt_date.txt"

_EXCHANGED = threading.RLock()  # requests are rendered in several threads

_DATE: ContextVar[datetime.date | None] = ContextVar("hone_prompt_date", default=None)


def pin(folder: Path) -> None:
    """Store today's date as that of the run in `folder`, unless it has one. Raises UserError if it was lost."""
    sealed.require_file(folder, FILE)
    if not (folder / FILE).exists():
        sealed.put(folder, FILE, f"{datetime.date.today().isoformat()}\n")


def date_of(folder: Path) -> datetime.date | None:
    """The date of the run in `folder`, or of its pipeline; None if neither has one. Raises UserError if damaged."""
    for place in (folder, folder.parent):
        sealed.require_file(place, FILE)
        if (place / FILE).is_file():
            text = (place / FILE).read_text(errors="replace").strip()
            try:
                return datetime.date.fromisoformat(text)
            except ValueError as error:
                raise UserError(
                    f"{place / FILE} is damaged (it holds {text[:40]!r}); restore it from a copy, or write the date of "
                    "the run's start into it, such as 2026-01-31"
                ) from error
    return None


def date_for(folder: Path) -> datetime.date:
    """The date of the run in `folder`, else today's."""
    return date_of(folder) or now()


def now() -> datetime.date:
    """The date to render prompts with: the pinned one, else today's."""
    return _DATE.get() or datetime.date.today()


@contextmanager
def templates_dated(date: datetime.date) -> Iterator[None]:
    """Context manager in which `strftime_now` in a chat template returns this date.

    transformers passes that function to templates itself, and would turn one passed as an argument into text; so the
    clock that it reads is replaced.
    """
    from transformers.utils import chat_template_utils as templates

    class Pinned(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Pinned:
            return cls(date.year, date.month, date.day, tzinfo=tz)

    with _EXCHANGED:
        clock = templates.datetime  # type: ignore[attr-defined]
        templates.datetime = Pinned  # type: ignore[attr-defined]
        try:
            yield
        finally:
            templates.datetime = clock  # type: ignore[attr-defined]


@contextmanager
def prompt_date(date: datetime.date | None) -> Iterator[None]:
    """Context manager in which prompts are rendered with this date; None: today's."""
    token = _DATE.set(date)
    try:
        yield
    finally:
        _DATE.reset(token)
