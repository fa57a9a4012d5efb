"""The live page's index and server: rows by byte offset, what is shown, and who may ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from hone.base.settings import UserError
from hone.report.live.app import COOKIE, make_app
from hone.report.live.index import RolloutIndex, index_file, repetition, row_at
from hone.report.live.library import Library
from hone.report.live.query import Browser, Query
from hone.report.live.tail import read_from, read_rows
from hone.report.live.views import finite, listing
from hone.runs import layout
from tests.report.live_run import GROUP, answer, append, make_run, write_metrics, write_step

HOSTS = ("127.0.0.1", "localhost")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make_run(tmp_path / "runs" / "one")


@pytest.fixture
def client(run: Path) -> Iterator[TestClient]:
    with TestClient(make_app(Library.at(run.parent), HOSTS, None), base_url="http://127.0.0.1:1") as client:
        yield client


def indexed(stage: Path) -> RolloutIndex:
    index = RolloutIndex(stage)
    index.refresh()
    return index


def rows_of(stage: Path, **parameters: str) -> list[tuple[int, int]]:
    """(step, place) of the selected rows."""
    table, rows = Browser(indexed(stage)).rows(Query.of(parameters))
    return [(int(table.columns["step"][at]), int(table.columns["place"][at])) for at in rows]


# --- files of rows ------------------------------------------------------------------------------------------------


def test_looking_for_what_is_new_does_not_touch_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = make_run(tmp_path / "one")
    index = RolloutIndex(stage)
    index.refresh()

    def looked(*arguments: object) -> None:
        raise AssertionError("an unchanged file was looked up")

    monkeypatch.setattr("hone.runs.layout.inside", looked)
    assert not index.refresh()


def test_a_request_about_one_run_does_not_list_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two\u202e"):
        make_run(tmp_path / "runs" / name)
    (tmp_path / "runs" / ".hidden").mkdir()
    make_run(tmp_path / "outside")
    library = Library.at(tmp_path / "runs")
    for name in ("..", "../outside", ".hidden", "absent", "."):
        with pytest.raises(UserError, match="no run"):
            library.stages(name)
    assert library.summary("two⟨U+202E⟩")["stages"][0]["done"] == 4
    listed = []
    monkeypatch.setattr("hone.runs.listing.runs_in", lambda folder: listed.append(folder) or [])
    assert library.summary("one")["stages"][0]["done"] == 4
    assert listed == []


def test_rows_of_a_file_that_is_gone_are_listed_without_their_text(tmp_path: Path) -> None:
    stage = make_run(tmp_path / "one")
    index = RolloutIndex(stage)
    index.refresh()
    (stage / layout.rollouts_name(2)).unlink()
    (stage / layout.rollouts_name(1)).write_text("7\n" * 2000)
    rows = listing(Browser(index), Query(), 0, 100)["rows"]
    assert {row["step"]: bool(row["text"]) for row in rows} == {3: True, 2: False, 1: False, 0: True}
    assert [row["text"][-14:] for row in rows[-2:]] == ["<answer>10</answer>"[-14:], "<answer>11</answer>"[-14:]]


def test_what_is_no_file_of_the_run_is_not_waited_for(tmp_path: Path) -> None:
    stage = make_run(tmp_path / "one")
    (stage / "rollouts" / "step_000004.jsonl").mkdir()
    (tmp_path / "other.jsonl").write_text("{}\n")
    (stage / "rollouts" / "step_000005.jsonl").symlink_to(tmp_path / "other.jsonl")
    (stage / "rollouts" / "step_000006.jsonl").symlink_to(stage / "rollouts" / "step_000001.jsonl")
    index = RolloutIndex(stage)
    index.refresh()
    assert (index.indexed, index.files) == (5, 5)
    assert not index.refresh()


def test_numbers_for_json_have_six_digits() -> None:
    values = np.asarray([0.1, -1234567.0, 1e-9 / 3, 0.0, np.nan, np.inf, 2.0e9], np.float32)
    assert finite(values) == [0.1, -1234570.0, 3.33333e-10, 0.0, None, None, 2e9]
    assert finite(np.asarray([1, -2], np.int32)) == [1, -2]


def test_a_file_is_read_from_where_the_last_reading_ended(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append(path, {"step": 0}, {"step": 1})
    first = read_from(tmp_path, path.name, 0, 0)
    assert [row["step"] for row in first.rows] == [0, 1]
    assert first.offset == path.stat().st_size
    with path.open("a") as file:
        file.write('{"step": 2}\n{"st')
    second = read_from(tmp_path, path.name, first.offset, first.mark)
    assert [row["step"] for row in second.rows] == [2]  # the torn line waits
    with path.open("a") as file:
        file.write('ep": 3}\n')
    third = read_from(tmp_path, path.name, second.offset, second.mark)
    assert [row["step"] for row in third.rows] == [3]
    assert not third.again


def test_a_file_that_was_cut_and_has_grown_again_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append(path, {"step": 0, "x": 1}, {"step": 1, "x": 1})
    piece = read_from(tmp_path, path.name, 0, 0)
    path.write_text("")
    append(path, {"step": 0, "x": 1}, {"step": 1, "x": 2}, {"step": 2, "x": 2})
    again = read_from(tmp_path, path.name, piece.offset, piece.mark)
    assert again.again
    assert [row["x"] for row in again.rows] == [1, 2, 2]
    path.unlink()
    assert read_from(tmp_path, path.name, again.offset, again.mark).again


@given(st.lists(st.integers(0, 10**6), max_size=30), st.data())
def test_any_way_to_read_a_growing_file_gives_all_its_rows(numbers: list[int], data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        whole = "".join(json.dumps({"n": n}) + "\n" for n in numbers).encode()
        cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
        seen, offset, mark = [], 0, 0
        for end in (*cuts, len(whole)):
            path.write_bytes(whole[:end])
            piece = read_from(path.parent, path.name, offset, mark)
            assert not piece.again
            seen += [row["n"] for row in piece.rows]
            offset, mark = piece.offset, piece.mark
        assert seen == numbers == [row["n"] for row in read_rows(path.parent, path.name)]


# --- the index ----------------------------------------------------------------------------------------------------


def test_the_index_finds_every_row_again(run: Path) -> None:
    table = indexed(run).table()
    assert len(table) == 4 * 3 * GROUP
    for at in range(len(table)):
        row = row_at(table, run, at)
        assert row == answer(int(table.columns["step"][at]), int(table.columns["place"][at]))
    assert table.find(3, 5) == 3 * 12 + 5
    assert table.find(3, 12) is None
    assert table.find(9, 0) is None


def test_columns_by_hand(run: Path) -> None:
    columns = indexed(run).table().columns
    assert columns["group"][:12].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    # group 0 of step 0 has a right answer (0 and 3), so its rewards differ by 1; in step 2 none is right
    assert columns["spread"][:4].tolist() == [1.0] * 4
    assert columns["spread"][24:36].tolist() == [0.0] * 12
    # sample i differs by i/100 between sampler and trainer; entropies (i + t) / 10 over 10 + i tokens
    assert np.allclose(columns["mismatch"][:12], np.arange(12) / 100, atol=1e-6)
    assert columns["entropy"][2] == pytest.approx(0.1 * (2 + 11 / 2))
    assert columns["part/outcome"][:4].tolist() == [1.0, 0.0, 0.0, 1.0]


def test_repetition_by_hand() -> None:
    assert repetition("a b c d e f") == 0  # three different 4-grams
    assert repetition("a b a b a b a") == pytest.approx(1 - 2 / 4)  # abab baba abab baba
    assert repetition("too short") == 0


def test_a_torn_last_line_waits_and_damaged_lines_are_passed_over(run: Path) -> None:
    path = run / layout.rollouts_name(4)
    whole = json.dumps(answer(4, 0)) + "\n"
    path.write_text(f'{whole}{{"broken\n{whole}{whole[:20]}')
    table = indexed(run).table()
    new = table.columns["step"] == 4
    assert new.sum() == 2
    assert row_at(table, run, int(np.flatnonzero(new)[1])) == answer(4, 0)


def test_the_index_follows_a_run_that_goes_on_and_one_that_is_resumed(run: Path) -> None:
    index = indexed(run)
    assert not index.refresh()
    write_step(run, 4, [answer(4, 0)])
    assert index.refresh()
    assert len(index.table()) == 49
    for step in (3, 4):  # resumed from step 3: both are repeated, one is there already
        (run / layout.rollouts_name(step)).unlink()
        (run / layout.tokens_name(step)).unlink()
    write_step(run, 3, [answer(3, 0), answer(3, 1)])
    assert index.refresh()
    assert np.bincount(index.table().columns["step"]).tolist() == [12, 12, 12, 2]


def test_a_step_without_tokens_gets_them_when_they_are_written(run: Path) -> None:
    tokens = run / layout.tokens_name(3)
    data = tokens.read_bytes()
    tokens.unlink()
    index = indexed(run)
    assert np.isnan(index.table().columns["mismatch"][36:]).all()
    tokens.write_bytes(data[:100])  # damaged
    index.refresh()
    assert np.isnan(index.table().columns["mismatch"][36:]).all()
    tokens.write_bytes(data)
    index.refresh()
    assert np.isfinite(index.table().columns["mismatch"]).all()


def test_the_cache_lies_outside_the_run_and_gives_the_same_table(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    place = index_file(run)
    assert not place.is_relative_to(run)
    first = RolloutIndex(run, place)
    first.refresh()
    first._save(place)
    second = RolloutIndex(run, place)
    assert len(second.table()) == 48
    assert not second.refresh()
    for name, column in first.table().columns.items():
        assert np.array_equal(column, second.table().columns[name], equal_nan=True)
    place.write_bytes(b"not an index")
    assert len(RolloutIndex(run, place).table()) == 0
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_presets_filters_and_orders(run: Path) -> None:
    assert rows_of(run)[0][0] == 3  # newest first
    assert rows_of(run, preset="longest")[:2] == [(0, 11), (1, 11)]
    assert {step for step, _ in rows_of(run, preset="same")} == {2}
    assert rows_of(run, preset="mismatch")[0][1] == 11
    assert rows_of(run, preset="best")[0] == (0, 0)
    assert rows_of(run, preset="worst")[0] == (0, 1)
    assert rows_of(run, preset="judge") == []  # this run has no judge
    assert len(rows_of(run, verdict="correct")) == 3 * 4
    assert rows_of(run, **{"from": "1", "to": "1", "level": "2"}) == [(1, place) for place in (4, 5, 6, 7)]
    assert rows_of(run, sort="tokens", **{"from": "1", "to": "1"})[0] == (1, 0)


def test_a_search_reads_the_text_only_and_ignores_case(run: Path) -> None:
    assert rows_of(run, text="STEP 1 answer 7") == [(1, 7)]
    assert rows_of(run, text="Puzzle") == []  # of the prompt
    write_step(run, 4, [answer(4, 0, text='say "hé"\\n\n次')])
    assert rows_of(run, text='"hé"\\n\n次') == [(4, 0)]


@pytest.mark.parametrize(
    "parameters", [{"preset": "x"}, {"sort": "text"}, {"verdict": "x"}, {"from": "-1"}, {"to": "x"}]
)
def test_wrong_parameters_are_errors_that_name_them(parameters: dict[str, str]) -> None:
    ((name, value),) = parameters.items()
    with pytest.raises(UserError, match=f"{name}={value}: give"):
        Query.of(parameters)


def test_a_page_of_rows(run: Path) -> None:
    body = listing(Browser(indexed(run)), Query(), 2, 3)
    assert (body["total"], body["whole"], len(body["rows"])) == (48, True, 3)
    assert body["rows"][0] == body["rows"][0] | {"step": 3, "place": 2, "verdict": "wrong", "problem": "problem-0"}


# --- the server ---------------------------------------------------------------------------------------------------


def test_runs_and_their_state(client: TestClient, run: Path) -> None:
    (one,) = client.get("/api/runs").json()["runs"]
    (stage,) = one["stages"]
    assert (one["name"], one["state"], stage["name"]) == ("one", "stopped", "-")
    assert (stage["done"], stage["planned"], stage["seconds_left"]) == (4, 10, 12.0)  # six steps of two seconds
    assert (stage["validation"]["value"], stage["validation"]["measure"]) == (0.5, "accuracy")
    write_metrics(run, 4)
    assert client.get("/api/run/one").json()["stages"][0]["done"] == 5


def test_rows_come_once_and_an_unchanged_answer_is_not_sent_again(client: TestClient, run: Path) -> None:
    piece = client.get("/api/run/one/-/rows/metrics").json()
    assert [row["step"] for row in piece["rows"]] == [0, 1, 2, 3]
    address = f"/api/run/one/-/rows/metrics?from={piece['offset']}&mark={piece['mark']}"
    nothing = client.get(address)
    assert nothing.json()["rows"] == []
    assert client.get(address, headers={"If-None-Match": nothing.headers["etag"]}).status_code == 304
    write_metrics(run, 4)
    assert [row["step"] for row in client.get(address).json()["rows"]] == [4]


def test_a_group_says_why(client: TestClient) -> None:
    group = client.get("/api/run/one/-/group/1/2").json()
    assert [one["index"] for one in group["answers"]] == [0, 1, 2, 3]
    assert (group["problem"], group["groups"], group["spread"]) == ("problem-2", 3, 1.0)
    right = group["answers"][1]
    assert right["verdict"] == "correct"
    assert ["9", "answer"] in right["pieces"]
    assert "Reward 1 = outcome 1 × 1." in right["why"]


def test_a_sample_has_its_tokens(client: TestClient) -> None:
    sample = client.get("/api/run/one/-/sample/0/2").json()
    tokens = sample["tokens_of"]
    assert len(tokens["ids"]) == 12
    # ids run on over the samples: sample 2 begins after 10 + 11 tokens, and 21 % 3 is 0
    assert tokens["pieces"][:3] == ["w0 ", "w1 ", "w2 "]
    assert tokens["entropies"][1] == pytest.approx(0.3)
    assert tokens["trainer_logprobs"][0] == pytest.approx(-0.52)


def test_flips_by_hand(client: TestClient) -> None:
    flips = client.get("/api/run/one/-/flips", params={"a": "validation@0", "b": "validation@3"}).json()
    assert flips["counts"] == {"solved": 2, "lost": 1, "both": 0, "neither": 1}
    assert flips["difference"]["value"] == pytest.approx(0.25)
    assert [row["problem"] for row in flips["problems"]["lost"]] == ["held-0"]


def test_settings_with_their_origin(client: TestClient, run: Path) -> None:
    append(run / "events.jsonl", {"step": 2, "kind": "config_changed", "message": "",
                                  "settings": [{"key": "optim.lr", "old": 0.1, "new": 0.0003}]})  # fmt: skip
    rows = {row["key"]: row for row in client.get("/api/run/one/-/settings").json()["settings"]}
    assert rows["optim.lr"] == {"key": "optim.lr", "value": 0.0003, "origin": "resumed", "before": 0.1}
    assert rows["steps"]["origin"] == "recipe"


def test_distributions_by_hand(client: TestClient) -> None:
    client.get("/api/run/one/-/group/0/0")
    body: dict[str, Any] = {}
    while body.get("steps") != [0, 1, 2, 3]:
        body = client.get("/api/run/one/-/distributions").json()
    assert body["groups"]["all wrong"] == [0, 0, 1, 0]
    assert body["columns"]["tokens"][3] == [15.5] * 4  # the median of 10 to 21
    assert body["solved"]["by"] == "problem"  # each comes in every step


def test_invisible_characters_are_visible_in_every_answer(client: TestClient, run: Path) -> None:
    write_step(run, 4, [answer(4, 0, text="safe\u202etxt.exe\x1b[2J", problem_id="p\u200b")], piece="\u202e")
    text = client.get("/api/run/one/-/sample/4/0").text
    assert "⟨U+202E⟩" in text
    assert not set(text) & {"\u202e", "\x1b", "\u200b"}
    assert client.get("/api/run/one/-/text/4/0").text == "safe\u202etxt.exe\x1b[2J"  # saved as a file, it is exact


def test_every_answer_forbids_foreign_code(client: TestClient) -> None:
    for path in ("/", "/static/app.js", "/api/runs", "/api/nothing", "/static/colours.css"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_requests_from_elsewhere_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    assert client.get("/api/runs", headers=headers).status_code in (400, 403)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(client: TestClient, method: str) -> None:
    assert client.request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e%2fapp.py",
        "/api/run/..%2f..%2fetc/-/rows/metrics",
        "/api/run/one/-/rows/..%2f..%2fsecret",
        "/api/run/one/..%2ftwo/rows/metrics",
        "/api/run/one/-/flips?a=../../x&b=y",
    ],
)
def test_no_path_leads_out_of_the_run(client: TestClient, run: Path, path: str) -> None:
    (run.parent.parent / "secret.jsonl").write_text('{"secret": 1}\n')
    response = client.get(path)
    assert response.status_code == 404
    assert "secret" not in response.text.replace("no rows ../../secret", "")


def test_links_out_of_the_run_are_not_followed(client: TestClient, run: Path) -> None:
    secret = run.parent.parent / "secret.jsonl"
    secret.write_text(json.dumps(answer(9, 0, text="a secret")) + "\n")
    (run / layout.rollouts_name(9)).symlink_to(secret)
    (run / "costs.jsonl").symlink_to(secret)
    append(run / "evals.jsonl", {"step": 9, "label": "x", "samples_file": "../../secret.jsonl"})
    for path in ("group/9/0", "sample/9/0", "text/9/0", "rows/costs", "flips?a=x@9&b=validation@0"):
        assert "a secret" not in client.get(f"/api/run/one/-/{path}").text
    (run / "stages.json").write_text(json.dumps([{"name": "out", "folder": "../..", "kind": "rl"}]))
    assert client.get("/api/run/one/out/rows/metrics").status_code == 404


def test_a_token_is_needed_once_and_then_a_cookie_carries_it(run: Path) -> None:
    with TestClient(
        make_app(Library.at(run), (), "s3cret"), base_url="http://host:1", follow_redirects=False
    ) as client:
        assert client.get("/api/runs").status_code == 401
        assert client.get("/static/app.js").status_code == 401
        assert client.get("/?token=wrong").status_code == 401
        entered = client.get("/?token=s3cret")
        assert (entered.status_code, entered.headers["location"]) == (303, "/")
        cookie = entered.headers["set-cookie"]
        assert cookie.startswith(f"{COOKIE}=s3cret")
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert client.get("/api/runs").status_code == 200


def test_a_run_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    with TestClient(
        make_app(Library.at(tmp_path / "runs" / "new"), HOSTS, None), base_url="http://localhost"
    ) as client:
        assert client.get("/api/run/new").json()["state"] == "waiting"
        make_run(tmp_path / "runs" / "new", steps=1)
        assert client.get("/api/run/new").json()["stages"][0]["done"] == 1
    later = Library.at(tmp_path / "later")  # where `hone view` starts before the first run
    make_run(tmp_path / "later" / "first", steps=1)
    assert (later.single, list(later.runs())) == (None, ["first"])
    with pytest.raises(UserError, match="is a file; give a run folder"):
        Library.at(tmp_path / "runs" / "new" / "metrics.jsonl")


def test_the_server_loads_no_torch() -> None:
    code = "import sys, hone.report.live.app, hone.report.live.server; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "False"
