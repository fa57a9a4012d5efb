"""The report as a reader gets it: what it says, that it is safe, the same every time, and never in the way."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from hone.base.settings import UserError
from hone.report import curves, story, tables
from hone.report.build import build
from hone.report.figures import Curve, Panel, panel_figure
from hone.report.page import tiles
from hone.report.read import load_run
from hone.report.svg import Rendered, render
from tests.report.live_run import make_run

VOID = {"meta", "br", "hr"}
ELEMENTS = """html head title style body main header nav section footer figure figcaption h1 h2 h3 h4 p ul li a b small
strong span div dl dt dd table caption thead tbody tr th td details summary pre mark code svg g path defs use text tspan
rect desc clippath line"""
ALLOWED = VOID | set(ELEMENTS.split())


class Page(HTMLParser):
    """Checks while it reads: tags that nest, known elements and attributes, unique ids, links that lead somewhere."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.headings: list[int] = []
        self.texts: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))
        assert set(self.targets) <= set(self.ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED, tag
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            assert name not in ("src", "srcset", "action", "formaction", "data", "ping"), (tag, name)
            if name == "href":
                assert value is not None
                assert value.startswith("#"), value
                self.targets.append(value[1:])
            elif name == "id":
                self.ids.append(str(value))
            elif name == "aria-labelledby":
                self.targets += str(value).split()
            elif value and "url(" in value:
                self.targets += re.findall(r"url\(#([^)]+)\)", value)
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.texts))


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def built(pipeline: Path) -> Path:
    return build(pipeline)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are built but not drawn, where a test is about the words."""
    empty = Rendered('<svg viewBox="0 0 1 1" role="img"></svg>', "<svg/>", b"")
    for module in ("build", "sheet"):
        monkeypatch.setattr(f"hone.report.{module}.render", lambda *_, **__: empty)


@pytest.fixture(scope="module")
def page(built: Path) -> Page:
    return Page(built.read_text(encoding="utf-8"))


def test_warnings_stand_apart_from_what_happens_in_every_run(built: Path) -> None:
    text = built.read_text(encoding="utf-8")
    warnings, others, routine = (text.index(f"<h3>{title}</h3>") for title in ("Warnings", "Also happened", "Routine"))
    assert warnings < text.index("entropy fell below 0.15") < others
    assert others < text.index("from checkpoint 40") < routine < text.index("11 × checkpoint")


@pytest.mark.usefixtures("undrawn")
def test_events_without_a_step_and_settings_without_a_use(rl_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = rl_run(tmp_path / "one", steps=20)
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"step": None, "kind": "decode_kernel", "message": "was compiled"}) + "\n")
    rows = (folder / "evals.jsonl").read_text().replace('"top_p": 1.0,', '"top_p": 1.0, "top_k": 0, "stop": [],')
    (folder / "evals.jsonl").write_text(rows)
    text = build(folder).read_text()
    assert "decode kernel: was compiled" in text
    assert "temperature 1.0, top p 1.0, max tokens 320" in text


def test_no_two_figures_have_the_same_title(built: Path) -> None:
    titles = re.findall(r'<title id="[^"]*">([^<]*)<', built.read_text())
    assert len(titles) > 10
    assert [title for title, n in Counter(titles).items() if n > 1] == []


def test_reflection_is_left_out_where_answers_hold_none(rl_run: Callable[..., Path], tmp_path: Path) -> None:
    run = rl_run(tmp_path / "plain", steps=30)
    for name in ("metrics.jsonl", "evals.jsonl"):
        path = run / name
        path.write_text(re.sub(r'"reflection_rate": [0-9.e-]+', '"reflection_rate": 0.01', path.read_text()))
    text = build([run]).read_text()
    assert "Accuracy" in text
    assert "reflect" not in text.lower().replace("reflection_rate", "")


def test_groups_show_the_best_and_the_worst_answer_and_why(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    page = Page(build(folder).read_text(encoding="utf-8"))
    assert "of the last step, the group whose rewards differ most" in page.text
    assert "The task's grader read an answer and found it wrong." in page.text
    assert "Reward 1 = outcome 1 × 1." in page.text


def test_says_what_happened_with_the_numbers(page: Page, pipeline: Path) -> None:
    results = json.loads((pipeline / "results.json").read_text())
    before, after = (tables.percent(results[k]["accuracy"]["value"]) for k in ("before", "after"))
    assert f"the model solves {after} (95% interval" in page.text
    assert f"Before, it was {before} (95% interval" in page.text
    assert "McNemar exact" in page.text
    assert "p < 0.0001" in page.text
    assert "Accuracy rose from" in page.text
    assert "This run is not finished" not in page.text
    assert "4.7 min" in page.text
    assert "1.52 GiB" in page.text


def test_has_every_part(page: Page) -> None:
    parts = ["training", "evaluation", "samples", "groups", "first", "made", "events"]
    assert [i for i in page.ids if i in parts] == parts
    for title in (
        "Accuracy",
        "Response length",
        "Entropy",
        "Clipped tokens",
        "Groups without a signal",
        "Supervised loss",
    ):
        assert title in page.text
    assert "entropy fell below 0.15" in page.text
    assert "11 × checkpoint" in page.text
    assert "Wait" in page.text


def test_headings_do_not_skip_a_level(page: Page) -> None:
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(b <= a + 1 or b == 4 for a, b in zip(page.headings, page.headings[1:]))


def test_is_self_contained(built: Path) -> None:
    source = built.read_text(encoding="utf-8")
    assert "<script" not in source
    assert not re.search(r"https?://|@import|url\((?!#)", source)
    assert source.count("<svg") == source.count('role="img"')
    assert len(source) < 400_000


def test_figures_and_tables_stand_beside_it(built: Path) -> None:
    names = {path.name for path in built.parent.iterdir()}
    assert {"key.svg", "key.png", "accuracy.svg", "levels.png", "levels.csv", "levels.md", "summary.csv"} <= names
    assert (built.parent / "key.png").read_bytes().startswith(b"\x89PNG")
    svg = (built.parent / "key.svg").read_text(encoding="utf-8")
    assert svg.startswith("<svg xmlns=")
    assert "var(--" not in svg  # a file of its own has no page to take colours from
    assert "<title" in svg


def test_table_values_are_those_of_the_evaluation(built: Path, pipeline: Path) -> None:
    with (built.parent / "levels.csv").open() as file:
        cells = {(row["evaluation"], row["number of people"]): row for row in csv.DictReader(file)}
    rows = [json.loads(line) for line in (pipeline / "elicit/evals.jsonl").read_text().splitlines()]
    after = next(row for row in rows if row["label"] == "after")
    for level, cell in after["by_level"].items():
        got = cells["after", level]
        assert [float(got[k]) for k in ("accuracy", "low", "high", "n")] == [
            cell[k] for k in ("value", "low", "high", "n")
        ]
    assert float(cells["after", "all"]["accuracy"]) == after["accuracy"]["value"]


def test_two_builds_are_identical(built: Path, pipeline: Path, tmp_path: Path) -> None:
    # in a process of its own, where sets and dictionaries of strings have another order
    code = "import sys, pathlib, hone.report.build as b; b.build(*map(pathlib.Path, sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(pipeline), str(tmp_path)]
    subprocess.run(command, check=True, timeout=60, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert digests(tmp_path) == digests(built.parent)


def test_out_may_name_the_page(sft_run: Callable[..., Path], tmp_path: Path) -> None:
    path = build(sft_run(tmp_path / "a", steps=20), tmp_path / "x/page.html")
    assert path == tmp_path / "x/page.html"
    text = Page(path.read_text()).text
    assert "Supervised loss" in text
    assert "No evaluation before or after training" in text


@pytest.mark.usefixtures("undrawn")
def test_an_unfinished_run_says_so(rl_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = rl_run(tmp_path / "cut", steps=120, done=34)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 34, "acc')  # killed while writing
    text = Page(build(folder).read_text()).text
    assert "This run is not finished: cut is at 34 of 120 steps" in text
    assert "metrics.jsonl: 1 unreadable line left out" in text
    assert "Before training, the model solves" in text


@pytest.mark.usefixtures("undrawn")
def test_a_stage_that_has_not_started(pipeline: Path, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(pipeline, folder)
    shutil.rmtree(folder / "elicit")
    (folder / "results.json").unlink()
    assert "elicit has not started" in Page(build(folder).read_text()).text


@pytest.mark.parametrize(
    "missing", ["manifest.json", "evals", "evals.jsonl", "events.jsonl", "rollouts", "timings.jsonl", "metrics.jsonl"]
)
@pytest.mark.usefixtures("undrawn")
def test_missing_pieces_are_left_out(rl_run: Callable[..., Path], tmp_path: Path, missing: str) -> None:
    folder = rl_run(tmp_path / "run", steps=12, rollouts=2)
    path = folder / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = Page(build(folder).read_text())
    assert page.headings.count(1) == 1
    assert ("No evaluation before or after training" in page.text) == (missing == "evals.jsonl")
    assert ("Accuracy rose from" in page.text) == (missing != "evals.jsonl")
    assert ("share no problem" in page.text) == (missing == "evals")  # without the samples there is nothing to pair
    assert ("first" in page.ids) == (missing != "rollouts")
    assert ("entropy fell" in page.text) == (missing != "events.jsonl")


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        build(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        build(tmp_path / "nothing")
    (tmp_path / "stages.json").write_text('[{"name": "x", "kind": "rl", "folder": "../other"}]')
    with pytest.raises(ValueError, match="outside"):
        build(tmp_path)


EVIL = (
    "</script></pre></details><script>alert(1)</script><img src=x onerror=alert(1)>\"'><svg onload=alert(1)>"
    "<!-- --><style>*{display:none}</style>&lt;b&gt; \u202egnp.exe\u202c \u200b\x00\x1b[31m\ud800 {{7*7}} $x_1$ ]]>"
    " go back </mark>"
)


def test_markup_in_model_text_stays_text(rl_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = rl_run(tmp_path / "evil", steps=12, rollouts=2)
    for path in (*folder.glob("evals/*.jsonl"), *folder.glob("rollouts/*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            record.update(
                text=EVIL + record["text"],
                prompt=EVIL,
                extracted=EVIL,
                problem_id=EVIL + record["problem_id"],
                level=EVIL,
            )
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
    for row in rows:
        row["by_level"] = {EVIL: row["accuracy"], "=1+1": row["accuracy"]}
        row["verdicts"] = {EVIL: 1.0, "correct": 1.0}
        row["sampling"] = {EVIL: EVIL}
    (folder / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "events.jsonl").write_text(json.dumps({"step": EVIL, "kind": EVIL, "message": EVIL}) + "\n")
    (folder / "config.resolved.json").write_text(json.dumps({"name": EVIL, "stage": "rl", EVIL: EVIL}))
    (folder / "manifest.json").write_text(json.dumps({"seed": EVIL, "versions": {EVIL: EVIL}, "code_version": EVIL}))
    built = build(folder)
    source = built.read_text(encoding="utf-8")
    page = Page(source)
    assert "<script>alert(1)</script><img src=x onerror=alert(1)>" in page.text
    assert "⟨U+202E⟩gnp.exe⟨U+202C⟩ ⟨U+200B⟩⟨U+0000⟩⟨U+001B⟩[31m⟨U+D800⟩" in page.text
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b\x00\x1b]", source)
    assert "'=1+1" in (built.parent / "levels.csv").read_text()
    for path in built.parent.glob("*.svg"):
        assert "<script" not in path.read_text(encoding="utf-8").lower()


@pytest.mark.usefixtures("undrawn")
def test_long_text_is_shortened_and_says_so(rl_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = rl_run(tmp_path / "long", steps=4, rollouts=1)
    path = folder / "evals/after.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(r | {"text": "go back " * 100_000}) + "\n" for r in records[:3]))
    built = build(folder)
    assert built.stat().st_size < 500_000
    assert "794,000 characters left out" in Page(built.read_text()).text


@pytest.mark.usefixtures("undrawn")
def test_values_that_are_not_finite_are_reported(rl_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = rl_run(tmp_path / "nan", steps=20, rollouts=1)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[7]["grad_norm"] = float("nan")
    rows[9]["entropy"] = float("inf")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "not finite at 2 step(s), first at step 7" in Page(build(folder).read_text()).text


def test_rows_written_again_after_a_resume_count_once(sft_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = sft_run(tmp_path / "r", steps=10)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "phase": "sft", "loss": 99.0}\n')
    metrics = load_run(folder).stages[0].metrics
    assert metrics.steps == list(range(10))
    assert metrics.columns["loss"][4] == 99.0


def test_stages_of_rl_lie_end_to_end(rl_run: Callable[..., Path], tmp_path: Path) -> None:
    first, second = (load_run(rl_run(tmp_path / n, steps=10, rollouts=1)).stages[0] for n in ("a", "b"))
    line = curves.timeline([first, second])
    assert line.steps.tolist() == [float(i) for i in range(20)]
    assert [(mark.x, mark.label) for mark in curves.marks(line) if mark.label != "reset"] == [(10, "b")]
    assert [x for x, _ in line.evals("after")] == [10.0, 20.0]


def test_a_fall_is_called_a_fall(rl_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = rl_run(tmp_path / "down", steps=12, rollouts=1)
    rows = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
    for row in rows:
        row["label"] = {"before": "after", "after": "before"}.get(row["label"], row["label"])
        row["samples_file"] = f"evals/{'after' if row['label'] == 'before' else 'before'}.jsonl"
    (folder / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = load_run(folder)
    told = story.tell(run)
    assert story.headline(run, told).startswith("Accuracy fell from")
    assert told.comparison is not None
    assert told.comparison.difference.high < 0


def test_a_reward_that_is_not_the_accuracy_is_in_the_headline(rl_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = rl_run(tmp_path / "own", steps=12, rollouts=1)
    rows = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
    for row in rows:
        mean = 0.25 if row["label"] == "before" else 0.917
        row |= {"reward": {"value": mean, "low": mean - 0.05, "high": mean + 0.05, "n": 24}, "reward/mean": mean}
    (folder / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = load_run(folder)
    told = story.tell(run)
    headline = story.headline(run, told)
    assert headline.startswith("Accuracy ")
    assert headline.endswith("; mean reward 0.250 before, 0.917 after")
    assert any(
        "The mean reward on the" in sentence and "0.917 after" in sentence for sentence in story.sentences(run, told)
    )
    assert "Mean reward" in tiles(told)


def test_no_difference_is_not_called_a_rise(rl_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = rl_run(tmp_path / "same", steps=12, rollouts=1)
    shutil.copy(folder / "evals/before.jsonl", folder / "evals/after.jsonl")
    run = load_run(folder)
    told = story.tell(run)
    assert told.comparison is not None
    assert told.comparison.p_value == 1.0
    assert "did not measurably change" in story.headline(run, told)


def test_several_samples_per_problem_give_pass_at_k(rl_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = rl_run(tmp_path / "k", steps=12, rollouts=1)
    for label in ("before", "after"):
        path = folder / f"evals/{label}.jsonl"
        path.write_text(path.read_text() + path.read_text().replace('"index": 0', '"index": 1'))
    text = Page(build(folder).read_text()).text
    assert "pass@k" in text
    assert "sign-flip permutation" in text or "McNemar exact" in text
    assert "2 samples per problem" in text


def test_a_logarithmic_axis_has_plain_numbers() -> None:
    x = np.arange(4.0)
    for y in (np.asarray([0.02, 0.3, 4.0, 50.0]), np.asarray([1.1, 1.5, 2.0, 3.0])):
        panel = Panel("norm", "Gradient norm", "step", (Curve(x, y),), log=True)
        svg = render(panel_figure(panel), "norm", "title", "description").svg
        assert "$" not in svg
        assert ">1<" in svg


def test_levels_are_in_order() -> None:
    assert tables.level_order(["10", "2", "all", "3", "easy"]) == ["2", "3", "10", "all", "easy"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser: chromium")
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_no_page_scrolls_sideways(built: Path, tmp_path: Path, width: int) -> None:
    scrolled, sections = scroll_width(built, width, tmp_path)
    assert sections == built.read_text().count("<section") > 0  # the frame has loaded the page
    assert scrolled <= width


def scroll_width(page: Path, width: int, scratch: Path) -> tuple[int, int]:
    """How wide a page of that width would have to be to show everything, and its number of sections."""
    frame = scratch / "frame.html"
    frame.write_text(
        f"<iframe id=f src='{page.as_uri()}' style='width:{width}px;height:3000px;border:0'></iframe><p id=out></p>"
        "<script>f.onload=()=>{const page=f.contentDocument;out.textContent='scroll width '"
        "+page.documentElement.scrollWidth+' of '+page.querySelectorAll('section').length+' sections'}</script>"
    )
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--allow-file-access-from-files", "--disable-background-networking", "--dump-dom"]
    command += [f"--user-data-dir={scratch / 'profile'}", frame.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r"scroll width (\d+) of (\d+) sections", dom)
    assert found is not None
    return int(found.group(1)), int(found.group(2))


@pytest.mark.slow
def test_two_thousand_steps_are_quick(rl_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = rl_run(tmp_path / "long", steps=2000, rollouts=400)
    start = time.process_time()
    page = build(folder)
    assert time.process_time() - start < 20
    assert page.stat().st_size < 1_500_000
