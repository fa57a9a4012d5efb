"""Sinks copy each row once, whatever is cut, and never stop a run."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hone.base import jsonl
from hone.base.settings import ConfigError, UserError
from hone.recipe.load import load
from hone.runs import sinks
from hone.runs.sinks import Copy, check_installed, copying
from hone.stages import pipeline


class Memory:
    """A sink that remembers; every one that was opened is in `opened`."""

    opened: list[Memory] = []

    def __init__(self, folder: Path, name: str, run_id: str, first_step: int) -> None:
        self.about, self.rows, self.closed = (name, run_id, first_step), [], False
        self.samples: list[tuple[int, list[Mapping[str, Any]]]] = []
        Memory.opened.append(self)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.samples.append((step, list(rows)))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> type[Memory]:
    Memory.opened = []
    monkeypatch.setitem(sinks.SINKS, "tensorboard", Memory)
    return Memory


def write(folder: Path, steps: range) -> None:
    folder.mkdir(exist_ok=True)
    for step in steps:
        jsonl.append(folder / "metrics.jsonl", {"step": step, "phase": "rl", "loss": step / 2, "kl": None})


def evaluated(folder: Path, label: str, step: int) -> None:
    accuracy = {"value": 0.5, "low": 0.4, "high": 0.6, "n": 9}
    jsonl.append(folder / "evals.jsonl", {"step": step, "label": label, "accuracy": accuracy, "response_tokens": 7.0})


def steps(memory: type[Memory]) -> list[int]:
    return [step for sink in memory.opened for step, values in sink.rows if "loss" in values]


def test_a_resumed_run_continues_the_same_copy(tmp_path: Path, memory: type[Memory]) -> None:
    run = tmp_path / "run"
    write(run, range(7))
    evaluated(run, "before", 0)
    Copy(run, "tensorboard", "run").copy()
    # killed; step 5 and 6 are done again, then it goes on
    jsonl.keep(run / "metrics.jsonl", lambda row: row["step"] < 5)
    evaluated(run, "validation", 0)
    write(run, range(5, 10))
    again = Copy(run, "tensorboard", "run")
    assert again.copy() == 4  # steps 7 to 9 and the validation
    assert again.copy() == 0
    assert steps(memory) == list(range(10))
    first, second = memory.opened
    assert first.about[1] == second.about[1]  # one run there too
    assert (first.about[2], second.about[2]) == (0, 7)
    assert first.rows[0] == (
        0,
        {"eval/before/accuracy": 0.5, "eval/before/accuracy_low": 0.4, "eval/before/accuracy_high": 0.6,
         "eval/before/response_tokens": 7.0},
    )  # fmt: skip
    assert first.rows[2] == (1, {"loss": 0.5})  # text and missing values are not numbers


def test_the_held_out_reward_is_copied_beside_the_accuracy() -> None:
    reward = {"value": -1.5, "low": -2.0, "high": 0.25, "n": 9}
    expected = {"eval/after/reward": -1.5, "eval/after/reward_low": -2.0, "eval/after/reward_high": 0.25}
    assert sinks._eval_numbers({"label": "after", "reward": reward, "reward/mean": -1.4}) == expected
    both = sinks._eval_numbers(
        {"label": "after", "reward": reward, "accuracy": {"value": 0.5, "low": 0.4, "high": 0.6}}
    )
    assert both.keys() == {*expected, "eval/after/accuracy", "eval/after/accuracy_low", "eval/after/accuracy_high"}


def test_a_torn_record_of_what_was_copied_is_named(tmp_path: Path, memory: type[Memory]) -> None:
    (tmp_path / "sinks").mkdir()
    (tmp_path / "sinks/tensorboard.json").write_text('{"id": "ab')
    with pytest.raises(UserError, match=r"sinks/tensorboard\.json cannot be read .* to a new run of tensorboard"):
        Copy(tmp_path, "tensorboard", "run")


def test_everything_is_copied_at_the_end(tmp_path: Path, memory: type[Memory], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "EVERY", 0.01)

    def cut() -> None:
        with copying(tmp_path, ["tensorboard"], "run"):
            write(tmp_path, range(3))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut()
    assert steps(memory) == [0, 1, 2]
    assert [sink.closed for sink in memory.opened] == [True]


def test_a_sink_that_fails_is_an_event_and_the_run_goes_on(
    tmp_path: Path, memory: type[Memory], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(Memory):
        def write(self, step: int, values: Mapping[str, float]) -> None:
            raise ConnectionError("no route to host")

    monkeypatch.setitem(sinks.SINKS, "wandb", Broken)
    with copying(tmp_path, ["wandb", "tensorboard"], "run"):
        write(tmp_path, range(2))
    (event,) = jsonl.read(tmp_path / "events.jsonl")
    assert event["kind"] == "sink_failed"
    assert "wandb: ConnectionError: no route to host" in event["message"]
    assert "sink_failed" in capsys.readouterr().err
    assert steps(memory) == [0, 1]  # the other one has them
    assert not (tmp_path / "sinks/wandb.json").exists()  # nothing counts as copied


def test_without_sinks_there_is_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with copying(tmp_path, [], "run"):
        assert threading.active_count() == before


def test_a_missing_package_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"sinks: trackio, wandb not installed here; run `pip install"):
        check_installed(["wandb", "trackio"])


def test_a_run_copies_every_stage(tmp_path: Path, memory: type[Memory], monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"name: x\nruns: {tmp_path}\nsinks: [tensorboard]\ntask: {{name: knights, people: [2], train: 3}}\n"
    (tmp_path / "r.yaml").write_text(text + "stages:\n  - stage: sft\n  - stage: rl\n")

    def stage(recipe: Any, folder: Path, model: Any) -> None:
        write(folder, range(2))

    monkeypatch.setattr(sinks, "find_spec", lambda name: name)
    monkeypatch.setattr(pipeline, "first_model", lambda *_: "m")
    monkeypatch.setattr(pipeline, "STAGES", {"sft": stage, "rl": stage})
    pipeline.run(load(tmp_path / "r.yaml"))
    assert sorted((sink.about[0], [step for step, _ in sink.rows]) for sink in memory.opened) == [
        ("x-rl", [0, 1]), ("x-sft", [0, 1]),
    ]  # fmt: skip


def test_the_recipe_knows_its_sinks(tmp_path: Path) -> None:
    assert load("demo").stages[0].sinks == ()  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="sinks"):
        load("demo", ["sinks=[tensorbored]"])


# --- the real ones, where they are installed -------------------------------------------------------------------------


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for part in (range(4), range(4, 6)):
        write(tmp_path, part)
        copy = Copy(tmp_path, "tensorboard", "run")
        copy.copy()
        copy.close()
    read = EventAccumulator(str(tmp_path / "sinks/tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("loss")] == [(i, i / 2) for i in range(6)]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for part in (range(3), range(3, 5)):
        write(tmp_path, part)
        copy = Copy(tmp_path, "wandb", "run")
        copy.copy()
        copy.close()
    found = []
    for file in sorted((tmp_path / "sinks/wandb").rglob("*.wandb")):
        for record in wandb_records(file.read_bytes()):
            items = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
            found += [(items["step"], items["loss"])] if "loss" in items else []
    assert found == [(i, i / 2) for i in range(5)]


def wandb_records(data: bytes) -> Iterator[Any]:
    """Of a .wandb file: seven bytes, then blocks of 32 KiB of (checksum, length, kind, part of a record)."""
    from wandb.proto.wandb_internal_pb2 import Record

    whole, at = b"", 7
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15  # too little room for a header: the rest of the block is empty
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio")
    for part in (range(3), range(3, 5)):
        write(tmp_path, part)
        copy = Copy(tmp_path, "trackio", "run")
        copy.copy()
        copy.close()
    (database,) = (tmp_path / "trackio").rglob("hone*.db")
    with contextlib.closing(sqlite3.connect(database)) as opened:
        rows = opened.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert {name for name, _, _ in rows} == {f"run-{copy.run_id[:6]}"}
    assert [(step, json.loads(values)["loss"]) for _, step, values in rows] == [(i, i / 2) for i in range(5)]


def test_a_few_answers_of_each_step_are_copied_once(tmp_path: Path, memory: type[Memory]) -> None:
    folder = tmp_path / "run"
    write(folder, range(2))
    for step in range(2):
        path = folder / "rollouts" / f"step_{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        jsonl.write(path, [{"index": i, "text": f"\u202eanswer {i}"} for i in range(10)])
    Copy(folder, "tensorboard", "run").copy()
    (sink,) = memory.opened
    # ten rows, four of them evenly spaced from the first on
    assert [(step, [row["index"] for row in rows]) for step, rows in sink.samples] == [
        (0, [0, 2, 5, 7]),
        (1, [0, 2, 5, 7]),
    ]
    assert sink.samples[0][1][0]["text"] == "⟨U+202E⟩answer 0"
    jsonl.write(folder / "rollouts" / "step_000002.jsonl", [{"index": 0, "text": "alone"}])
    again = Copy(folder, "tensorboard", "run")
    again.copy()
    assert [(step, len(rows)) for step, rows in memory.opened[1].samples] == [(2, 1)]
    assert again.copy() == 0
