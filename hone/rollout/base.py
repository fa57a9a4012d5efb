"""The one interface that every rollout engine offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from hone.rollout.config import SamplingConfig
from hone.types import IntArray, Turn

if TYPE_CHECKING:
    from hone.train.policy import Policy


class Engine(Protocol):
    def generate(
        self,
        prompts: Sequence[IntArray],
        sampling: SamplingConfig,
        *,
        samples: int,
        seed: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Turn]]:
        """Sample `samples` completions for each prompt.

        Randomness: sample g of prompt p draws from a counter-based stream keyed by
        (seed, p, g, token position), so a completion does not depend on what else is in the batch.
        `progress(done, total)` is called as sequences finish. Returns [P][G] turns.
        Raises UserError for a prompt that leaves no room for a completion.
        """
        ...

    def sync(self, policy: Policy, version: int) -> None:
        """Serve these weights from now on; turns carry `version` as their policy_version."""
        ...
