"""Schedules: what holds when, what is refused before the start, and when validation asks for a reset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.settings import ConfigError
from hone.recipe.load import load
from hone.recipe.notes import notices
from hone.recipe.recipe import Recipe, resolved
from hone.recipe.schedule import Phases, holding, parse_at, stagnation
from hone.recipe.schedule import settings as in_words
from hone.recipe.sections.algo import StagnationConfig

SCHEDULE = [
    {"at": 0, "samples_per_prompt": 16, "sampling": {"top_p": 0.7}},
    {"at": "reset 1", "sampling": {"top_p": 0.9}, "lora": {"rank": 64, "targets": "all"}},
    {"at": 50, "samples_per_prompt": 24, "sampling": {"temperature": 1.2}},
    {"at": "reset 2", "sampling": {"top_p": 1.0}},
]


def recipe(**more: Any) -> Recipe:
    settings = {"name": "x", "task": {"name": "knights"}, "lora": {"targets": ["q_proj"]}, "reset": {"at": [20, 70]}}
    return Recipe.model_validate({**settings, "schedule": SCHEDULE, **more})


def problem(tmp_path: Path, text: str) -> str:
    path = tmp_path / "r.yaml"
    path.write_text("name: x\ntask: knights\n" + text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    return str(caught.value).removeprefix(f"{tmp_path}/")


# --- what holds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "resets", "expected"),
    [
        (0, 0, (16, 0.7, 1.0, 32)),
        (30, 0, (16, 0.7, 1.0, 32)),
        (30, 1, (16, 0.9, 1.0, 64)),
        (49, 2, (16, 1.0, 1.0, 64)),
        (50, 0, (24, 0.7, 1.2, 32)),  # by hand or late: steps do not wait for resets
        (50, 1, (24, 0.9, 1.2, 64)),
        (99, 5, (24, 1.0, 1.2, 64)),
    ],
)
def test_the_settings_of_a_step(step: int, resets: int, expected: tuple[float, ...]) -> None:
    now = Phases(recipe()).at(step, resets)
    assert now.lora is not None
    assert (now.samples_per_prompt, now.sampling.top_p, now.sampling.temperature, now.lora.rank) == expected
    assert now.lora.targets == ("all" if resets else ("q_proj",))
    assert now.schedule == ()
    assert now.prompts_per_step == recipe().prompts_per_step


def test_without_a_schedule_the_recipe_is_its_own_only_phase() -> None:
    plain = recipe(schedule=[])
    assert Phases(plain).at(7, 3) is plain
    assert list(Phases(plain).sets()) == [()]


def test_where_two_lines_set_the_same_the_later_line_wins() -> None:
    lines = [{"at": 10, "optim": {"lr": 0.1}}, {"at": "reset 1", "optim": {"lr": 0.2}}, {"at": 30, "steps": 1}]
    assert holding(lines, 10, 1) == (0, 1)
    now = Phases(recipe(schedule=lines[:2])).at(10, 1)
    assert now.optim.lr == 0.2


def test_every_set_of_lines_that_can_come_to_be_is_looked_at() -> None:
    """Two by step (0 and 2) and two by reset (1 and 3): 3 x 3 sets, and no line without those of its kind before it."""
    sets = list(Phases(recipe()).sets())
    assert len(sets) == len(set(sets)) == 9
    assert sets[0] == ()
    assert (0, 1, 2, 3) in sets
    assert not [s for s in sets if (2 in s and 0 not in s) or (3 in s and 1 not in s)]


def test_what_begins_in_a_step() -> None:
    phases = Phases(recipe())
    assert phases.news(0, 0, 0) == (0,)
    assert phases.news(1, 0, 0) == ()
    assert phases.news(50, 1, 0) == (1, 2)
    assert phases.news(51, 1, 1) == ()


def test_a_schedule_is_read_back_from_the_resolved_recipe(tmp_path: Path) -> None:
    (tmp_path / "config.resolved.json").write_text(json.dumps(resolved(recipe())))
    again = load(tmp_path)
    assert isinstance(again, Recipe)
    assert again.schedule == recipe().schedule
    assert Phases(again).at(60, 1).lora == Phases(recipe()).at(60, 1).lora


def test_lines_in_words() -> None:
    assert in_words(SCHEDULE[1]) == "sampling.top_p=0.9 lora.rank=64 lora.targets=all"


@pytest.mark.parametrize("at", [-1, True, "reset 0", "reset", "reset 1.5", "step 3", None, 1.0])
def test_when_is_a_step_or_a_reset(at: Any) -> None:
    assert parse_at(at) is None


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schedule:\n  - {samples_per_prompt: 3}", "r.yaml:4: schedule.0.at: required, and not given; give a step"),
        ("schedule:\n  - {at: reset 0, steps: 3}", "r.yaml:4: schedule.0.at: 'reset 0' is not allowed; give a step"),
        ("schedule:\n  - {at: 5}", "r.yaml:4: schedule.0: this line sets nothing"),
        ("schedule:\n  - {at: 5, model: tiny}", "r.yaml:4: schedule.0.model: cannot change during a stage;"),
        (
            "schedule:\n  - {at: 5, sampling.top_p: 0.5}",
            "r.yaml:4: schedule.0.sampling.top_p: keys with dots are for the command line; write sampling: {top_p: ",
        ),
        (
            "schedule:\n  - {at: 100, seed: 1}",
            "r.yaml:4: schedule.0.at: step 100 is never reached: the last step is 99",
        ),
        (
            "schedule:\n  - {at: 5, optim: {lr: 1}}\n  - {at: 5, optim: {lr: 2}}",
            "r.yaml:5: schedule.1.at: 5 follows step 5; write the lines in increasing order",
        ),
        (
            "schedule:\n  - {at: 5, sampling: {top_p: 2}}",
            "r.yaml:4: schedule.0.sampling.top_p: 2 is not allowed; give a number > 0.0 and <= 1.0 (default 1.0)",
        ),
        (
            "schedule:\n  - {at: 5, sampling:\n      {topp: 0.5}}",
            "r.yaml:5: schedule.0.sampling.topp: unknown key; did you mean sampling.top_p?",
        ),
        (  # only both lines together are impossible, and no phase has both before reset 1
            "schedule:\n  - {at: 5, prompts_per_step: 2}\n  - {at: reset 1, algo: {updates_per_rollout: 4}}",
            "r.yaml:5: schedule.1.algo.updates_per_rollout: 4 updates cannot share the 2 prompts of a step",
        ),
        (
            "lora: {}\nschedule:\n  - {at: 5, lora: {rank: 2}}",
            "r.yaml:5: schedule.0.lora: an adapter can change only at a",
        ),
        ("schedule:\n  - {at: reset 1, lora: {rank: 2}}", "schedule.0.lora: an adapter cannot be added or"),
        ("lora: {}\nschedule:\n  - {at: reset 1, lora: null}", "schedule.0.lora: an adapter cannot be added or"),
        (
            "lora: {}\nschedule:\n  - {at: reset 1, lora: {path: a}}",
            "schedule.0.lora.path: an adapter is loaded only at",
        ),
        ("schedule:\n  - {at: 5, algo: {advantage: gae}}", "schedule.0.algo.advantage: the value head of gae can"),
        (
            "optim: {decay: cosine}\nschedule:\n  - {at: 5, algo: {updates_per_rollout: 2}}",
            "schedule.0.algo.updates_per_rollout: makes the number of updates unknown",
        ),
        ("reset: {at: [100]}", "r.yaml:3: reset.at: step 100 is never reached: the last step is 99"),
        ("reset: {at: [20, 10]}", "r.yaml:3: reset.at: [20, 10] must increase"),
        ("reset: {on_stagnation: {}}", "r.yaml:3: reset.on_stagnation: needs validations, and there are none;"),
        ("lora: {dropout: 0.1}", "r.yaml:3: lora.dropout: with dropout the trained network differs"),
        ("lora: {targets: [lm_head]}", "r.yaml:3: lora.targets: lm_head cannot be a target"),
        ("lora: {path: nowhere}", "r.yaml:3: lora.path: nowhere has no adapter_config.json"),
        ("curriculum: {kind: mixture}", "r.yaml:3: curriculum.weights: a mixture needs some"),
        ("layers: {train: last}", "r.yaml:3: layers.count: needed with train: last"),
    ],
)
def test_what_cannot_be_is_an_error_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    assert message in problem(tmp_path, text)


# --- notices --------------------------------------------------------------------------------------------------------

QUIET = {"algo": {"updates_per_rollout": 2}, "schedule": [], "reset": {}, "lora": None}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"reset": {"at": [20]}, "schedule": [{"at": "reset 1", "optim": {"lr": 0.1}}]}, None),
        (
            {"reset": {"at": [20]}, "schedule": [{"at": "reset 2", "optim": {"lr": 0.1}}]},
            "schedule: reset.at has only 1 reset, so `reset 2` applies only if you ask for resets with `hone reset`",
        ),
        (
            {"reset": {"on_stagnation": {"tolerance": 0.1}}, "eval": {"every": 20}},
            "reset.on_stagnation needs 6 validations, the last of them at step 100, but there are only 100 steps",
        ),
        ({"reset": {"on_stagnation": {"tolerance": 0.03}}, "eval": {"every": 10}}, None),
        (  # 0.5 / sqrt(3 x 200)
            {"reset": {"on_stagnation": {"tolerance": 0.01}}, "eval": {"every": 10}},
            "reset.on_stagnation.tolerance 0.01: the mean of 600 answers has a standard deviation of up to 0.02",
        ),
        (
            {"curriculum": {"weights": {"2": 1.0}}},
            "curriculum.weights has no effect with curriculum.kind uniform; it goes with mixture",
        ),
        (
            {"schedule": [{"at": 9, "algo": {"updates_per_rollout": 1, "clip_high": 0.3}}]},
            "schedule, from 9 on: algo.clip_high has no effect with one update per rollout: every token is on-policy",
        ),
    ],
)
def test_what_has_no_effect_is_said_of_every_phase(settings: dict[str, Any], expected: str | None) -> None:
    found = notices(recipe(**{**QUIET, **settings}))
    assert [line.startswith(expected) for line in found] == [True] if expected else found == []


# --- when validation asks for a reset -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5, 0.6, 0.605], None),
        ([0.6, 0.605], None),  # too few to say
        ([0.6, 0.605, 0.59], "stagnates"),
        ([0.6, 0.605, 0.5], "declines"),
        ([0.6, 0.5, 0.611], None),
        ([0.6, 0.7, 0.5, 0.4], "declines"),
        ([0.6, 0.5, 0.5, 0.595], "stagnates"),  # back up, but not above where it was
        ([0.1, 0.2, 0.3, 0.4], None),
    ],
)
def test_stagnation_by_hand(values: list[float], expected: str | None) -> None:
    assert stagnation(values, StagnationConfig(window=1, tolerance=0.01, patience=2)) == expected


def test_the_window_averages() -> None:
    """Means over 2: 0.5, 0.5, 0.55; the last is above the first by 0.05."""
    values = [0.4, 0.6, 0.4, 0.7]
    assert stagnation(values, StagnationConfig(window=2, tolerance=0.04, patience=2)) is None
    assert stagnation(values, StagnationConfig(window=2, tolerance=0.06, patience=2)) == "stagnates"


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.floats(-1.0, 1.0), min_size=3, max_size=30),
    st.floats(0.001, 0.1),
)
def test_noise_within_the_tolerance_raises_no_false_alarm(
    window: int, patience: int, noise: list[float], tolerance: float
) -> None:
    """A true rise of twice the tolerance over the patience, and half the tolerance of noise either way: never."""
    rise = 2.001 * tolerance / patience
    values = [i * rise + 0.5 * tolerance * e for i, e in enumerate(noise)]
    rule = StagnationConfig(window=window, tolerance=tolerance, patience=patience)
    assert [stagnation(values[:n], rule) for n in range(len(values) + 1)] == [None] * (len(values) + 1)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_a_flat_validation_is_found_once_the_patience_is_over(window: int, patience: int, seed: int) -> None:
    noise = np.random.default_rng(seed).uniform(-0.5, 0.5, window + patience)
    rule = StagnationConfig(window=window, tolerance=1.0, patience=patience)
    assert stagnation(list(noise[:-1]), rule) is None
    assert stagnation(list(noise), rule) == "stagnates"
    assert stagnation([*noise, *([-9.0] * window)], rule) == "declines"
