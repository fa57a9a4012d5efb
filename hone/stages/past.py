"""Returns to a step of a run: scores its answers with another reward, or samples them again from its checkpoint.

    rescored("runs/demo", "rl", 30, "other.yaml")     # what the reward of other.yaml gives for the answers of step 30
    replayed("runs/demo", "rl", 30)                   # the answers that the checkpoint of step 30 gives now

Both read the run and write nothing. `hone view --allow-rescore` calls them in a process that can be killed, since a
reward may run anything; so they take and return plain values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hone.base import jsonl, streams
from hone.base.settings import UserError
from hone.recipe.load import load
from hone.recipe.recipe import RLStage, stages_of
from hone.recipe.schedule import Phases
from hone.rewards import is_offline, make_reward
from hone.rewards.config import RewardConfig
from hone.runs import layout
from hone.tasks import make_task
from hone.tasks.base import Task
from hone.types import VERIFIER_FAILURES, Episode, IntArray, Problem, Reward, Rollout, Step, Turn

Row = dict[str, Any]

#: Parts that need more than a recorded answer: a live environment.
LIVE = ("environment",)
#: Differing answers that a replay lists.
LISTED = 20


@dataclass(frozen=True)
class PastStep:
    """The settings and the recorded answers of one step."""

    settings: RLStage  # of the stage, with the lines of its schedule that held
    folder: Path  # of the stage
    step: int
    rows: list[Row]  # of rollouts/step_N.jsonl

    @classmethod
    def of(cls, run: str, place: str, step: int) -> PastStep:
        """`place`: the stage's folder in the run. Raises UserError if the step has no recorded answers."""
        stage = next((one for one, sub in stages_of(load(run)) if sub == Path(place)), None)
        folder = Path(run) / place
        if stage is None or stage.stage != "rl":
            raise UserError(f"{folder}: not a stage of reinforcement learning; only those have rewards")
        path = folder / layout.rollouts_name(step)
        if not path.is_file():
            raise UserError(f"{folder}: step {step} has no recorded answers")
        metrics = next((row for row in jsonl.read(folder / "metrics.jsonl") if row.get("step") == step), {})
        settings = Phases(stage).at(step, int(metrics.get("reset") or 0))
        return cls(settings, folder, step, jsonl.read(path))

    @cached_property
    def task(self) -> Task:
        return make_task(self.settings.task, self.settings.seed)

    @cached_property
    def problems(self) -> dict[str, Problem]:
        """The training problems by id."""
        return {problem.id: problem for problem in self.task.problems("train")}

    def tokens(self) -> list[IntArray] | None:
        """[rows] the recorded completion tokens of each answer, of all its turns; None if they were not recorded."""
        from safetensors import safe_open

        path = self.folder / layout.tokens_name(self.step)
        if not path.is_file():
            return None
        with safe_open(path, framework="numpy") as file:
            ids, lengths = file.get_tensor("ids").astype(np.int64), file.get_tensor("lengths")
        ends = np.concatenate([[0], np.cumsum(lengths)])
        chains = np.concatenate([[0], np.cumsum([int(row.get("chains", 1)) for row in self.rows])])
        if chains[-1] != len(lengths):
            return None
        return [ids[ends[first] : ends[last]] for first, last in pairwise(chains)]


# --- another reward -----------------------------------------------------------------------------------------------


def rescored(run: str, place: str, step: int, recipe: str | None) -> Row:
    """The answers of a step with their recorded rewards and those of `recipe` (None: of the run's own settings).

    `answers`: place, index, problem, `old` and `new` total and verdict. `left_out`: parts that need a model or a live
    environment. A problem that the task no longer has is counted in `unknown`. Raises UserError for a reward that
    cannot be used here.
    """
    other = None if recipe is None else _reward_of(recipe)
    past = PastStep.of(run, place, step)  # after the recipe: the files of a moved run are found by the last `load`
    config, left_out = _usable(other or past.settings.reward)
    reward = make_reward(config, past.task)
    tokens = past.tokens()
    groups: dict[tuple[str, int], list[int]] = {}
    copies: dict[tuple[str, int], int] = {}  # a step may draw a problem twice
    for place_of, row in enumerate(past.rows):
        key = str(row["problem_id"]), int(row["index"])
        copies[key] = copies.get(key, -1) + 1
        groups.setdefault((key[0], copies[key]), []).append(place_of)
    known = [key for key in groups if key[0] in past.problems]
    answers = [[_rollout(past.rows[i], None if tokens is None else tokens[i]) for i in groups[key]] for key in known]
    scored = reward.score_all([past.problems[name] for name, _ in known], answers)
    new = {i: one for key, of_group in zip(known, scored) for i, one in zip(groups[key], of_group)}
    return {
        "step": step,
        "parts": dict(config.parts),
        "left_out": left_out,
        "unknown": len(past.rows) - len(new),
        "tokens": tokens is not None,
        "answers": [_compared(i, past.rows[i], one) for i, one in sorted(new.items())],
        "differences": [sum(_differ(past.rows[i]["total"] for i in groups[key]) for key in known),
                        sum(_differ(one.total for one in of_group) for of_group in scored)],
        "groups": len(known),
    }  # fmt: skip


def _reward_of(recipe: str) -> RewardConfig:
    """The reward of the last stage of a recipe that has one."""
    stages = [stage for stage, _ in stages_of(load(recipe)) if stage.stage == "rl"]
    if not stages:
        raise UserError(f"{recipe}: no stage of reinforcement learning, so no reward")
    return stages[-1].reward


def _usable(config: RewardConfig) -> tuple[RewardConfig, list[str]]:
    """The reward without the parts that ask a model or need a live environment, and the names of those."""
    left_out = [name for name in config.parts if name in LIVE or not is_offline(name)]
    parts = {name: weight for name, weight in config.parts.items() if name not in left_out}
    if not parts:
        raise UserError(f"reward: {', '.join(left_out)} needs a model or a live environment; nothing is left to score")
    return config.model_copy(update={"parts": parts}), left_out


def _rollout(row: Row, ids: IntArray | None) -> Rollout:
    """A recorded answer. Without its tokens only their number is right."""
    ids = np.zeros(int(row["tokens"]), np.int64) if ids is None else ids
    unknown = np.zeros(len(ids), np.float32)
    turn = Turn(np.empty(0, np.int64), ids, unknown, row["finish"], int(row["policy_version"]))
    steps = tuple(
        Step(s["message"], tuple(s["replies"]), s.get("reward"), s.get("error"), s.get("parts") or {})
        for s in row.get("steps", ())
    )
    return Rollout(row["problem_id"], int(row["index"]), (turn,), row["text"], Episode(row.get("end", "done"), steps))


def _compared(place: int, row: Row, new: Reward) -> Row:
    failed = new.verdict in VERIFIER_FAILURES
    return {
        "place": place,
        "problem": row["problem_id"],
        "index": row["index"],
        "old": row["total"],
        "new": None if failed else new.total,
        "old_verdict": row["verdict"],
        "new_verdict": new.verdict,
        "note": new.note,
    }


def _differ(totals: Iterable[float]) -> bool:
    return len(set(totals)) > 1


# --- the same answers again ---------------------------------------------------------------------------------------


def replayed(run: str, place: str, step: int) -> Row:
    """Samples the answers of a step again, with the weights that sampled them, and compares the tokens.

    `identical` of `answers` have the same tokens; `differences` lists the first of the others, with the position of
    the first token that differs. A machine, library or number of threads other than the run's can change the rounding,
    and so a token. Raises UserError if the weights, the tokens or a native engine are missing.
    """
    import torch

    from hone.environments.make import make_episodes
    from hone.rollout.dates import date_for
    from hone.rollout.local import load_local

    past = PastStep.of(run, place, step)
    recorded, problems = past.tokens(), _drawn_first(past)
    if recorded is None:
        raise UserError(f"{past.folder}: the tokens of step {step} were not recorded, so there is nothing to compare")
    stage = past.settings
    if threads := _threads(past.folder):
        torch.set_num_threads(threads)
    model = stage.model.at(str(_weights(past, Path(run))))
    local = load_local(model, stage.rollout, stage.prompt, past.task.system, date_for(past.folder))
    rollouts = make_episodes(stage, local.renderer).sample(
        problems, local.engine, stage.sampling, samples=stage.samples_per_prompt,
        seed=streams.answers("step", stage.seed, step, 0),
    )  # fmt: skip
    again = [np.concatenate([turn.completion_ids for turn in one.turns]) for group in rollouts for one in group]
    places = _places(past.rows, [(one.problem_id, one.index) for group in rollouts for one in group])
    piece = local.renderer.piece
    compared = [_difference(place, recorded[place], ids, piece) for place, ids in zip(places, again)]
    differences = sorted((one for one in compared if one is not None), key=lambda one: one["place"])
    return {
        "step": step,
        "answers": len(again),
        "of": len(past.rows),
        "tokens": int(sum(map(len, again))),
        "identical": len(again) - len(differences),
        "differences": differences[:LISTED],
    }


def _drawn_first(past: PastStep) -> list[Problem]:
    """The problems of the first round, in the order in which they were drawn."""
    ledger = jsonl.read(past.folder / "ledger.jsonl")
    drawn: list[str] = next((row["problems"] for row in ledger if row["step"] == past.step and row["round"] == 0), [])
    missing = [name for name in drawn if name not in past.problems]
    if not drawn or missing:
        raise UserError(
            f"{past.folder}: step {past.step} cannot be sampled again: "
            + (f"the task no longer has problem {missing[0]}" if missing else "the ledger has no row of it")
        )
    return [past.problems[name] for name in drawn]


def _weights(past: PastStep, run: Path) -> Path:
    """The folder of the weights that sampled the answers. Raises UserError if they were not kept."""
    versions = {int(row["policy_version"]) for row in past.rows}
    if past.settings.rollout.engine != "native":
        raise UserError(f"rollout.engine is {past.settings.rollout.engine}: only answers of hone's own are replayed")
    if len(versions) != 1:
        raise UserError(f"step {past.step} was sampled with the weights of several steps: {sorted(versions)}")
    version = versions.pop()
    kept = past.folder / "checkpoints" / f"step_{version:06d}" / "model"
    before = past.settings.model.stage
    first = run / "base" if before is None else past.folder.parent / before / "model"
    candidates = [kept, *([first] if version == 0 else [])]
    folder = next((path for path in candidates if (path / "config.json").is_file()), None)
    if folder is None:
        saved = sorted(path.name.removeprefix("step_").lstrip("0") or "0" for path in kept.parent.parent.glob("step_*"))
        there = f"there are those of step {', '.join(saved)}" if saved else "there is none"
        raise UserError(
            f"the checkpoint of step {version}, which sampled these answers, was not kept: {there} "
            "(checkpoint.keep says how many are)"
        )
    return folder


def _threads(folder: Path) -> int | None:
    """How many threads the run computed with; another number rounds differently."""
    path = folder / "manifest.json"
    hardware = json.loads(path.read_text(encoding="utf-8")).get("hardware", {}) if path.is_file() else {}
    threads = hardware.get("torch_threads")
    return threads if isinstance(threads, int) and threads > 0 else None


def _places(rows: Sequence[Row], keys: Sequence[tuple[str, int]]) -> list[int]:
    """Where the answers stand among the recorded ones; of a problem that was drawn twice, in order."""
    free: dict[tuple[str, int], list[int]] = {}
    for place, row in enumerate(rows):
        free.setdefault((str(row["problem_id"]), int(row["index"])), []).append(place)
    return [free[key].pop(0) for key in keys]


def _difference(place: int, old: IntArray, new: IntArray, piece: Callable[[int], str]) -> Row | None:
    """Where two answers begin to differ, and both tokens there (None: the answer has ended); None if they are equal."""
    if np.array_equal(old, new):
        return None
    common = min(len(old), len(new))
    unequal = np.flatnonzero(old[:common] != new[:common])
    at = int(unequal[0]) if len(unequal) else common
    tokens = [int(ids[at]) if at < len(ids) else None for ids in (old, new)]
    return {"place": place, "position": at, "ids": tokens, "pieces": [None if t is None else piece(t) for t in tokens]}
