"""The turns of many conversations: each prompt may be given as soon as it is known, while others are being answered.

    with open_turns(engine, sampling, seed) as turns:
        turns.submit([Prompt(ids, stream=0, speakers=((0, 0), (0, 1)))])      # two samples of one prompt
        while ended := turns.ended():                                         # [(speaker, turn), ...]
            turns.submit([...])                                               # their next prompts

The native engine keeps the keys and values of a conversation that waits (`hone.rollout.native.conversations`). With
other engines turns are sampled in rounds, and a server's prefix cache does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from hone.recipe.sections.rollout import SamplingConfig
from hone.types import IntArray, Turn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hone.rollout.engine import Engine

Speaker = tuple[int, int]  # (p, g): the conversation of sample g of problem p

#: Called with the number of turns that have ended since `Turns.ended` returned.
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The next prompt of a conversation, or the first one of several.

    Speaker g of `speakers` uses the random numbers of (seed, stream, g, token position).
    """

    ids: IntArray  # [Lp]
    stream: int
    speakers: tuple[Speaker, ...]
    max_tokens: int | None = None  # of this turn, where fewer than those of the batch
    stop: tuple[str, ...] = ()  # strings that end this turn, beside those of the batch

    def sampling(self, batch: SamplingConfig) -> SamplingConfig:
        """How this turn is sampled, in a batch with these settings."""
        if self.max_tokens is None and not self.stop:
            return batch
        most = batch.max_tokens if self.max_tokens is None else min(self.max_tokens, batch.max_tokens)
        stops = tuple(dict.fromkeys((*batch.stop, *self.stop)))
        return batch.model_copy(update={"max_tokens": most, "stop": stops})


class Turns(Protocol):
    @property
    def running(self) -> int:
        """Turns that were submitted and have not ended."""
        ...

    def submit(self, prompts: Sequence[Prompt]) -> None: ...

    def ended(self) -> list[tuple[Speaker, Turn]]:
        """Sample until some turns have ended, and return them; empty only if none is running.

        Which turns end together depends on nothing but prompts, random numbers and settings.
        """
        ...

    def forget(self, speaker: Speaker) -> None:
        """End a conversation."""
        ...


@runtime_checkable
class Continues(Protocol):
    """An engine that continues other conversations while one waits."""

    def turns(
        self, sampling: SamplingConfig, seed: int, keep: bool, progress: Progress | None
    ) -> AbstractContextManager[Turns]: ...


def open_turns(
    engine: Engine, sampling: SamplingConfig, seed: int, *, keep: bool = True, progress: Progress | None = None
) -> AbstractContextManager[Turns]:
    """The turns of a batch of conversations. `keep`: whether a conversation may have another turn."""
    if isinstance(engine, Continues):
        return engine.turns(sampling, seed, keep, progress)
    return in_rounds(engine, sampling, seed, progress)


@contextmanager
def in_rounds(engine: Engine, sampling: SamplingConfig, seed: int, progress: Progress | None = None) -> Iterator[Turns]:
    """Turns of an engine that answers all prompts before it returns: each conversation is read again in every turn."""
    yield _Rounds(engine, sampling, seed, progress)


class _Rounds:
    """Implements `Turns`."""

    def __init__(self, engine: Engine, sampling: SamplingConfig, seed: int, progress: Progress | None) -> None:
        self._engine, self._sampling, self._seed = engine, sampling, seed
        self._progress = progress
        self._waiting: list[Prompt] = []

    @property
    def running(self) -> int:
        return sum(len(prompt.speakers) for prompt in self._waiting)

    def submit(self, prompts: Sequence[Prompt]) -> None:
        self._waiting += prompts

    def ended(self) -> list[tuple[Speaker, Turn]]:
        """The turns of all prompts; those with equally many samples and the same settings are sampled together."""
        waiting, self._waiting = self._waiting, []
        turns: list[tuple[Speaker, Turn]] = []
        kinds = dict.fromkeys((len(prompt.speakers), prompt.sampling(self._sampling)) for prompt in waiting)
        for samples, sampling in sorted(kinds, key=lambda kind: kind[0], reverse=True):
            some = [p for p in waiting if (len(p.speakers), p.sampling(self._sampling)) == (samples, sampling)]
            groups = self._engine.generate(
                [prompt.ids for prompt in some],
                sampling,
                samples=samples,
                seed=self._seed,
                progress=None if self._progress is None else _shifted(self._progress, len(turns)),
                stream_ids=[prompt.stream for prompt in some],
            )
            for prompt, group in zip(some, groups, strict=True):
                turns += zip(prompt.speakers, group, strict=True)
        return turns

    def forget(self, speaker: Speaker) -> None:
        pass


def _shifted(progress: Progress, before: int) -> Callable[[int, int], None]:
    return lambda done, _: progress(before + done)
