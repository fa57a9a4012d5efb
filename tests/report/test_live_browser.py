"""The live page in a real browser: every page, hostile text everywhere, live growth, accessibility, pictures.

    pip install -e '.[browser]'
    .venv/bin/python -m pytest -m browser tests/report/test_live_browser.py
    .venv/bin/python -m pytest -m browser tests/report/test_live_browser.py --basetemp=shots   # pictures below it

`CHROMIUM` names the browser; the default is `chromium` on the PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from hone.base.settings import UserError
from hone.base.web import listen, settings
from hone.report.live.app import make_app
from hone.report.live.library import Library, StageFolder
from hone.report.live.travel import Travel
from tests.report.hostile import EVIL
from tests.report.live_run import GROUP, answer, append, evaluation, make_run, write_metrics, write_step

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]' to look at the live page")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or ""
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH; CHROMIUM names another"),
]
#: No sandbox: tests may run as root in a container. The others keep the browser from looking for its maker.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
PAGES = ("overview", "rollouts", "read?preset=worst", "group/1/0", "sample/1/0", "sample/1/0?overlay=entropy",
         "distributions", "evaluations", "travel?step=1", "settings", "log")  # fmt: skip
AXE = Path(__file__).parent / "axe" / "axe.min.js"


class Shown:
    """A server on some runs, and a browser on it."""

    def __init__(self, root: Path, browser: Any, pictures: Path, travel: Travel | None = None) -> None:
        self.root, self.browser, self.pictures = root, browser, pictures
        self.listener = listen("127.0.0.1", 0)
        app = make_app(Library.at(root), ("127.0.0.1",), None, travel)
        self.server = uvicorn.Server(settings(app))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})
        self.thread.start()
        self.base = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.trouble: list[str] = []

    def page(self, width: int = 1440, scheme: str = "light") -> Any:
        context = self.browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
        )
        context.set_default_timeout(15000)

        def only_here(route: Any) -> None:
            if route.request.url.startswith((self.base, "data:", "about:")):
                route.continue_()
            else:
                self.trouble.append(f"asked for {route.request.url}")
                route.abort()

        context.route("**/*", only_here)
        page = context.new_page()
        page.on("pageerror", lambda error: self.trouble.append(f"error: {error}"))
        page.on("console", lambda line: self.trouble.append(line.text) if line.type == "error" else None)
        page.on("dialog", lambda dialog: (self.trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        return page

    def open(self, page: Any, where: str) -> None:
        """Open an address and wait until the page has been drawn."""
        page.goto("about:blank")
        page.goto(f"{self.base}/#/{where}")
        page.wait_for_selector("main h1")
        page.wait_for_load_state("networkidle")

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(15)
        self.listener.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def shown(tmp_path: Path, browser: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_run(tmp_path / "runs" / "one")
    make_run(tmp_path / "runs" / "two-s1", steps=3)
    make_run(tmp_path / "runs" / "two-s2", steps=3)
    shown = Shown(tmp_path / "runs", browser, tmp_path)
    yield shown
    shown.close()


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_drawn_and_fits(shown: Shown, width: int, scheme: str) -> None:
    page = shown.page(width, scheme)
    for where in ("", *(f"one/-/{name}" for name in PAGES)):
        shown.open(page, where)
        assert page.locator(".empty", has_text="Nothing to show").count() == 0, where
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{where} is wider than {width}"
        page.screenshot(
            path=shown.pictures / f"{where.replace('/', '-').replace('?', '-') or 'runs'}-{width}-{scheme}.png"
        )
    assert shown.trouble == []


def test_axe_finds_nothing_serious(shown: Shown) -> None:
    for scheme in ("light", "dark"):
        page = shown.page(1440, scheme)
        for where in ("", *(f"one/-/{name}" for name in PAGES)):
            shown.open(page, where)
            page.evaluate(AXE.read_text())  # not through a <script>, which the policy forbids
            result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            serious = [
                (one["id"], [node["html"][:160] for node in one["nodes"][:3]])
                for one in result["violations"]
                if one["impact"] in ("serious", "critical")
            ]
            assert serious == [], where


def test_hostile_text_stays_text(tmp_path: Path, browser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every field of a run that a page shows."""
    assert len(EVIL) >= 60
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = make_run(tmp_path / "runs" / "evil", steps=1)
    rows = []
    for i, text in enumerate(EVIL):
        fields = dict.fromkeys(("problem_id", "level", "prompt", "verdict", "extracted", "note", "finish"), text)
        call = {"content": text, "tool_calls": [{"function": {"name": text, "arguments": text}}]}
        turn = {"message": call, "replies": [{"role": text, "name": text, "content": text}], "error": text,
                "seconds": {text: 1.0}}  # fmt: skip
        steps = [turn, turn | {"message": {"content": text}}] if i % 2 else []
        row = answer(1, i % GROUP, text=text) | fields
        rows.append(row | {"index": 0, "parts": {text: 1.0}, "policy_version": text, "steps": steps})
    write_step(run, 1, rows, piece=EVIL[7])
    for text in EVIL:
        append(
            run / "events.jsonl",
            {"step": 0, "kind": text, "message": text},
            {"step": 0, "kind": "collapse", "message": text},
        )
    append(
        run / "metrics.jsonl",
        {"step": 1, "phase": EVIL[0], **{f"reward/{text}": 0.5 for text in EVIL}, **dict.fromkeys(EVIL, 1.0)},
    )
    append(run / "timings.jsonl", {"step": 1, "seconds": 1.0, **dict.fromkeys(EVIL, 1.0)})
    for i, text in enumerate(EVIL):
        evaluation(run, "validation", 10 + i, [True, False], text=text)
    config = json.loads((run / "config.resolved.json").read_text())
    config |= {"task": {text: text for text in EVIL}, "reward": {"parts": dict.fromkeys(EVIL, 1.0)}}
    (run / "config.resolved.json").write_text(json.dumps(config))
    (run / "manifest.json").write_text(json.dumps({text: text for text in EVIL}))
    shown = Shown(tmp_path / "runs", browser, tmp_path)
    try:
        page = shown.page()
        pages = [
            "",
            *(f"evil/-/{name}" for name in ("overview", "rollouts", "distributions", "evaluations", "settings", "log")),
        ]
        pages += ["evil/-/travel?step=1", "evil/-/read"]
        pages += [f"evil/-/{kind}/1/{i}" for i in range(0, len(EVIL), 5) for kind in ("group", "sample")]
        for where in pages:
            shown.open(page, where)
            page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
            assert page.evaluate("window.hacked === undefined && !document.getElementById('hacked')"), where
            outside = page.evaluate(
                "document.querySelectorAll('main script, main iframe, main object, main embed, main style, main base, "
                "main img, main video, main audio, main form, main link, main meta, [onerror], [onload]').length"
            )
            assert outside == 0, where
            assert page.evaluate("[...document.links].every(one => ['http:'].includes(one.protocol))"), where
            assert not page.evaluate("/[\\u202e\\u2066\\u200b\\u0000\\u001b]/.test(document.body.innerText)"), where
        assert shown.trouble == []
    finally:
        shown.close()


def test_the_page_follows_a_run(shown: Shown) -> None:
    page = shown.page()
    shown.open(page, "one/-/overview")
    run = shown.root / "one"
    write_step(run, 4, [answer(4, place, text="a fresh answer") for place in range(3 * GROUP)])
    write_metrics(run, 4)
    page.wait_for_selector(".tiles div:first-child b:text-is('5')")
    shown.open(page, "one/-/rollouts")
    write_step(run, 5, [answer(5, place, text="the newest answer") for place in range(3 * GROUP)])
    page.wait_for_selector("text=the newest answer")
    assert shown.trouble == []


def test_from_a_dip_to_the_three_worst_answers_and_why_in_four_clicks(shown: Shown) -> None:
    run = shown.root / "long"
    make_run(run, steps=0)
    for step in range(40):  # the reward falls at step 30, in which problem 1 is answered wrong once more
        rows = [answer(1, place) | {"policy_version": step} for place in range(3 * GROUP)]
        if step == 30:
            rows[6] |= {"total": 0.0, "advantage": -1.5, "verdict": "wrong", "parts": {"outcome": 0.0}}
        write_step(run, step, rows)
        write_metrics(run, step, reward=0.1 if step == 30 else 0.5)
    page, clicks = shown.page(), 0
    shown.open(page, "")
    page.get_by_role("link", name="long").click()
    clicks += 1
    plot = page.locator("[data-key=reward] .u-over")
    box = plot.bounding_box()
    plot.click(position={"x": box["width"] * 30 / 39, "y": 40})
    clicks += 1
    page.wait_for_selector(".vrow")
    assert "from=30&to=30" in page.url
    page.get_by_role("button", name="Lowest advantage").click()
    clicks += 1
    page.locator(".vrow", has_text="−1.5").wait_for()
    page.get_by_role("link", name="Read the first three").click()
    clicks += 1
    page.wait_for_selector(".card")
    cards = page.locator(".card")
    assert cards.count() == 3
    assert "Step 30, sample 6" in cards.nth(0).inner_text()  # the lowest advantage
    for one in cards.all():
        assert "The task's grader read an answer and found it wrong." in one.locator(".why").inner_text()
        assert "the update makes this answer less likely" in one.locator(".why").inner_text()
    assert clicks <= 4
    assert shown.trouble == []


def test_the_overview_shows_times_of_turns_and_names_what_is_zero(shown: Shown) -> None:
    page = shown.page()
    shown.open(page, "one/-/overview")
    turns = page.locator("[data-key=turns]").inner_text()
    assert "means of step 3" in turns
    assert "generation 0.25" in turns.replace("\n", " ")  # of the last turn
    assert "0 in every step so far: answers cut off." in page.locator("main").inner_text()
    assert page.locator("[data-key='length/truncated']").count() == 0
    assert shown.trouble == []


def test_a_click_on_an_answer_opens_its_group_with_the_reasons(shown: Shown) -> None:
    page = shown.page()
    shown.open(page, "one/-/rollouts?from=2&to=2")
    page.locator(".vrow").first.click()
    page.wait_for_selector(".card.active")
    assert "read an answer and found it wrong" in page.locator(".card.active .why").inner_text()
    assert shown.trouble == []


def test_time_travel_shows_both_rewards(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    page = shown.page()
    shown.open(page, "one/-/travel?step=1")
    assert "it has to be allowed" in page.locator("main").inner_text()
    row = page.locator("main table tbody tr").first.inner_text()
    assert row.split()[:2] == ["sample", "9"]  # advantage 0.75 times 19 tokens, the largest

    def work(self: Travel, name: str, stage: StageFolder, *arguments: Any) -> dict[str, Any]:
        if name == "replayed":
            raise UserError("the checkpoint of step 1 was not kept")
        first = {"place": 0, "problem": "p", "index": 0, "old": 1.0, "new": 0.25, "old_verdict": "correct",
                 "new_verdict": "wrong", "note": EVIL[0]}  # fmt: skip
        rest = first | {"place": 1, "new": 1.0, "new_verdict": "correct", "note": None}
        return {"step": 1, "parts": {}, "left_out": ["judge"], "unknown": 0, "tokens": True, "groups": 1,
                "answers": [first, rest], "differences": [0, 1]}  # fmt: skip

    monkeypatch.setattr(Travel, "_run", work)
    allowed = Shown(shown.root, shown.browser, shown.pictures, Travel([Path("other.yaml")]))
    try:
        page = allowed.page()
        allowed.open(page, "one/-/travel?step=1")
        page.get_by_label("Reward").select_option("other.yaml")
        page.get_by_role("button", name="Score again").click()
        page.wait_for_selector("text=1 with another reward or verdict")
        text = page.locator(".results").first.inner_text()
        assert "Mean reward 1 → 0.625" in text
        assert "Groups with a difference: 0 → 1 of 1" in text
        assert "judge" in text
        assert "−0.75" in text
        page.get_by_role("button", name="Sample again").click()
        page.wait_for_selector("text=the checkpoint of step 1 was not kept")
        assert page.evaluate("window.hacked === undefined")
        assert [one for one in allowed.trouble if "404" not in one] == []
    finally:
        allowed.close()


def test_the_right_answer_is_shown_beside_the_one_that_was_read(shown: Shown) -> None:
    page = shown.page()
    shown.open(page, "one/-/sample/1/4")
    assert page.locator(".readings").inner_text().split("\n") == ["Read as the answer", "4", "Right answer", "5"]
    shown.open(page, "one/-/group/1/1")
    assert page.locator(".readings.ofgroup").inner_text().split("\n") == ["Right answer", "5"]
    assert shown.trouble == []


def test_an_episode_is_folded_by_turn(shown: Shown) -> None:
    call = {"role": "assistant", "content": "Let me compute.", "tool_calls": [
        {"id": "1", "function": {"name": "python", "arguments": '{"code": "1 / 0"}'}}]}  # fmt: skip
    replies = [{"role": "tool", "name": "python", "content": "Traceback (most recent call last): ZeroDivisionError"}]
    steps = [{"message": call, "replies": replies, "seconds": 1.5}, {"message": {"content": EVIL[0]}, "replies": []}]
    rows = [answer(7, place) | {"turns": 2, "end": "done", "steps": steps} for place in range(GROUP)]
    write_step(shown.root / "one", 7, rows)
    page = shown.page()
    shown.open(page, "one/-/sample/7/0")
    assert page.locator(".turns > li").count() == 2
    first = page.locator(".turns > li").first
    assert "calls python (1 / 0) · an error came back · 1.5 s" in first.locator("summary").inner_text()
    assert page.locator(".turns details[open]").count() == 1  # the last, which holds the answer
    first.locator("summary").click()
    assert "1 / 0" in first.locator(".call pre").inner_text()
    shown.open(page, "one/-/rollouts?preset=tools")
    assert page.locator(".vrow").count() == GROUP
    assert shown.trouble == []


def test_a_page_that_is_open_before_the_run_follows_its_stages(browser: Any, tmp_path: Path) -> None:
    run = tmp_path / "later"
    shown = Shown(run, browser, tmp_path)
    try:
        page = shown.page()
        page.goto(shown.base)
        page.wait_for_selector("text=no finished step yet")
        make_run(tmp_path / "made" / "rl")
        stages = [{"name": "warmup", "kind": "sft", "folder": "warmup"}, {"name": "rl", "kind": "rl", "folder": "rl"}]
        (tmp_path / "made" / "stages.json").write_text(json.dumps(stages))
        (tmp_path / "made").rename(run)
        page.wait_for_selector(".stages a[aria-current]", timeout=30000)
        assert page.locator(".stages a[aria-current]").inner_text() == "rl"
        page.wait_for_selector("[data-key=reward]")
        page.locator(".stages a", has_text="warmup").click()
        page.locator(".tabs a", has_text="Rollouts").click()
        page.wait_for_selector("text=A supervised stage samples no answers")
        assert page.locator("#notice").is_hidden()
        assert [one for one in shown.trouble if "404" not in one] == []  # of the stage that the page was open at
    finally:
        shown.close()


def test_damaged_rows_do_not_disorder_the_charts(shown: Shown) -> None:
    path = shown.root / "one" / "metrics.jsonl"
    append(path, {"step": -5, "reward/mean": 9}, {"step": "x"}, {"step": 1, "reward/mean": 0.875})
    with path.open("a") as file:
        file.write('[]\n{"step": 2, "rew')
    page = shown.page()
    shown.open(page, "one/-/overview")
    assert page.locator(".tiles dd b").first.inner_text() == "4"
    assert "from 0.3 to 0.6" in page.locator("[data-key=reward] .plot").get_attribute("aria-label")
    assert shown.trouble == []


def test_a_page_of_a_running_run_rests(shown: Shown) -> None:
    page = shown.page()
    page.emulate_media(reduced_motion="no-preference")
    shown.open(page, "one/-/overview")
    page.evaluate("document.querySelector('.state').className = 'state running'")
    assert page.evaluate("document.getAnimations().length") == 0  # else it is drawn 60 times a second


def test_the_page_says_when_its_server_has_ended(shown: Shown) -> None:
    page = shown.page()
    shown.open(page, "one/-/overview")
    assert page.locator("#notice").is_hidden()
    shown.server.should_exit = True
    page.wait_for_selector("#notice:not([hidden])")
    assert "hone view" in page.locator("#notice").inner_text()
    assert page.locator("[data-key=reward]").count() == 1  # what was shown stays


def test_a_supervised_stage_shows_its_validation_loss(shown: Shown) -> None:
    run = shown.root / "one"
    (run / "metrics.jsonl").unlink()
    for step in range(4):
        held_out = {"validation_loss": 2.5 - step / 2} if step % 2 else {}
        append(run / "metrics.jsonl", {"step": step, "phase": "sft", "loss": 2.0 - step / 4, **held_out})
    page = shown.page()
    shown.open(page, "one/-/overview")
    about = page.locator("[data-key=loss] .plot").get_attribute("aria-label")
    assert "training: from 2 to 1.25" in about
    assert "validation: from 2 to 1," in about
    assert page.locator(".tiles div", has_text="Loss").inner_text().split("\n") == ["Loss", "1.25validation 1"]
    assert page.locator(".more [data-key]").count() == 0  # not once more among the other columns
    assert shown.trouble == []


def test_where_the_task_does_not_grade_the_reward_is_shown(shown: Shown) -> None:
    path = shown.root / "one" / "evals.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["reward"] = {**row.pop("accuracy"), "value": 1.5, "low": -0.25, "high": 2.0}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = shown.page()
    shown.open(page, "one/-/overview")
    tile = page.locator(".tiles div", has_text="Validation").inner_text().split("\n")
    assert tile == ["Validation, reward", "1.500(−0.250 to 2.000) at step 3"]
    assert "Validation reward. reward: from 1.5 to 1.5" in page.locator("[data-key=validation] .plot").get_attribute(
        "aria-label"
    )
    shown.open(page, "")
    assert "1.500 (−0.250 to 2.000) reward, step 3" in page.locator("tr", has_text="one").inner_text()
    assert "50.0% (" in page.locator("tr", has_text="two-s1").inner_text()
    assert shown.trouble == []


def test_a_fault_of_the_page_is_not_called_an_end_of_its_server(shown: Shown) -> None:
    page = shown.page()
    shown.open(page, "one/-/overview")
    page.route("**/rows/metrics*", lambda route: route.fulfill(json={"rows": None, "offset": 0, "mark": 0}))
    page.wait_for_selector("#notice:not([hidden])")
    assert "server" not in page.locator("#notice").inner_text()
    assert any("TypeError" in one for one in shown.trouble)


def test_a_late_answer_about_one_run_does_not_change_the_page_of_another(shown: Shown) -> None:
    page = shown.page()
    shown.open(page, "one/-/overview")
    held: list[Any] = []
    page.route("**/api/run/one", lambda route: route.continue_() if held else held.append(route))
    while not held:  # the next look of the header
        page.wait_for_timeout(100)
    page.evaluate("location.hash = '#/two-s1/-/overview'")
    page.wait_for_selector(".run:text-is('two-s1')")
    stages = [{"name": "rl", "kind": "rl", "folder": "rl"}]  # a stage that is gone leads to the front page of its run
    (shown.root / "one" / "stages.json").write_text(json.dumps(stages))
    held[0].continue_()
    page.wait_for_timeout(500)
    assert page.locator(".run").inner_text() == "two-s1"
    assert shown.trouble == []


def test_keys_pins_and_overlays(shown: Shown) -> None:
    page = shown.page()
    shown.open(page, "one/-/group/1/0")
    page.keyboard.press("p")
    page.keyboard.press("j")
    page.keyboard.press("p")
    assert page.locator(".sides del").count() > 0  # the two answers differ in a word
    page.keyboard.press("?")
    assert page.locator("#help[open]").count() == 1
    assert "pin the answer" in page.locator("#help").inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("n")
    page.wait_for_selector("text=Step 1, group 1")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Step 1, sample 4")
    page.keyboard.press("o")
    assert page.locator(".tokens span").count() == 14
    page.keyboard.press("n")
    # sample 4, token 13 has the highest entropy: (4 + 13) / 10
    assert "entropy 1.7" in page.locator(".detail").inner_text()
    page.keyboard.press("1")
    page.wait_for_selector(".tiles")
    assert shown.trouble == []


#: Pictures of docs/view.md: the name, the address below a stage, and the width.
DOCUMENTED = (
    ("overview", "overview", 1280),
    ("rollouts", "rollouts?preset=wrong", 1280),
    ("group", "group/{step}/0", 1280),
    ("sample", "sample/{step}/0?overlay=entropy", 1280),
    ("travel", "travel?step={step}", 1280),
    ("phone", "group/{step}/0", 390),
)


@pytest.mark.skipif("VIEW_RUN" not in os.environ, reason="VIEW_RUN names a trained run, such as runs/demo")
def test_pictures_of_the_docs(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a real run, into docs/images."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = Path(os.environ["VIEW_RUN"])
    out = Path(__file__).parents[2] / "docs" / "images"
    out.mkdir(exist_ok=True)
    shown = Shown(run, browser, out, Travel())
    stage = "rl" if (run / "rl").is_dir() else "-"
    try:
        for name, where, width in DOCUMENTED:
            page = shown.page(width)
            shown.open(page, f"{run.name}/{stage}/{where.format(step=os.environ.get('VIEW_STEP', '3'))}")
            if name == "rollouts":
                page.locator(".title p", has_text="Reading").wait_for(state="detached")
                page.wait_for_selector(".scatters figure")
            page.wait_for_timeout(500)
            page.screenshot(path=out / f"view-{name}.png")
        assert shown.trouble == []
    finally:
        shown.close()
