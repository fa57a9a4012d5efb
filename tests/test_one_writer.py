"""Two `hone train` on one run folder, starts that fail, and runs that go on after their end, as real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hone.base import jsonl
from hone.base.settings import UserError
from hone.cli import app as cli
from hone.recipe.load import load
from hone.runs import lock
from hone.stages import audit as runs
from hone.stages import pipeline

RECIPE = """
name: small
runs: {runs}
model: {{path: tiny, tiny: {{vocab_size: 300, hidden_size: 32, layers: 1, heads: 2, kv_heads: 1, mlp_size: 64}}}}
task: {{name: knights, people: [2], quiz: brief, names: 4, train: 30, validation: 8, test: 8, repeats: true}}
prompt: {{style: raw, system: "", template: "{{user}}\\n"}}
checkpoint: {{every: 2, keep: 2}}
tokens_per_microbatch: 2048
stage: rl
steps: 4
prompts_per_step: 4
samples_per_prompt: 4
sampling: {{max_tokens: 24}}
optim: {{lr: 1.0e-3}}
reward: {{parts: {{outcome: 1.0, overlong: 1.0}}, overlong: {{buffer: 20, max_tokens: 24}}}}
eval: {{problems: 4, every: 2, sampling: {{max_tokens: 16}}}}
"""

PIPELINE = """
name: small
runs: {runs}
model: {{path: tiny, tiny: {{vocab_size: 300, hidden_size: 32, layers: 1, heads: 2, kv_heads: 1, mlp_size: 64}}}}
task: {{name: knights, people: [2], quiz: brief, names: 4, train: 30, validation: 8, test: 8, repeats: true}}
prompt: {{style: raw, system: "", template: "{{user}}\\n"}}
checkpoint: {{every: 2, keep: 2}}
stages:
  - {{name: warmup, stage: sft, sft: {{examples: 16, examples_per_step: 8, styles: {{hasty: 1.0}}}}}}
  - name: rl
    stage: rl
    steps: 4
    prompts_per_step: 4
    samples_per_prompt: 4
    sampling: {{max_tokens: 24}}
    optim: {{lr: 1.0e-3}}
    reward: {{parts: {{outcome: 1.0, overlong: 1.0}}, overlong: {{buffer: 20, max_tokens: 24}}}}
    eval: {{problems: 4, sampling: {{max_tokens: 16}}}}
"""


def recipe(folder: Path, *overrides: str, text: str = RECIPE) -> Any:
    path = folder / "recipe.yaml"
    path.write_text(text.format(runs=folder / "runs"))
    return load(path, overrides)


def bits(run: Path) -> dict[str, bytes]:
    """What must not depend on where a run ended for a while, of all stages."""
    patterns = (
        "metrics.jsonl",
        "ledger.jsonl",
        "evals.jsonl",
        "evals/*",
        "rollouts/*",
        "tokens/*",
        "model/*.safetensors",
    )
    files = (p for pattern in patterns for at in (run, *run.glob("*/")) for p in sorted(at.glob(pattern)))
    named = {str(p.relative_to(run)): p for p in files}
    return {name: p.read_bytes() for name, p in named.items() if not name.startswith(("checkpoints", "earlier"))}


def checked_and_run(loaded: Any, resume: bool = False) -> Path:
    """As `hone train` and `hone.train` do."""
    return pipeline.run(loaded, resume, pipeline.checked(loaded, resume))


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps."""
    return pipeline.run(recipe(tmp_path_factory.mktemp("finished")))


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """The finished run, to be changed."""
    shutil.copytree(finished, tmp_path / "runs" / "small")
    return tmp_path


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    begun: list[subprocess.Popen[str]] = []

    def train(*arguments: str) -> subprocess.Popen[str]:
        recipe(tmp_path)
        command = [sys.executable, "-m", "hone", "train", str(tmp_path / "recipe.yaml"), *arguments]
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        begun.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env))
        return begun[-1]

    yield train
    for process in begun:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def until(true: Callable[[], object], process: subprocess.Popen[str], seconds: float = 250.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.05)


def steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


# --- one writer -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_second_start_leaves_the_running_run_alone(train: Any, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "small"
    first = train("steps=400")
    until(lambda: steps(run) >= 2, first)
    for more in ((), ("--resume",)):
        second = train("steps=400", *more)
        out, _ = second.communicate(timeout=250)
        assert second.returncode == 2, out
        assert f"process {first.pid}" in out
    first.send_signal(signal.SIGSTOP)  # suspended is alive
    second = train("steps=400", "--resume")
    out, _ = second.communicate(timeout=250)
    assert (second.returncode, f"process {first.pid}" in out) == (2, True)
    first.send_signal(signal.SIGCONT)
    first.send_signal(signal.SIGTERM)
    assert first.wait(250) == 75
    assert os.listdir(tmp_path / "runs") == ["small"]
    assert runs.check(run)[1] == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_of_two_that_resume_at_once_one_goes_on(train: Any, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "small"
    first = train("steps=14")
    until(lambda: steps(run) >= 3, first)
    first.kill()
    first.wait()
    both = [train("steps=14", "--resume") for _ in range(2)]
    outs = [process.communicate(timeout=200)[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], outs
    assert runs.check(run)[1] == 0
    assert steps(run) == 14
    taken = [row for row in jsonl.read(run / "events.jsonl") if row["kind"] == "lock_taken_over"]
    assert [f"process {first.pid}" in row["message"] for row in taken] == [True]
    assert os.listdir(tmp_path / "runs") == ["small"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_workers_share_one_lock_and_a_second_launcher_is_refused(train: Any, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "small"
    first = train("steps=400", "parallel.replicate=2")
    until(lambda: steps(run) >= 1, first)
    second = train("steps=400", "parallel.replicate=2", "--resume")
    out, _ = second.communicate(timeout=250)
    assert (second.returncode, f"process {first.pid}" in out) == (2, True), out
    first.kill()
    first.wait()
    third = train("steps=400", "parallel.replicate=2", "--resume")
    before = steps(run)
    until(lambda: steps(run) > before + 2, third)
    third.send_signal(signal.SIGTERM)
    assert third.wait(250) == 75
    assert any(row["kind"] == "lock_taken_over" for row in jsonl.read(run / "events.jsonl"))
    assert os.listdir(tmp_path / "runs") == ["small"]


# --- nothing is touched before it is checked --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides, message",
    [
        (("model=nobody/has-this-model",), "nobody/has-this-model"),
        (("rollout={engine: vllm, vllm: {url: http://127.0.0.1:9}}",), "no usable server"),
        (("task.test=0",), "test split"),
        (("task.train=0",), "train split"),
        (("task={name: dataset, source: rows.jsonl, question: what, answer: answer}",), "what"),
        (("stage=sft", "sft.data=nowhere.jsonl"), "nowhere"),
        (("stage=distil", "teacher=nobody/has-this-teacher"), "nobody/has-this-teacher"),
    ],
)
def test_a_start_that_fails_leaves_a_finished_run_where_it_was(
    copied: Path, overrides: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(copied)
    (copied / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 20)
    before = everything(copied / "runs")
    with pytest.raises(UserError, match=message):
        checked_and_run(recipe(copied, *overrides, text=of_kind(overrides[0])))
    assert everything(copied / "runs") == before


def of_kind(override: str) -> str:
    """The recipe without what stages of another kind do not have."""
    without = {"stage=sft": ("steps", "prompts_per_step", "samples_per_prompt", "reward"), "stage=distil": ("reward",)}
    return "\n".join(line for line in RECIPE.splitlines() if not line.startswith(without.get(override, ("#",))))


def test_a_first_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train split"):
        checked_and_run(recipe(tmp_path, "task.train=0"))
    assert not (tmp_path / "runs").exists()


def test_with_workers_nothing_is_set_aside_either(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything(copied / "runs")
    recipe(copied)
    more = ["task.test=0", "parallel.replicate=2"]
    monkeypatch.setattr(sys, "argv", ["hone", "train", str(copied / "recipe.yaml"), *more])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert everything(copied / "runs") == before


def test_a_new_run_sets_the_finished_one_aside(copied: Path) -> None:
    before = everything(copied / "runs" / "small")
    pipeline.run(recipe(copied, "steps=1", "eval.every=0"))
    (aside,) = [p for p in (copied / "runs").iterdir() if p.name != "small"]
    assert everything(aside) == before
    assert not lock.place(copied / "runs" / "small").exists()


# --- what there is ----------------------------------------------------------------------------------------------------


def test_runs_are_listed_whatever_else_is_there(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = copied / "runs"
    (place / ".DS_Store").write_bytes(b"\x00\xff")
    (place / "notes").mkdir()  # no run
    (place / "notes" / "a.txt").write_text("mine")
    (dead := place / "dead").mkdir()
    for name in ("manifest.json", "config.resolved.json", "metrics.jsonl", "evals.jsonl", "stages.json"):
        (dead / name).write_bytes(b'[3]\n{"step": 1}\n\xff{')
    (queued := place / "queued").mkdir()
    (queued / "slurm.sbatch").write_text("#!/bin/bash")
    monkeypatch.setattr(sys, "argv", ["hone", "runs", "list", str(place)])
    with lock.held(dead), pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    head, *rows = capsys.readouterr().out.splitlines()
    by_name = {row.split()[0]: row.split() for row in rows}
    assert {name: row[1] for name, row in by_name.items()} == {
        "small": "finished", "dead": "running", "queued": "waiting"
    }  # fmt: skip
    assert by_name["small"][2:4] == ["rl", "4/4"]
    last = [row for row in jsonl.read(place / "small" / "evals.jsonl") if row["label"] == "validation"][-1]["accuracy"]
    shown = f"{last['value']:.3f} [{last['low']:.3f}, {last['high']:.3f}] at step 4"
    assert shown in next(row for row in rows if "small" in row)
    assert "validation" in head


def test_prune_says_first_and_never_touches_a_locked_run(copied: Path) -> None:
    from hone.runs.listing import prune

    place = copied / "runs"
    shutil.copytree(place / "small", place / "small.20250101-120000")
    shutil.copytree(place / "small", place / "other")
    (place / "mine.20250101-120000").mkdir()  # named so by the user, and no run
    (place / "mine.20250101-120000" / "a.txt").write_text("mine")
    before = everything(place)
    assert sum(line.startswith("would remove") for line in prune(place, yes=False)) == 3
    assert everything(place) == before
    with lock.held(place / "other"):
        lines = list(prune(place, yes=True))
    assert sum(line.startswith("removed") for line in lines) == 2
    assert [line for line in lines if "left alone" in line and "other" in line]
    assert not (place / "small.20250101-120000").exists()
    assert not (place / "small" / "checkpoints").exists()
    assert (place / "small" / "model").exists()
    assert (place / "other" / "checkpoints").exists()
    assert (place / "mine.20250101-120000" / "a.txt").exists()


# --- further than the end ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run of 7 steps leaves."""
    return bits(pipeline.run(recipe(tmp_path_factory.mktemp("longer"), "steps=7")))


def test_a_finished_run_goes_on_as_if_it_had_not_ended(
    copied: Path, longer: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied / "runs" / "small"
    model = (run / "model" / "model.safetensors").read_bytes()
    pipeline.run(recipe(copied, "steps=7"), resume=True)
    assert bits(run) == longer
    said = capsys.readouterr().err
    assert "steps 4 -> 7" in said
    assert (run / "earlier" / "step_000004" / "model" / "model.safetensors").read_bytes() == model
    assert runs.check(run)[1] == 0
    assert json.loads((run / "results.json").read_text())["after"]
    (event,) = [row for row in jsonl.read(run / "events.jsonl") if row["kind"] == "config_changed"]
    assert {"key": "steps", "old": 4, "new": 7} in event["settings"]  # `runs` too: the folder was copied
    assert pipeline.run(recipe(copied, "steps=7"), resume=True) == run  # finished again
    assert "is finished" in capsys.readouterr().err


def test_an_extension_that_is_cut_goes_on(
    copied: Path, longer: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.runs.writer import RunWriter

    def cut(self: RunWriter, step: int, *rest: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "log_rollouts", cut)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(recipe(copied, "steps=7"), resume=True)
    pipeline.run(recipe(copied, "steps=7"), resume=True)
    assert bits(copied / "runs" / "small") == longer


def test_the_last_stage_of_a_pipeline_goes_on(tmp_path: Path) -> None:
    (whole := tmp_path / "whole").mkdir()
    (short := tmp_path / "short").mkdir()
    expected = bits(pipeline.run(recipe(whole, "stages.rl.steps=6", text=PIPELINE)))
    pipeline.run(recipe(short, text=PIPELINE))
    assert bits(pipeline.run(recipe(short, "stages.rl.steps=6", text=PIPELINE), resume=True)) == expected
    with pytest.raises(UserError, match=r"warmup is finished, but with other settings:\n  sft.epochs 1 -> 2"):
        pipeline.run(recipe(short, "stages.rl.steps=6", "stages.warmup.sft.epochs=2", text=PIPELINE), resume=True)


def test_a_decay_over_the_whole_run_says_what_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.run(recipe(tmp_path, "steps=2", "optim.decay=linear"))
    pipeline.run(recipe(tmp_path, "steps=4", "optim.decay=linear"), resume=True)
    # linear, 2 updates: shares 1, 0.5; 4 updates: 1, 0.75, 0.5, 0.25
    assert "ended at 0.0005 and continues at 0.0005" in capsys.readouterr().err


@pytest.mark.parametrize(
    "overrides, lines",
    [
        (("seed=3",), ("seed 0 -> 3",)),
        (("lora={rank: 4}", "steps=9"), ("lora None -> ",)),
        (("model.tiny.layers=2", "task.people=[3]", "steps=9"), ("model.tiny.layers 1 -> 2", "task.people")),
        (("steps=3",), ("steps: 3",)),
        (("optim.lr=1e-4",), ("optim.lr 0.001 -> 0.0001",)),
    ],
)
def test_what_cannot_change_is_named_and_nothing_is_touched(
    copied: Path, overrides: tuple[str, ...], lines: tuple[str, ...]
) -> None:
    before = everything(copied / "runs")
    with pytest.raises(UserError) as raised:
        pipeline.run(recipe(copied, *overrides), resume=True)
    for line in lines:
        assert line in str(raised.value)
    assert "name" in str(raised.value)
    assert everything(copied / "runs") == before
