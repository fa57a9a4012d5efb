from __future__ import annotations

import math
from typing import Any

import pytest

from hone.learn import watch
from hone.learn.watch import CollapseWarning, collapse_warnings
from hone.recipe.sections.algo import WatchConfig

CONFIG = WatchConfig()


def history(steps: int, **series: Any) -> list[dict[str, float]]:
    """One row per step; a series is a function of the step, named by the watch's constant."""
    return [{"step": step, **{getattr(watch, name): f(step) for name, f in series.items()}} for step in range(steps)]


def all_warnings(rows: list[dict[str, float]], config: WatchConfig = CONFIG) -> list[CollapseWarning]:
    """As the loop gathers them: after every step."""
    return [w for n in range(1, len(rows) + 1) for w in collapse_warnings(rows[:n], config)]


def test_healthy_growth_raises_no_alarm() -> None:
    # Answers grow tenfold, entropy falls to a sixth, KL and the clip fraction rise, lone gradients are large.
    rows = history(
        300,
        ENTROPY=lambda t: 0.05 + 0.25 * math.exp(-t / 60),
        LENGTH=lambda t: 200 + 6 * t + 40 * math.sin(t),
        DUPLICATES=lambda t: 0.02,
        KL=lambda t: 0.0005 * t,
        CLIP=lambda t: 0.02 + 0.0004 * t,
        GRAD_NORM=lambda t: 40.0 if t % 50 == 30 else 0.3 + 0.2 * math.sin(3 * t),
        MISMATCH=lambda t: 0.01,
    )
    assert all_warnings(rows) == []


def test_a_run_that_solves_its_task_may_become_certain() -> None:
    # A warm-started model begins near certainty: 0.05 to 0.01 nats is below the floor but no tenth of the start.
    assert all_warnings(history(60, ENTROPY=lambda t: max(0.01, 0.05 - 0.001 * t))) == []


def test_length_collapse_names_the_step() -> None:
    # 400 tokens until step 19, then 100. Mean of the last 5: step 20 340, 21 280, 22 220, 23 160.
    # 0.4 * 400 = 160 is not below 160; step 24: 100 is.
    rows = history(40, LENGTH=lambda t: 400 if t < 20 else 100)
    (warning,) = all_warnings(rows)
    assert (warning.name, warning.step, warning.value) == ("length_collapse", 24, 100)
    assert str(warning) == "step 24: length_collapse: length/mean 100 is below 0.4 of its start, 400"


def test_entropy_collapse_and_explosion() -> None:
    (low,) = all_warnings(history(40, ENTROPY=lambda t: 0.5 if t < 20 else 0.001))
    assert low.name == "entropy_collapse"
    (high,) = all_warnings(history(40, ENTROPY=lambda t: 0.5 if t < 20 else 4.0))
    # Mean of 5 above 1.5 = 3 * 0.5: with one new value 1.2, with two (1.5 + 8) / 5 = 1.9, at step 21.
    assert (high.name, high.step) == ("entropy_explosion", 21)


@pytest.mark.parametrize(
    ("metric", "good", "bad", "name"),
    [
        ("DUPLICATES", 0.05, 0.6, "duplicate_thinking"),
        ("KL", 0.05, 3.0, "kl_explosion"),
        ("CLIP", 0.05, 0.9, "clip_fraction"),
        ("MISMATCH", 0.01, 0.5, "mismatch"),
    ],
)
def test_levels(metric: str, good: float, bad: float, name: str) -> None:
    rows = history(30, **{metric: lambda t: bad if t >= 15 else good})
    (warning,) = all_warnings(rows)  # once, though it lasts
    assert warning.name == name
    assert 15 <= warning.step <= 19
    again = history(30, **{metric: lambda t: bad if 8 <= t < 14 or t >= 22 else good})
    assert len(all_warnings(again)) == 2  # it ended and came back


def test_guessing_alike_from_the_start_is_no_alarm() -> None:
    # Half of the answers begin as the same one-sentence guess: known at the start, falling, no news.
    assert all_warnings(history(40, DUPLICATES=lambda t: 0.5 - 0.005 * t)) == []


def test_mismatch_is_seen_at_the_first_step() -> None:
    (warning,) = all_warnings(history(1, MISMATCH=lambda t: 0.4))
    assert warning.step == 0


def test_gradients() -> None:
    # Median 1, limit 10: three steps above it from step 20 on, so the warning comes at step 22.
    (warning,) = all_warnings(history(25, GRAD_NORM=lambda t: 20.0 if t >= 20 else 1.0))
    assert (warning.name, warning.step) == ("grad_explosion", 22)
    # Steps without any signal (all groups alike) have norm 0 and do not make the next one a spike.
    assert all_warnings(history(25, GRAD_NORM=lambda t: 1.0 if t >= 15 else 0.0)) == []
    warnings = all_warnings(history(10, GRAD_NORM=lambda t: math.nan if t == 7 else 1.0))
    assert [(w.name, w.step) for w in warnings] == [("grad_not_finite", 7)]


def test_missing_metrics_are_not_watched() -> None:
    assert collapse_warnings([], CONFIG) == []
    assert all_warnings(history(20)) == []
    rows = history(12, KL=lambda t: 0.1)
    rows[11].pop(watch.KL)
    assert all_warnings(rows) == []


def test_thresholds_come_from_the_config() -> None:
    rows = history(10, KL=lambda t: 0.2)
    assert all_warnings(rows) == []
    (warning,) = all_warnings(rows, WatchConfig(kl=0.1, window=2))
    assert warning.step == 1


def test_rows_read_back_may_hold_null() -> None:
    rows = history(30, KL=lambda t: 3.0 if t >= 15 else None if t == 14 else 0.0, GRAD_NORM=lambda t: 1.0)
    assert [w.name for w in all_warnings(rows)] == ["kl_explosion"]
    twice = history(20, KL=lambda t: None if t == 17 else 3.0 if t >= 15 else 0.0)
    assert [w.name for w in all_warnings(twice)] == ["kl_explosion"]
    (warning,) = all_warnings(history(8, GRAD_NORM=lambda t: None if t == 6 else 1.0))
    assert (warning.name, warning.step) == ("grad_not_finite", 6)


def test_few_tokens_that_differ_much_are_seen_by_k3_where_the_mean_is_small():
    row = {"step": 0, "mismatch/mean_abs": 0.05, "mismatch/k3": 0.4}
    assert [w.name for w in collapse_warnings([row], WatchConfig())] == ["mismatch_k3"]
    assert not collapse_warnings([{**row, "mismatch/k3": 0.04}], WatchConfig())
    assert not collapse_warnings([row], WatchConfig(mismatch_k3=0.5))
