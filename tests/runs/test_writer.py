"""The run folder: rows are cut back to the checkpoint, never read half, and its damage is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from hone.base import jsonl
from hone.base.settings import UserError
from hone.learn import checkpoint
from hone.learn.state import State
from hone.recipe.sections.optim import CheckpointConfig
from hone.runs.run import Run
from hone.runs.writer import RunWriter
from hone.types import Group, Problem, Reward, Rollout, Sample, StepStats, Turn


class FakePolicy:
    """Stands in where only counters matter."""

    updates = 0

    def save(self) -> State:
        return State({}, {"weights": b"x"}, {"updates": 7})

    def restore(self, folder: Path, state: dict[str, Any]) -> None:
        self.updates = state["updates"]


def open_run(folder: Path) -> Run:
    return Run(RunWriter.open(folder, {"a": 1}, seed=5), CheckpointConfig(every=2, keep=2))


def test_rows_after_the_checkpoint_are_dropped_on_resume(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    for step in range(5):
        run.writer.log(step, {"loss": float(step)}, {"seconds": 1.0})
        run.writer.log_eval(step, "validation", {"accuracy": 0}, [])
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        (tmp_path / "rollouts" / f"step_{step:06d}.jsonl").write_text("{}\n")
        run.checkpoint(step + 1, FakePolicy())  # type: ignore[arg-type]  # saves before steps 2 and 4
    run.checkpoints.settle()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # torn by a kill
    policy = FakePolicy()
    again = open_run(tmp_path)
    assert again.resume(policy) == 4  # type: ignore[arg-type]
    assert policy.updates == 7
    assert [row["step"] for row in again.writer.rows("metrics.jsonl")] == [0, 1, 2, 3]
    assert [row["step"] for row in again.writer.history] == [0, 1, 2, 3]
    assert [row["step"] for row in again.writer.rows("evals.jsonl")] == [0, 1, 2, 3]
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == [f"step_{s:06d}.jsonl" for s in range(4)]
    assert again.writer.rows("events.jsonl")[-1]["kind"] == "resumed"


def test_a_fresh_folder_begins_at_zero_without_an_event(tmp_path: Path) -> None:
    assert open_run(tmp_path).resume(FakePolicy()) == 0  # type: ignore[arg-type]
    assert not (tmp_path / "events.jsonl").exists()


def test_other_settings_on_resume_are_an_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_run(tmp_path)
    RunWriter.open(tmp_path, {"a": 2}, seed=5)
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert event["kind"] == "config_changed"
    assert "config_changed" in capsys.readouterr().err
    assert json.loads((tmp_path / "config.resolved.json").read_text()) == {"a": 2}


def test_the_same_event_again_is_recorded_and_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = RunWriter(tmp_path)
    for step, message in enumerate(["nothing", "nothing", "other", "nothing"]):
        writer.event("no_signal", message, step)
    assert [row["step"] for row in jsonl.read(tmp_path / "events.jsonl")] == [0, 1, 2, 3]
    assert capsys.readouterr().err.split("[no_signal] ")[1:] == ["nothing\n", "other\n", "nothing\n"]


def test_the_manifest_says_what_is_needed_to_run_again(tmp_path: Path) -> None:
    open_run(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["seed"] == 5
    assert {"python", "torch", "transformers"} <= manifest["versions"].keys()
    assert manifest["hardware"]["cpus"] >= 1


@pytest.mark.parametrize(
    ("answer", "reference", "gold"),
    [(7, None, "7"), ({"target": 7}, "<answer>3 + 4</answer>", "3 + 4"), ({"target": 7}, None, None)],
)
def test_rollouts_record_the_right_answer(tmp_path: Path, answer: object, reference: str | None, gold: object) -> None:
    turn = Turn(np.asarray([5]), np.asarray([7]), np.asarray([-0.5], np.float32), "stop", 3)
    problem = Problem("p", "sums", (), answer, reference=reference)
    group = Group(problem, (Rollout("p", 0, (turn,), "8"),), (Reward(0.0, {}, "wrong", "8"),))
    sample = Sample(np.asarray([5, 7]), np.asarray([False, True]), np.zeros(2, np.float32), np.zeros(2, np.float32), 1,
                    "p", 3)  # fmt: skip
    open_run(tmp_path).writer.log_rollouts(3, [group], ["3 + 4?"], [sample], StepStats(0.0, 0.0, 1, {}), piece=str)
    (row,) = jsonl.read(tmp_path / "rollouts" / "step_000003.jsonl")
    assert row.get("gold") == gold
    assert row["extracted"] == "8"


def test_tokens_of_a_step_hold_both_log_probs_and_the_pieces(tmp_path: Path) -> None:
    sample = Sample(
        token_ids=np.asarray([5, 6, 7, 2]),
        trained=np.asarray([False, False, True, True]),
        logprobs=np.asarray([0, 0, -0.5, -1.0], np.float32),
        advantages=np.asarray([0, 0, 2.0, 2.0], np.float32),
        prompt_len=2,
        problem_id="p",
        policy_version=3,
    )
    seen = {"logprobs": [-0.25, -0.75], "entropies": [0.5, 0.125]}
    stats = StepStats(0.0, 0.0, 2, {}, **{name: {1: np.asarray(v, np.float32)} for name, v in seen.items()})
    open_run(tmp_path).writer.log_rollouts(3, [], [], [sample, sample], stats, piece=lambda i: f"<{i}>")
    with safe_open(tmp_path / "tokens" / "step_000003.safetensors", "np") as file:
        assert file.get_tensor("lengths").tolist() == [2, 2]
        assert file.get_tensor("ids").tolist() == [7, 2, 7, 2]
        assert file.get_tensor("sampled_logprobs").tolist() == [-0.5, -1.0, -0.5, -1.0]
        for name, values in (("trainer_logprobs", [-0.25, -0.75]), ("entropies", [0.5, 0.125])):
            both = file.get_tensor(name)
            assert np.isnan(both[:2]).all()  # this sample had no gradient: nobody looked
            assert both[2:].tolist() == values
        assert json.loads(file.metadata()["pieces"]) == {"2": "<2>", "7": "<7>"}


def test_what_a_kill_left_half_written_is_removed(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    for step in range(2):
        run.writer.log(step, {"loss": 1.0}, {"seconds": 1.0})
        run.checkpoint(step + 1, FakePolicy())  # type: ignore[arg-type]
    run.checkpoints.settle()
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text("{}\n")
    (tmp_path / "rollouts" / "step_000001.jsonl.writing").write_text("{")
    (tmp_path / "rollouts" / ".tmpraTyUr").touch()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"step": 3, "ki')
    assert open_run(tmp_path).resume(FakePolicy()) == 2  # type: ignore[arg-type]
    assert [p.name for p in (tmp_path / "rollouts").iterdir()] == ["step_000001.jsonl"]
    assert [e["kind"] for e in jsonl.read(tmp_path / "events.jsonl")] == ["checkpoint", "resumed"]


def test_a_damaged_checkpoint_is_passed_over_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = open_run(tmp_path)
    for step in (2, 4):
        run.checkpoint(step, FakePolicy())  # type: ignore[arg-type]
    run.checkpoints.settle()
    (tmp_path / "checkpoints" / "step_000004" / "model" / "weights").write_text("y")
    assert open_run(tmp_path).resume(FakePolicy()) == 2  # type: ignore[arg-type]
    assert "step_000004 is damaged (model/weights differs from its checksum)" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000002"]


def test_without_a_whole_checkpoint_nothing_is_touched(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.writer.log(0, {"loss": 1.0}, {"seconds": 1.0})
    run.checkpoint(2, FakePolicy())  # type: ignore[arg-type]
    run.checkpoints.settle()
    (tmp_path / "checkpoints" / "step_000002" / "checksums.json").unlink()
    with pytest.raises(UserError, match="none of its 1 checkpoints is intact; nothing was changed"):
        open_run(tmp_path).resume(FakePolicy())  # type: ignore[arg-type]
    assert (tmp_path / "checkpoints" / "step_000002").exists()
    assert [row["step"] for row in jsonl.read(tmp_path / "metrics.jsonl")] == [0]


def test_stray_files_and_links_are_left_alone(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    for step in range(2):
        run.writer.log(step, {"loss": 1.0}, {"seconds": 1.0})
        run.checkpoint(step + 1, FakePolicy())  # type: ignore[arg-type]
    run.checkpoints.settle()
    saved = tmp_path / "checkpoints" / "step_000002"
    saved.rename(tmp_path / "other_disk")
    saved.symlink_to(tmp_path / "other_disk")
    for name in ("resets", "rollouts", "tokens", "checkpoints"):
        (tmp_path / name / "step_of_mine").mkdir(parents=True)
        (tmp_path / name / ".DS_Store").touch()
    assert open_run(tmp_path).resume(FakePolicy()) == 2  # type: ignore[arg-type]
    assert all((tmp_path / name / ".DS_Store").exists() for name in ("resets", "rollouts", "tokens", "checkpoints"))
    checkpoint.drop_newer(tmp_path / "checkpoints", tmp_path / "checkpoints" / "step_000001")  # the link alone goes
    assert not saved.is_symlink()
    assert (tmp_path / "other_disk" / "state.json").exists()


@pytest.mark.parametrize("text", ["{}", "[]", "", "{", '{"state.json": 3}', "7"])
def test_checksums_that_list_nothing_are_no_proof(tmp_path: Path, text: str) -> None:
    run = open_run(tmp_path)
    for step in (2, 4):
        run.checkpoint(step, FakePolicy())  # type: ignore[arg-type]
    run.checkpoints.settle()
    (tmp_path / "checkpoints" / "step_000004" / "checksums.json").write_text(text)
    assert open_run(tmp_path).resume(FakePolicy()) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["5\n", "[1]\n", '{"loss": 1}\n', ""])
@pytest.mark.parametrize("name", ["metrics.jsonl", "evals.jsonl", "ledger.jsonl"])
def test_rows_that_were_changed_or_lost_are_an_error_that_changes_nothing(
    tmp_path: Path, damage: str, name: str
) -> None:
    run = open_run(tmp_path)
    for step in range(2):
        run.writer.log(step, {"loss": 1.0}, {"seconds": 1.0})
        run.writer.log_eval(step, "validation", {"accuracy": {"value": 0.5}}, [])
        run.writer.log_prompts(step, [[f"p{step}"]], ())
    run.checkpoint(2, FakePolicy())  # type: ignore[arg-type]
    run.checkpoints.settle()
    path = tmp_path / name
    path.write_text(damage + "".join(path.read_text().splitlines(keepends=True)[1:]))
    before = path.read_text()
    with pytest.raises(UserError, match=rf"what was written before step_000002 is damaged: {name}: .*Nothing was chan"):
        open_run(tmp_path).resume(FakePolicy())  # type: ignore[arg-type]
    assert path.read_text() == before


@pytest.mark.parametrize("name", ["manifest.json", "config.resolved.json", "seal.json", "inputs.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_torn_file_of_the_run_is_an_error_in_words(tmp_path: Path, name: str, text: str) -> None:
    open_run(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=name):
        open_run(tmp_path)
