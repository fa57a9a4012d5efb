"""Time travel's requests: off unless allowed, from this server's page only, with named rewards, in killable workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from hone.base.settings import UserError
from hone.report.live import travel
from hone.report.live.app import make_app
from hone.report.live.library import Library, StageFolder
from hone.report.live.travel import OWN, Travel
from tests.report.live_run import answer, make_run, write_step

HOSTS = ("127.0.0.1",)
BASE = "http://127.0.0.1:1"
AT = "/api/run/one/-"
OURS = {"Origin": BASE}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make_run(tmp_path / "runs" / "one")


@pytest.fixture
def client(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """With time travel, whose work only repeats its arguments."""

    def repeat(self: Travel, name: str, stage: StageFolder, *arguments: Any) -> dict[str, Any]:
        return {"name": name, "arguments": [stage.name, *arguments]}

    monkeypatch.setattr(Travel, "_run", repeat)
    app = make_app(Library.at(run.parent), HOSTS, None, Travel([run / "other.yaml"]))
    with TestClient(app, base_url=BASE) as client:
        yield client


def test_without_permission_there_is_nothing_to_post_to(run: Path) -> None:
    with TestClient(make_app(Library.at(run.parent), HOSTS, None), base_url=BASE) as client:
        for page in ("rescore", "replay"):
            assert client.post(f"{AT}/{page}?step=1", headers=OURS).status_code == 405
        assert client.get(f"{AT}/travel").json() == {"allowed": False, "rewards": [], "checkpoints": []}


def test_a_request_names_a_step_and_one_of_the_offered_rewards(client: TestClient, run: Path) -> None:
    (run / "checkpoints" / "step_000010").mkdir(parents=True)
    (run / "checkpoints" / "step_000010.writing").mkdir()
    about = client.get(f"{AT}/travel").json()
    assert about == {"allowed": True, "rewards": [OWN, str(run / "other.yaml")], "checkpoints": [10]}
    own = client.post(f"{AT}/rescore?step=2", headers=OURS)
    assert own.json() == {"name": "rescored", "arguments": ["-", 2, None]}
    other = client.post(f"{AT}/rescore", params={"step": 2, "reward": about["rewards"][1]}, headers=OURS)
    assert other.json()["arguments"] == ["-", 2, str(run / "other.yaml")]
    assert client.post(f"{AT}/replay?step=3", headers=OURS).json() == {"name": "replayed", "arguments": ["-", 3]}
    unknown = client.post(f"{AT}/rescore?step=2&reward=/etc/passwd", headers=OURS)
    assert (unknown.status_code, unknown.json()["error"]) == (
        404,
        "reward=/etc/passwd: `hone view` was not started with this one",
    )
    for step in ("", "-1", "1e3", "x"):
        assert client.post(f"{AT}/replay?step={step}", headers=OURS).status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        {},  # no browser sends a POST without its origin
        {"Origin": "null"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:2"},
        {"Origin": "http://evil.example", "Host": "evil.example"},
        {**OURS, "Sec-Fetch-Site": "cross-site"},
        {**OURS, "Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_post_from_elsewhere_is_refused(client: TestClient, headers: dict[str, str]) -> None:
    for page in ("rescore", "replay"):
        assert client.post(f"{AT}/{page}?step=1", headers=headers).status_code in (400, 403)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
def test_other_methods_stay_refused(client: TestClient, method: str) -> None:
    assert client.request(method, f"{AT}/rescore?step=1", headers=OURS).status_code == 405


def test_reading_pages_take_no_post(client: TestClient) -> None:
    for path in ("/", "/api/runs", f"{AT}/rollouts", f"{AT}/travel"):
        assert client.post(path, headers=OURS).status_code == 405
    for page in ("rescore", "replay"):
        assert client.get(f"{AT}/{page}?step=1").status_code == 405


def test_a_token_is_needed_here_too(run: Path) -> None:
    with TestClient(make_app(Library.at(run.parent), HOSTS, "secret", Travel()), base_url=BASE) as client:
        assert client.post(f"{AT}/rescore?step=1", headers=OURS).status_code == 401


def test_work_that_does_not_end_is_killed_and_the_next_is_free(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(travel, "SECONDS", 0.2)
    stage = Library.at(run.parent).stage("one", "-")
    started = Travel()
    for _ in range(2):  # the lock was given back
        with pytest.raises(UserError, match=r"no result within 0\.2 s"):
            started.replay(stage, 1)


def test_one_request_at_a_time(run: Path) -> None:
    stage, busy = Library.at(run.parent).stage("one", "-"), Travel()
    busy._busy.acquire()
    with pytest.raises(UserError, match="another request is still being worked on"):
        busy.replay(stage, 1)


def test_the_worker_s_message_is_shown_without_its_place(run: Path) -> None:
    write_step(run, 9, [answer(9, 0)])
    with pytest.raises(UserError) as error:
        Travel().rescore(Library.at(run.parent).stage("one", "-"), 9, OWN)
    assert ".py:" not in str(error.value)
