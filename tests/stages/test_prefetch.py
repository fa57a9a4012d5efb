"""Rollouts one step ahead: how old they are, that they overlap with learning, and how waiting ends."""

from __future__ import annotations

import copy
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hone.base.settings import ConfigError, UserError
from hone.learn.policy import Policy
from hone.recipe.load import load
from hone.recipe.recipe import Recipe, RLStage
from hone.recipe.sections.rollout import RolloutConfig
from hone.rollout.native import NativeEngine
from hone.stages import audit as runs
from hone.stages import pipeline, stage
from hone.stages.source import Prefetch, Sampled, Sampler, time_limit

RECIPE = """
name: ahead
task: {name: countdown, train: 40, validation: 0, test: 4}
prompt: {style: raw}
model: {tiny: {vocab_size: 300, hidden_size: 32, layers: 1, heads: 2, kv_heads: 1, mlp_size: 32}}
reward: {parts: {overlong: 1.0}, overlong: {max_tokens: 24, buffer: 20}}
rollout: {engine: vllm, ahead: true}
algo: {correction: {kind: tis}}
sampling: {max_tokens: 24}
eval: {problems: 2}
prompts_per_step: 2
samples_per_prompt: 4
steps: 5
"""


class Served:
    """A stand-in for a server: an engine with a copy of the weights, as old as the last sync."""

    def __init__(self, policy: Policy) -> None:
        self.stops = policy.stop_ids
        self.begun: list[int] = []  # the version of each call's weights
        self.started = threading.Event()
        self.closed = False
        self.fail_at: int | None = None

    def sync(self, policy: Policy, version: int) -> dict[str, float]:
        self.engine = NativeEngine(copy.deepcopy(policy.model), self.stops, RolloutConfig(), version)
        self.version = version
        return {}

    def generate(self, *arguments: Any, **keywords: Any) -> Any:
        self.begun.append(self.version)
        self.started.set()
        if self.fail_at == len(self.begun):
            raise UserError("the server is gone")
        return self.engine.generate(*arguments, **keywords)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    made: list[Served] = []

    def make(_: Any, policy: Policy, *__: Any) -> Served:
        made.append(Served(policy))
        return made[-1]

    monkeypatch.setattr(stage, "make_engine", make)

    def run(*overrides: str, resume: bool = False) -> tuple[Served, list[dict[str, Any]]]:
        folder = pipeline.run(load("recipe.yaml", overrides), resume=resume)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return made[-1], rows

    run.made = made  # type: ignore[attr-defined]
    return run


def test_rollouts_are_one_update_old_and_corrected(ahead: Any) -> None:
    served, rows = ahead("optim.lr=0.01")
    assert [row["staleness"] for row in rows] == [0, 1, 1, 1, 1]
    assert rows[0]["mismatch/mean_abs"] < 1e-5  # the first are from the weights that learn from them
    assert all(row["mismatch/mean_abs"] > 1e-5 for row in rows[1:])
    # Evaluation before, five steps of which the second is sampled from the first one's weights, evaluation after.
    assert served.begun == [0, 0, 0, 1, 2, 3, 5]
    assert served.closed


def test_the_next_step_is_sampled_while_the_policy_learns(ahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Policy.update
    overlapped = []

    def waits_for_sampling(self: Policy, *arguments: Any) -> Any:
        if len(overlapped) < 4:
            overlapped.append(ahead.made[-1].started.wait(30))
        ahead.made[-1].started.clear()
        return update(self, *arguments)

    settle = Prefetch.settle

    def settled(self: Prefetch) -> None:
        settle(self)
        ahead.made[-1].started.clear()

    monkeypatch.setattr(Policy, "update", waits_for_sampling)
    monkeypatch.setattr(Prefetch, "settle", settled)
    ahead()
    assert overlapped == [True] * 4


def test_what_fails_ahead_is_raised_and_the_run_goes_on_from_its_checkpoint(ahead: Any) -> None:
    def fails(_: Any, policy: Policy, *__: Any) -> Served:
        served = Served(policy)
        served.fail_at = 4
        ahead.made.append(served)
        return served

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "make_engine", fails)
        with pytest.raises(UserError, match="the server is gone"):
            ahead("checkpoint.every=1")
    assert ahead.made[-1].closed
    _, rows = ahead("checkpoint.every=1", resume=True)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["staleness"] for row in rows] == [0, 1, 0, 1, 1]  # drawn anew after the cut
    # What was drawn ahead of the checkpoint is not skipped: the ledger is what the curriculum draws.
    assert runs.check(Path("runs/ahead"))[1] == 0


def test_a_wait_has_a_bound_and_a_name() -> None:
    def sample(step: int, _: Any) -> Sampled:
        time.sleep(0.3 * (step == 7))
        return Sampled(step, cast(Recipe, None), [], [], [], {}, {}, {})

    curriculum = SimpleNamespace(observe=lambda groups: None)
    sampler = cast(Sampler, SimpleNamespace(sample=sample, curriculum=curriculum))
    with Prefetch(sampler, cast(Any, None), steps=9, timeout=0.05) as source:
        source.settle()  # nothing is in flight: returns at once
        assert source.groups(6).step == 6
        with pytest.raises(UserError, match=r"the rollouts of step 7 took more than 0 s"):
            source.settle()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.engine=native", "rollout.ahead: the native engine samples from the weights that are being trained"),
        ("algo.correction.kind=none", "algo.correction.kind: rollout.ahead samples from older weights"),
        ("curriculum.kind=adaptive", "curriculum.kind: needs the pass rates"),
        ("parallel.replicate=2", "rollout.ahead: all 2 processes .* none samples; set this to"),
    ],
)
def test_what_cannot_be_is_said_before_the_start(tmp_path: Path, override: str, message: str) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "recipe.yaml", [override])


def test_the_time_limit_of_a_step_counts_turns_and_steps_of_environments(tmp_path: Path) -> None:
    """Once: 10 + 20 + 30 s, with 2 restarts 180 s. 8 episodes by 3 workers: 3 rounds of 5 s, in each of 4 turns, at the
    beginning and at the end."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    times = ["request_timeout=10", "sync_timeout=20", "start_timeout=30", "restarts=2"]
    server = [f"rollout.vllm.{time}" for time in times]
    episodes = ["tools=[calculator]", "environment={max_turns: 4, workers: 3, timeout: 5}"]
    plain = load(tmp_path / "recipe.yaml", [*server, "algo.refill_rounds=1"])
    several = load(tmp_path / "recipe.yaml", [*server, *episodes])
    assert time_limit(cast(RLStage, plain)) == 2 * 180
    assert time_limit(cast(RLStage, several)) == 4 * (180 + 15) + 2 * 15
