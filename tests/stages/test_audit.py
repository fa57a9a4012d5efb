"""`hone runs check`, `hone export`, and runs that are stopped or go on with newer settings, on a real small run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.base import jsonl
from hone.base.settings import UserError
from hone.base.stop import Preempted, Stopping
from hone.base.world import World
from hone.cli import app as cli
from hone.learn import checkpoint
from hone.model.load import load_model
from hone.recipe.load import load
from hone.recipe.recipe import Recipe, stages_of
from hone.recipe.sections.model import ModelConfig
from hone.rollout.native import NativeEngine
from hone.stages import audit as runs
from hone.stages import pipeline, source
from hone.stages.pipeline import how_to_go_on
from hone.stages.resume import outlook
from hone.tasks.curriculum import Curriculum
from hone.types import Problem

RECIPE = """
name: small
runs: {runs}
model: {{path: tiny, tiny: {{vocab_size: 300, hidden_size: 32, layers: 1, heads: 2, kv_heads: 1, mlp_size: 64}}}}
task: {{name: knights, people: [2], quiz: brief, names: 4, train: 30, validation: 8, test: 8, repeats: true}}
prompt: {{style: raw, system: "", template: "{{user}}\\n"}}
checkpoint: {{every: 2, keep: 3, keep_best: 1}}
tokens_per_microbatch: 2048
stage: rl
steps: 5
prompts_per_step: 4
samples_per_prompt: 4
algo: {{refill_rounds: 1}}
sampling: {{max_tokens: 24}}
optim: {{lr: 1.0e-3}}
reward: {{parts: {{outcome: 1.0, overlong: 1.0}}, overlong: {{buffer: 20, max_tokens: 24}}}}
eval: {{problems: 4, every: 2, sampling: {{max_tokens: 16}}}}
"""


def recipe(folder: Path, *overrides: str, text: str = RECIPE) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(text.format(runs=folder / "runs"))
    loaded = load(path, overrides)
    assert isinstance(loaded, Recipe)
    return loaded


def bits(run: Path) -> dict[str, bytes]:
    patterns = ("metrics.jsonl", "ledger.jsonl", "evals.jsonl", "rollouts/*", "tokens/*", "model/*.safetensors")
    return {str(p.relative_to(run)): p.read_bytes() for pattern in patterns for p in sorted(run.glob(pattern))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline.run(recipe(tmp_path_factory.mktemp("whole")))


# --- check ----------------------------------------------------------------------------------------------------------


def test_a_whole_run_has_no_faults(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, faults = runs.check(whole)
    assert faults == 0
    prompts = sum(len(row["problems"]) for row in jsonl.read(whole / "ledger.jsonl"))
    assert prompts >= 20
    assert lines == [f"{whole}: 5 steps, {prompts} prompts, 2 checkpoints: 0 faults"]
    assert any(row["round"] for row in jsonl.read(whole / "ledger.jsonl")), "no round of refill to check"
    best = json.loads((whole / "results.json").read_text())["best"]
    assert best["split"] == "validation"
    assert best["steps"][0] in (2, 4)


def test_faults_are_named(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    rows = jsonl.read(run / "ledger.jsonl")
    lost = next(row for row in rows if row["step"] == 3)["problems"].pop(0)
    jsonl.write(run / "ledger.jsonl", rows)
    (run / "checkpoints" / "step_000004" / "state.json").write_text("{}")
    metrics = jsonl.read(run / "metrics.jsonl")
    jsonl.write(run / "metrics.jsonl", [*metrics, metrics[-1]])
    lines, faults = runs.check(run)
    text = "\n".join(lines)
    assert faults == len(lines) - 1
    assert f"step 3, round 0: problem {lost} is missing" in text
    assert "step_000004: state.json differs from its checksum" in text
    assert "metrics.jsonl: a step is missing, repeated, or out of order" in text
    assert "rollouts/step_000003.jsonl: not the 4 answers" in text
    monkeypatch.setattr("sys.argv", ["hone", "runs", "check", str(run)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 1
    with pytest.raises(UserError, match="no run was started there"):
        runs.check(tmp_path)


def test_a_supervised_run_is_checked_against_its_examples(tmp_path: Path) -> None:
    settings = ("stage=sft", "sft={examples: 16, examples_per_step: 4}", "checkpoint.keep_best=0", "eval.every=0")
    of_rl = ("steps", "prompts_per_step", "samples_per_prompt", "algo", "reward")
    lines = [line for line in RECIPE.splitlines() if not line.startswith(of_rl)]
    run = pipeline.run(recipe(tmp_path, *settings, text="\n".join(lines)))
    assert runs.check(run)[1] == 0
    rows = jsonl.read(run / "ledger.jsonl")
    rows[1]["problems"] = rows[0]["problems"]
    jsonl.write(run / "ledger.jsonl", rows)
    assert runs.check(run)[1] > 0


def problem(i: int, level: str) -> Problem:
    return Problem(id=f"p{i}", task="t", messages=(), answer="", level=level)


def test_what_is_drawn_ahead_does_not_count_in_a_checkpoint() -> None:
    """Rollouts ahead draw step 5 before the checkpoint at 5 is made: resumed there, its prompts would be skipped."""
    problems = [problem(i, "1") for i in range(50)]
    first, second = Curriculum(problems, seed=3), Curriculum(problems, seed=3)
    for step in range(5):
        first.draw(step, 4)
    state = first.state(5)
    expected = [p.id for p in first.draw(5, 4)]
    assert first.state(5) == state
    assert first.state() != state
    second.restore(first.state(5))
    assert [p.id for p in second.draw(5, 4)] == expected
    assert second.taken(5) == [expected]


# --- export ---------------------------------------------------------------------------------------------------------


def test_any_checkpoint_becomes_a_hugging_face_folder(whole: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for which, place in (("@4", "checkpoints/step_000004/model"), ("", "model")):
        said = runs.export(f"{whole}{which}", tmp_path / f"out{which}")
        assert said == f"{tmp_path}/out{which}: model of {whole / place}"
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / f"out{which}").state_dict()
        ours = load_model(ModelConfig(path=str(whole / place))).state_dict()
        assert exported.keys() == ours.keys()
        assert all(torch.equal(exported[name], ours[name]) for name in ours)
        assert AutoTokenizer.from_pretrained(tmp_path / f"out{which}").eos_token
    card = (tmp_path / "out@4" / "README.md").read_text()
    assert "A checkpoint: the weights before step 4." in card
    assert "| validation |" in card
    assert "after this stage" not in card  # those weights are other ones
    assert "after this stage" in (tmp_path / "out" / "README.md").read_text()
    runs.export(f"{whole}@best", tmp_path / "best")
    assert "Chosen by its accuracy on the validation split." in (tmp_path / "best" / "README.md").read_text()
    final = AutoModelForCausalLM.from_pretrained(whole / "model").state_dict()
    assert any(not torch.equal(final[name], value) for name, value in load_at(tmp_path / "out@4").items())
    with pytest.raises(UserError, match="exists already"):
        runs.export(str(whole), tmp_path / "out")
    with pytest.raises(UserError, match="no adapter there"):
        runs.export(f"{whole}@4", tmp_path / "adapter", adapter=True)
    assert not (tmp_path / "adapter").exists()


def load_at(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(ModelConfig(path=str(folder))).state_dict())


def test_a_damaged_checkpoint_is_not_exported(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    newest = checkpoint.saved_steps(run / "checkpoints")[-1]
    (newest / "model" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"is damaged \(model/config.json differs from its checksum\); export another"):
        runs.export(f"{run}@{checkpoint.step_of(newest)}", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_merged_in_or_alone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    run = pipeline.run(recipe(tmp_path, "lora={rank: 4}", "steps=3", "optim.lr=0.05"))
    assert "its adapter merged in" in runs.export(f"{run}@2", tmp_path / "merged")
    runs.export(f"{run}@2", tmp_path / "alone", adapter=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    base = AutoModelForCausalLM.from_pretrained(run / "base")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    joined = peft.PeftModel.from_pretrained(base, tmp_path / "alone").merge_and_unload().state_dict()
    for name, value in merged.items():
        torch.testing.assert_close(value, joined[name], atol=1e-6, rtol=0)
    assert any((merged[name] - value).abs().max() > 1e-3 for name, value in before.items())
    runs.export(str(run), tmp_path / "final", adapter=True)  # of a finished run
    assert (tmp_path / "final" / "adapter_model.safetensors").exists()


# --- stopped, and gone on -------------------------------------------------------------------------------------------


def test_sigterm_in_the_middle_of_sampling_loses_no_finished_step(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In step 3, between two checkpoints: steps 0 to 2 count, though only 0 and 1 had been saved."""
    begin = NativeEngine.open  # every sampling begins with it

    def told(self: NativeEngine, *arguments: Any, **keywords: Any) -> Any:
        if jsonl.read(tmp_path / "runs" / "small" / "metrics.jsonl")[2:]:
            os.kill(os.getpid(), signal.SIGTERM)
        return begin(self, *arguments, **keywords)

    before = threads()
    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "open", told)
        with pytest.raises(Preempted) as stopped:
            pipeline.run(recipe(tmp_path, "checkpoint.stop_within_seconds=200"))
    cancel_timers(before)
    assert stopped.value.code == 75
    assert stopped.value.step == 3
    assert "Continue with" in capsys.readouterr().err
    run = tmp_path / "runs" / "small"
    assert (run / "checkpoints" / "step_000003").exists()
    pipeline.run(recipe(tmp_path), resume=True)
    assert bits(run) == bits(whole)
    assert runs.check(run)[1] == 0


def test_an_extension_says_which_steps_are_computed_again(whole: Path, tmp_path: Path) -> None:
    todo = outlook(stages_of(recipe(tmp_path, "steps=9")), whole)
    assert todo is not None
    assert "step 4 comes after the last checkpoint and will be computed again" in todo.lines


@pytest.mark.parametrize("kind", ["error", "SIGTERM"])
def test_a_stop_between_two_checkpoints_saves_the_finished_steps(
    kind: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In step 2, after its evaluation, while nothing has been saved: the resumed run does not notice."""
    score = source.reward_groups
    run = tmp_path / "runs" / "small"

    def broken(*arguments: Any) -> Any:
        if jsonl.read(run / "metrics.jsonl")[1:]:
            if kind == "error":
                raise UserError("reward bad.py:later: gave 1 rewards for 8 completions")
            raise Stopping
        return score(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(source, "reward_groups", broken)
        with pytest.raises((UserError, Preempted)) as stopped:
            pipeline.run(recipe(tmp_path, "checkpoint={every: 100, keep_best: 0}"))
    said = f"{stopped.value}\n{capsys.readouterr().err}"
    assert "stopped before step 2, saved" in said
    assert "ontinue with: " in said
    assert " --resume" in said
    if kind == "error":
        assert "step 2: reward bad.py:later: gave 1 rewards for 8 completions" in said
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000002"]
    pipeline.run(recipe(tmp_path), resume=True)
    assert bits(run) == bits(whole)
    assert runs.check(run)[1] == 0


def threads() -> set[int | None]:
    import threading

    return {t.ident for t in threading.enumerate()}


def cancel_timers(before: set[int | None]) -> None:
    """The last resort of a process that goes on after all."""
    import threading

    for t in threading.enumerate():
        if isinstance(t, threading.Timer) and t.ident not in before:
            t.cancel()


def test_a_run_from_before_a_setting_was_there_goes_on(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "small"
    shutil.copytree(whole, run)
    (run / "results.json").unlink()
    (run / "seal.json").unlink()  # as a run of then
    stored = json.loads((run / "config.resolved.json").read_text())
    del stored["checkpoint"]["stop_within_seconds"], stored["parallel"]
    (run / "config.resolved.json").write_text(json.dumps(stored))
    pipeline.run(recipe(tmp_path), resume=True)  # the stage is finished: other settings would be an error
    (run / "results.json").unlink()
    (run / "seal.json").unlink()
    (run / "config.resolved.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match=r"finished, but with other settings:\n  checkpoint.stop_within_seconds"):
        pipeline.run(recipe(tmp_path, "checkpoint.stop_within_seconds=5"), resume=True)
    assert "config_changed" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, command",
    [
        (["/bin/hone", "train", "a b.yaml", 'stop=["x y"]'], """/bin/hone train 'a b.yaml' 'stop=["x y"]' --resume"""),
        (["notebook.py", "--port", "1"], "hone train runs/mine --resume"),  # the arguments are another program's
    ],
)
def test_the_command_to_continue_with_can_be_pasted(
    argv: list[str], command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(KeyboardInterrupt), how_to_go_on(Path("runs/mine"), World(0, 1)):
        raise KeyboardInterrupt
    assert capsys.readouterr().err.endswith(f"Continue with: {command}\n")
