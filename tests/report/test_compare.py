"""Several runs, and the models of `hone eval`, on one page."""

from __future__ import annotations

import csv
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import t

from hone.base.settings import UserError
from hone.measure.stats.measured import measured
from hone.report import models, runs
from hone.report.build import build
from hone.report.compare import evaluations_of, lettered
from hone.report.read import load_run
from hone.report.svg import Rendered
from hone.report.tables import Cell, Table
from tests.report.test_report import EVIL, Page, scroll_width

SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 64}


def evaluate(out: Path, label: str, rate: float, seed: int = 0, **about: Any) -> Path:
    """What `hone eval` leaves behind: 60 problems, 8 samples each."""
    folder = out / f"{len(list(out.glob('*'))) if out.exists() else 0}-00000000"
    folder.mkdir(parents=True)
    settings = {"label": label, "weights": label.split(" seed")[0], "task": {"name": "knights"}, "split": "test",
                "sampling": SAMPLING, "seed": seed, **about}  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(settings))
    rng = random.Random(len(label) + 1000 * seed)
    problems, samples = [], []
    for i in range(60):
        domain, answer = ("Algebra", str(i)) if i % 2 else ("Geometry", f"\\frac{{{i}}}{{7}}")
        problems.append(
            {"id": f"p{i:02d}", "level": str(2 + i // 2 % 3), "domain": domain, "answer": answer, "prompt": "?"}
        )
        for g in range(8):
            verdict = "correct" if rng.random() < rate * (i % 7) / 6 else "wrong"
            samples.append({"problem_id": f"p{i:02d}", "index": g, "verdict": verdict, "text": "so", "tokens": 5})
    for name, rows in (("problems", problems), ("samples", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Rendered('<svg viewBox="0 0 1 1" role="img"></svg>', "<svg/>", b"")
    for module in ("build", "sheet"):
        monkeypatch.setattr(f"hone.report.{module}.render", lambda *_, **__: empty)


@pytest.fixture
def three(rl_run: Callable[..., Path], tmp_path: Path) -> list[Path]:
    """Two seeds of one setting and a run with another."""
    folders = [rl_run(tmp_path / name, steps=40, rollouts=1) for name in ("grpo-seed0", "grpo-seed1", "rloo")]
    for i, folder in enumerate(folders):
        config = json.loads((folder / "config.resolved.json").read_text())
        config |= {"seed": i, "name": folder.name} | (
            {"algo": {**config["algo"], "advantage": "rloo"}} if i == 2 else {}
        )
        (folder / "config.resolved.json").write_text(json.dumps(config))
    rows = [json.loads(line) for line in (folders[1] / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["entropy"] += 0.1
    (folders[1] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folders


def test_runs_that_differ_in_their_seed_are_one_condition(three: list[Path]) -> None:
    found = runs.conditions([load_run(folder) for folder in three])
    assert [(c.label, len(c.runs)) for c in found] == [("grpo", 2), ("rloo", 1)]
    table = runs.different_settings(found)
    assert table is not None
    assert [[cell.text for cell in row] for row in table.rows] == [["algo.advantage", "grpo", "rloo"]]


def test_a_run_of_one_stage_is_compared_with_the_stage_like_it(three: list[Path], tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(three[2], whole / "rl")
    (whole / "stages.json").write_text(json.dumps([{"name": "rl", "kind": "rl", "folder": "rl"}]))
    table = runs.different_settings(runs.conditions([load_run(folder) for folder in (three[0], whole)]))
    assert table is not None
    assert [[cell.text for cell in row] for row in table.rows] == [["algo.advantage", "grpo", "rloo"]]


def test_a_band_reaches_from_the_least_to_the_greatest_seed(three: list[Path]) -> None:
    first, other = runs.conditions([load_run(folder) for folder in three])
    x, y, low, high = runs.over_seeds(first.lines, "entropy")
    assert x.tolist() == list(range(40))
    assert low is not None
    assert high is not None
    assert np.allclose(high - low, 0.1)
    assert np.allclose(y, (low + high) / 2)
    assert runs.over_seeds(other.lines, "entropy")[2] is None


def test_intervals_over_seeds_are_students(three: list[Path]) -> None:
    got = runs.over_runs([0.5, 0.6, 0.9])
    low, high = t.interval(0.95, 2, loc=np.mean([0.5, 0.6, 0.9]), scale=np.std([0.5, 0.6, 0.9], ddof=1) / np.sqrt(3))
    assert got is not None
    assert (got.low, got.high, got.n) == pytest.approx((low, high, 3))
    assert runs.over_runs([0.5]) is None


def test_the_page_of_several_runs(three: list[Path], tmp_path: Path) -> None:
    path = build(three)
    assert path == tmp_path / "comparison/report.html"
    page = Page(path.read_text())
    assert page.headings[0] == 1
    assert "grpo against rloo" in page.text
    assert "not measurably different from grpo on the same 200 problems" in page.text  # the same made-up evaluations
    assert "bands span the lowest to the highest seed" in page.text
    assert [i for i in page.ids if i in ("outcome", "curves", "settings")] == ["outcome", "curves", "settings"]
    names = {p.name for p in path.parent.iterdir()}
    assert {"entropy.svg", "entropy.png", "entropy.csv", "outcome.csv", "outcome.md", "outcome.tex"} <= names
    with (path.parent / "entropy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["curve"] for row in rows} == {"grpo", "rloo"}
    assert all(float(row["high"]) - float(row["low"]) == pytest.approx(0.1) for row in rows if row["curve"] == "grpo")
    assert "<script" not in path.read_text()


@pytest.mark.usefixtures("undrawn")
def test_runs_of_which_nothing_is_left_but_the_metrics(three: list[Path]) -> None:
    for folder in three:
        for name in ("evals", "rollouts"):
            shutil.rmtree(folder / name)
        for name in ("evals.jsonl", "events.jsonl", "manifest.json"):
            (folder / name).unlink()
    (three[2] / "config.resolved.json").unlink()
    assert "Training accuracy" not in Page(build(three).read_text()).text  # figures are not drawn here
    with pytest.raises(UserError, match="is given twice"):
        build([three[0], three[0]])


def test_the_page_of_evaluated_models(tmp_path: Path) -> None:
    out = tmp_path / "evaluations"
    for label, rate, seed in (("base", 0.2, 0), ("base seed 1", 0.2, 1), ("trained with a long name", 0.8, 0)):
        evaluate(out, label, rate, seed)
    path = build(out)
    page = Page(path.read_text())
    ids = ("models", "knights", "by-levels", "by-domains", "by-format", "ability")
    assert [i for i in page.ids if i in ids] == list(ids)
    assert "test split, temperature 0.7, top p 1, max tokens 64, 8 samples per problem, seed 0" in page.text
    assert page.text.count("published, not measured here") >= 10
    assert "that base never solved in 8 samples" in page.text
    assert "A base" in page.text  # a letter stands for a long name
    with (path.parent / "new-ability.csv").open() as file:
        rows = {(row["model"], row["k"]): float(row["pass_at_k"]) for row in csv.DictReader(file)}
    assert 0 < rows["base seed 1", "8"] < rows["trained with a long name", "8"]  # not 0 by construction
    with (path.parent / "knights.csv").open() as file:
        cells = {(row["model"], row["people"]): row for row in csv.DictReader(file)}
    levels = [float(cells["base", n]["accuracy"]) for n in "234"]
    assert float(cells["base", "average"]["accuracy"]) == pytest.approx(sum(levels) / 3)
    assert cells["7B GRPO, step 420 (published, not measured here)", "8"]["low"] == ""
    tex = (path.parent / "differences.tex").read_text()
    assert tex.count(r"\\") == 3
    assert "trained with a long name $-$ base" in tex


def test_gold_perplexity_of_evaluated_models(tmp_path: Path) -> None:
    out = tmp_path / "evaluations"
    for label, after in (("base", 4.0), ("trained", 2.0)):
        folder = evaluate(out, label, 0.5)
        rows = [{"problem_id": f"p{i:02d}", "index": g, "logprobs": [-math.log(16.0 if g is None else after)] * 2}
                for i in range(60) for g in (None, *range(8))]  # fmt: skip
        (folder / "gold.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = build(out)
    assert "Gold answers" in Page(path.read_text()).text
    with (path.parent / "gold-perplexity.csv").open() as file:
        cells = {(row["model"], row["reasoning"]): float(row["perplexity"]) for row in csv.DictReader(file)}
    assert cells == pytest.approx(
        {("base", "without"): 16.0, ("base", "after"): 4.0, ("trained", "without"): 16.0, ("trained", "after"): 2.0}
    )
    assert "0.500" in (path.parent / "gold-perplexity.md").read_text()  # trained / base


@pytest.mark.usefixtures("undrawn")
def test_evaluations_of_a_run_are_in_its_report(rl_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = rl_run(tmp_path / "run", steps=12, rollouts=1)
    evaluate(folder / "evaluations", "run", 0.5)
    evaluate(folder / "evaluations", "run", 0.5, seed=3)
    assert [m.label for m in evaluations_of(folder)] == ["run", "run"]
    text = Page(build(folder).read_text()).text
    assert "Models compared" in text
    assert "run (2)" in text


@pytest.mark.usefixtures("undrawn")
def test_names_of_models_stay_text(tmp_path: Path) -> None:
    evaluate(tmp_path / "e", EVIL, 0.5)
    evaluate(tmp_path / "e", r"\input{/etc/passwd} & 50% $x$ _", 0.6)
    path = build(tmp_path / "e")
    Page(path.read_text())
    tex = (path.parent / "models.tex").read_text()
    assert r"\textbackslash{}input\{/etc/passwd\} \& 50\% \$x\$ \_" in tex


def test_a_damaged_evaluation_says_where(tmp_path: Path) -> None:
    folder = evaluate(tmp_path / "e", "m", 0.5)
    (folder / "samples.jsonl").write_text('{"index": 0}\n')
    with pytest.raises(UserError, match="0-00000000: not a complete evaluation"):
        build(tmp_path / "e")


def test_phases_and_resets_are_marked(rl_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = rl_run(tmp_path / "run", steps=80, rollouts=1)
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"step": 30, "kind": "phase", "message": "from step 30 on: temperature 1.2"}) + "\n")
    (found,) = runs.conditions([load_run(folder)])
    panels = {panel.key: panel for panel in runs.overlays([found])}
    for key in ("accuracy", "validation", "entropy"):
        assert [(mark.x, mark.label) for mark in panels[key].marks] == [(30, "phase"), (60, "reset")]


def test_letters_only_where_names_are_long() -> None:
    assert lettered(["base", "rl"]) == {"base": "base", "rl": "rl"}
    assert lettered(["base", "a name that is long"]) == {"base": "A", "a name that is long": "B"}


def test_regression_says_why_there_is_none() -> None:
    rows = [
        {"problem_id": f"{d}{i}", "verdict": ("wrong", "correct")[i % 2], "domain": d, "level": {"a": "1", "b": "2"}[d]}
        for d in "ab"
        for i in range(6)
    ]
    table, notes = models.regression([measured("m", rows)])
    assert table is None
    assert "follows from the domain" in notes[0]


def test_latex_and_csv_of_a_table() -> None:
    table = Table("k", "A 50% caption", ("", "x_1"), ((Cell("−1.5", "a–b"), Cell("=1+1")),), (("=1", 2),), ("=n", "v"))
    assert table.latex().splitlines()[1:6] == [
        r"\begin{tabular}{lr}", r"\toprule", r" & x\_1 \\", r"\midrule", r"$-$1.5 a--b & =1+1 \\",
    ]  # fmt: skip
    assert table.csv() == "'=n,v\n'=1,2\n"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser: chromium")
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_no_comparison_scrolls_sideways(three: list[Path], tmp_path: Path, width: int) -> None:
    for i, rate in enumerate((0.2, 0.5, 0.8)):
        evaluate(three[0] / "evaluations", "a-model-whose-name-has-no-place-to-break-" * 3 + str(i), rate)
    scrolled, sections = scroll_width(build(three), width, tmp_path)
    assert sections == 9
    assert scrolled <= width
