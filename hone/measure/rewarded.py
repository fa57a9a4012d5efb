"""The training reward of answers to held-out problems: in the evaluations of a run, and in `hone eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hone.base import stats
from hone.recipe.recipe import RLStage
from hone.rewards import is_offline, make_reward
from hone.rewards.base import Composed, reward_groups
from hone.tasks.base import Task
from hone.types import VERIFIER_FAILURES, Group, Problem, Rollout, Turn


def rewarded(groups: Sequence[Group], whole: bool) -> dict[str, Any]:
    """`reward`, the mean over problems with its 95 % interval, and `reward/mean`, over samples (both only if all parts
    were computed: `whole`); `reward/PART`, over the samples that have the part. Samples without a reward are left out.
    """
    scored = [[r for r in group.rewards if r.verdict not in VERIFIER_FAILURES] for group in groups]
    rewards = [r for group in scored for r in group]
    mean: dict[str, Any] = {}
    if whole and rewards:
        totals = [[r.total for r in group] for group in scored if group]
        mean = {"reward": asdict(stats.clustered(totals)), "reward/mean": sum(r.total for r in rewards) / len(rewards)}
    names = sorted({name for r in rewards for name in r.parts})
    each = {name: [r.parts[name] for r in rewards if name in r.parts] for name in names}
    return {**mean, **{f"reward/{name}": sum(values) / len(values) for name, values in each.items()}}


@dataclass(frozen=True)
class StoredReward:
    """A recipe's reward, as far as it can be computed from the stored text of an answer."""

    reward: Composed
    left_out: tuple[str, ...]  # parts that cannot be computed so

    @classmethod
    def of(cls, stage: RLStage, task: Task) -> StoredReward | None:
        """The stored reward of a stage; None if the stage has none, or if it is the accuracy. Raises UserError as
        `make_reward` does.

        Parts that call a model or a server are left out, and functions that read token ids, which are not stored.
        """
        wanted = stage.reward.parts
        if stage.stage != "rl" or set(wanted) == {"outcome"}:
            return None
        offline = {name: w for name, w in wanted.items() if is_offline(name)}
        made = make_reward(stage.reward.model_copy(update={"parts": offline}), task)
        parts = {name: part for name, part in made.offline().parts.items() if not getattr(part, "reads_tokens", False)}
        left_out = [*(wanted.keys() - offline.keys()), *(made.parts.keys() - parts.keys())]
        weights = {name: made.weights[name] for name in parts}
        return cls(Composed(task, parts, weights), tuple(sorted(left_out)))

    def measure(self, problems: Sequence[Problem], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """`rewarded` of the rows of samples.jsonl."""
        answers: dict[str, list[Rollout]] = {}
        for row in rows:
            answers.setdefault(row["problem_id"], []).append(_rollout(row))
        answered = [problem for problem in problems if problem.id in answers]
        groups = reward_groups(answered, [tuple(answers[problem.id]) for problem in answered], self.reward)
        return rewarded(groups, whole=not self.left_out)

    def report(self, label: str, row: Mapping[str, Any]) -> str:
        """A line for the terminal."""
        parts = ", ".join(
            f"{name} {row[f'reward/{name}']:.3f}" for name in self.reward.parts if f"reward/{name}" in row
        )
        if "reward" in row:
            mean = row["reward"]
            return f"{label}: reward {mean['value']:.3f} [{mean['low']:.3f}, {mean['high']:.3f}] ({parts})"
        why = "no sample has one"
        if self.left_out:
            why = (
                f"it needs {', '.join(self.left_out)}: parts that read a model, a server or token ids are left out here"
            )
        return f"{label}: reward not measured ({why}){': ' * bool(parts)}{parts}"


def _rollout(row: Mapping[str, Any]) -> Rollout:
    unknown = np.zeros(row["tokens"], np.int64)  # the ids of its tokens are not stored
    turn = Turn(np.zeros(1, np.int64), unknown, unknown.astype(np.float32), row["finish"], 0)
    return Rollout(row["problem_id"], row["index"], (turn,), row["text"])
