"""Time travel: past answers under another reward, and the answers of a checkpoint once more. Off unless asked for.

    travel = Travel([Path("other.yaml")])           # `hone view --allow-rescore --reward other.yaml`
    travel.rescore(stage, step=30, reward="other.yaml")
    travel.replay(stage, step=30)

A request can name only the step, and a reward that the command line named or the run's own. Each runs in a worker that
is killed after a time limit (`hone.grade.workers`), one at a time; nothing is written to the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hone.base.settings import UserError
from hone.base.visible import visible
from hone.grade.workers import Failure, Workers
from hone.report.live.library import StageFolder

#: The name of the run's own reward.
OWN = ""
#: Seconds for a request, and memory beyond the imported code.
SECONDS, MEMORY_MB = 300.0, 16_384


class Travel:
    """`rewards`: recipes whose rewards can be tried, beside each run's own."""

    def __init__(self, rewards: Sequence[Path] = ()) -> None:
        self._rewards: dict[str, str | None] = {OWN: None, **{visible(path): str(path.resolve()) for path in rewards}}
        self._busy = threading.Lock()

    @property
    def rewards(self) -> list[str]:
        """The names that a request may give."""
        return list(self._rewards)

    def rescore(self, stage: StageFolder, step: int, reward: str) -> dict[str, Any]:
        """See `hone.stages.past.rescored`. Raises UserError if the reward is not offered, or cannot score the step."""
        if reward not in self._rewards:
            raise UserError(f"reward={visible(reward)}: `hone view` was not started with this one")
        return self._run("rescored", stage, step, self._rewards[reward])

    def replay(self, stage: StageFolder, step: int) -> dict[str, Any]:
        """See `hone.stages.past.replayed`. Raises UserError if the step cannot be sampled again."""
        return self._run("replayed", stage, step)

    def _run(self, name: str, stage: StageFolder, *arguments: Any) -> dict[str, Any]:
        if not self._busy.acquire(blocking=False):
            raise UserError("another request is still being worked on; try again when it has ended")
        try:
            place = str(stage.folder.relative_to(stage.run))
            with Workers(f"{__name__}:work", count=1, deadline=SECONDS, memory_mb=MEMORY_MB) as workers:
                (result,) = workers.map([(name, str(stage.run), place, *arguments)])
        finally:
            self._busy.release()
        if isinstance(result, Failure):
            raise UserError(result.message)
        if isinstance(result, str):
            raise UserError(result)
        answer: dict[str, Any] = result
        return answer


def work(name: str, *arguments: Any) -> dict[str, Any] | str:
    """In the worker: the result of a function of `hone.stages.past`, or the message of its UserError."""
    from hone.stages import past

    functions: dict[str, Callable[..., dict[str, Any]]] = {"rescored": past.rescored, "replayed": past.replayed}
    try:
        return functions[name](*arguments)
    except UserError as error:  # to be shown as it is, without the place where it was raised
        return str(error)
