"""`hone verify`: bands by hand, and what is inside or outside of them."""

from __future__ import annotations

import json
import math
import types
from pathlib import Path
from typing import Any

import pytest

from hone.base.settings import UserError
from hone.measure import reproduce
from hone.measure.reproduce import band, bands, read_results, value_of

RECIPE = "name: x\nruns: {runs}\ntask: {{name: knights, people: [2], train: 3}}\n"


def accuracy(value: float, half: float = 0.0196) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half, "n": 100}


def row(seed: int, before: float, after: float) -> dict[str, Any]:
    return {"seed": seed, "seconds": 60.0, "before": {"accuracy": accuracy(before)},
            "after": {"accuracy": accuracy(after), "response_tokens": 100 + seed}}  # fmt: skip


ROWS = [row(0, 0.4, 0.7), row(1, 0.5, 0.8), row(2, 0.3, 0.9)]
MEASURES = ["after.accuracy", "after.accuracy - before.accuracy", "after.response_tokens"]


def test_a_band_is_the_prediction_interval_of_one_more_seed() -> None:
    # mean 0.8, s = 0.1, t_{2, 0.975} = 4.3027, sqrt(1 + 1/3): half = 0.4968; a share ends at 1
    found = bands(ROWS, MEASURES)
    assert found["after.accuracy"] == {
        "mean": pytest.approx(0.8), "low": pytest.approx(0.8 - 4.30265 * 0.1 * math.sqrt(4 / 3), abs=1e-5), "high": 1.0,
        "seeds": 3,
    }  # fmt: skip
    gain = found["after.accuracy - before.accuracy"]
    assert gain["mean"] == pytest.approx((0.3 + 0.3 + 0.6) / 3)
    assert gain["high"] > 1  # a difference is no share
    assert found["after.response_tokens"]["mean"] == 101


def test_seeds_that_agree_by_luck_do_not_make_a_band_of_width_0() -> None:
    narrow = band([0.5, 0.5, 0.5], [0.05] * 3)
    assert narrow.high - narrow.low == pytest.approx(2 * 4.30265 * 0.05 * math.sqrt(4 / 3), abs=1e-4)
    with pytest.raises(ValueError, match="at least two seeds"):
        band([0.5], [0.05])


def test_paths_lead_to_values_and_standard_errors() -> None:
    assert value_of(ROWS[0], "after.accuracy") == (0.7, pytest.approx(0.01))
    assert value_of(ROWS[0], "after.accuracy - before.accuracy") == pytest.approx((0.3, 0.01 * math.sqrt(2)))
    both = {"seed": 0, "runs": {"long": ROWS[0], "cut": ROWS[1]}}
    assert value_of(both, "long.after.accuracy - cut.after.accuracy")[0] == pytest.approx(-0.1)
    with pytest.raises(UserError, match=r"no 'accurracy' in 'after.accurracy'; there are accuracy, response_tokens"):
        value_of(ROWS[0], "after.accurracy")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE.format(runs=tmp_path / "runs"))
    recorded = {"schema": 1, "bands": bands(ROWS, MEASURES), "seeds": ROWS}
    (folder / "results.json").write_text(json.dumps(recorded))
    return folder


def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, result: dict[str, Any], code: int = 0) -> list[list[str]]:
    """In the place of the training process: writes this result."""
    commands: list[list[str]] = []

    def run(command: list[str]) -> types.SimpleNamespace:
        commands.append(command)
        name = next(part.removeprefix("name=") for part in command if part.startswith("name="))
        (tmp_path / "runs" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / name / "results.json").write_text(json.dumps(result))
        return types.SimpleNamespace(returncode=code)

    monkeypatch.setattr(reproduce.subprocess, "run", run)
    return commands


@pytest.mark.parametrize("after, inside", [(0.75, True), (0.2, False)])
def test_says_inside_or_outside(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    after: float, inside: bool,
) -> None:  # fmt: skip
    commands = trained(monkeypatch, tmp_path, row(3, 0.4, after))
    checks = reproduce.verify(str(recipe))
    assert commands[0][1:] == [
        "-m", "hone", "train", str(recipe / "recipe.yaml"), "seed=3", "name=mine-verify-3",
    ]  # fmt: skip
    assert {check.measure: check.inside for check in checks}["after.accuracy"] is inside
    out = capsys.readouterr().out
    assert ("inside the recorded band" in out) is inside
    assert ("OUTSIDE" in out) is not inside
    assert "a new seed" in out
    written = json.loads((tmp_path / "runs/mine-verify-3/verify.json").read_text())
    assert written["checks"][0]["inside"] is inside


def test_several_runs_are_one_measurement(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"seed": s, "runs": {"long": row(s, 0.4, 0.8), "cut": row(s, 0.4, 0.6)}} for s in range(3)]
    measures = ["long.after.accuracy - cut.after.accuracy"]
    runs = {"long": {"recipe": "recipe.yaml", "overrides": ["steps=9"]}, "cut": {"recipe": "recipe.yaml"}}
    recorded = {"schema": 1, "runs": runs, "bands": bands(rows, measures), "seeds": rows}
    (recipe / "results.json").write_text(json.dumps(recorded))
    commands = trained(monkeypatch, tmp_path, row(1, 0.4, 0.7))
    (check,) = reproduce.verify(str(recipe), seed=1, resume=True)
    assert [c[5:] for c in commands] == [
        ["steps=9", "seed=1", "name=mine-verify-1-long", "--resume"], ["seed=1", "name=mine-verify-1-cut", "--resume"],
    ]  # fmt: skip
    assert check.value == 0.0  # both gave the same here
    assert not check.inside


def test_nothing_to_compare_with_stops_before_training(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = trained(monkeypatch, tmp_path, {})
    other = '{"schema": 9, "bands": {"a": 1}, "seeds": [1]}'
    for text, message in (("{", "not JSON"), ('{"seeds": []}', "holds no `bands`"), (other, "schema 9")):
        (recipe / "results.json").write_text(text)
        with pytest.raises(UserError, match=message):
            reproduce.verify(str(recipe))
    (recipe / "results.json").unlink()
    with pytest.raises(UserError, match="no recorded results"):
        reproduce.verify(str(recipe))
    assert commands == []


def test_a_training_that_fails_is_said(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(monkeypatch, tmp_path, {}, code=2)
    with pytest.raises(UserError, match="exit code 2"):
        reproduce.verify(str(recipe))
    trained(monkeypatch, tmp_path, {}, code=130)
    with pytest.raises(KeyboardInterrupt):
        reproduce.verify(str(recipe))


def test_the_demo_has_bands_of_what_it_recorded() -> None:
    recorded = read_results(Path(__file__).parents[2] / "recipes/demo")
    again = bands(recorded["seeds"], list(recorded["bands"]))
    assert again.keys() == recorded["bands"].keys()
    for key, found in again.items():
        assert found == pytest.approx(recorded["bands"][key])
    assert recorded["bands"]["after.accuracy - before.accuracy"]["low"] > 0  # the claim
