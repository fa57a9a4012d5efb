"""The turns of conversations in one running batch: the next prompt of one enters while others are decoded.

What was read of a conversation that waits is kept (`kept`), so that its next prompt costs what it adds. Implements
`hone.rollout.turns.Turns`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.native.core import Core
from hone.rollout.native.requests import Request, Work
from hone.rollout.turns import Progress, Prompt, Speaker
from hone.types import IntArray, Turn


class Conversations:
    """`keep`: whether conversations that wait are kept."""

    def __init__(
        self, core: Core, sampling: SamplingConfig, seed: int, keep: bool, progress: Progress | None = None
    ) -> None:
        self.core = core
        self._sampling, self._seed, self._keep, self._progress = sampling, seed, keep, progress
        self._speaker: dict[Work, Speaker] = {}  # of the turns that are running
        self._last: dict[Speaker, tuple[Work, Turn]] = {}  # the last turn of a conversation that may be kept

    @property
    def running(self) -> int:
        return len(self._speaker)

    def submit(self, prompts: Sequence[Prompt]) -> None:
        requests = [
            Request(
                prompt.ids,
                prompt.sampling(self._sampling),
                self._seed,
                prompt.stream,
                len(prompt.speakers),
                keep=self._keep,
                after=self._continued(prompt),
            )
            for prompt in prompts
        ]
        for number, prompt in zip(self.core.submit(requests), prompts, strict=True):
            self._speaker |= {(number, g): speaker for g, speaker in enumerate(prompt.speakers)}

    def ended(self) -> list[tuple[Speaker, Turn]]:
        """The turns that have ended by the next time that rows are replaced."""
        ended: list[tuple[Speaker, Turn]] = []
        while self.core.busy and not (ended and self.core.due):
            for output in self.core.step():
                if output.turn is None:
                    continue
                work = output.request, output.sample
                speaker = self._speaker.pop(work)
                ended.append((speaker, output.turn))
                if self._keep:
                    self._last[speaker] = work, output.turn
            if self._progress is not None and ended:
                self._progress(len(ended))
        return ended

    def forget(self, speaker: Speaker) -> None:
        if speaker in self._last:
            work, _ = self._last.pop(speaker)
            self.core.forget(work)

    def _continued(self, prompt: Prompt) -> Work | None:
        """The sample whose prompt and tokens the prompt begins with; None: it is another conversation, or a new one."""
        if len(prompt.speakers) > 1 or prompt.speakers[0] not in self._last:
            return None
        work, turn = self._last.pop(prompt.speakers[0])
        if _begins(prompt.ids, turn):
            return work
        self.core.forget(work)
        return None


def _begins(ids: IntArray, turn: Turn) -> bool:
    """Whether the ids begin with the turn's prompt and tokens."""
    start = len(turn.prompt_ids)
    end = start + len(turn.completion_ids)
    own = np.array_equal(ids[start:end], turn.completion_ids)
    return own and len(ids) >= end and np.array_equal(ids[:start], turn.prompt_ids)
