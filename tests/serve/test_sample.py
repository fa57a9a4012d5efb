"""`hone sample`: at a prompt, one question, a file; and what a user may name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hone.base.settings import ConfigError, UserError
from hone.base.visible import visible
from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.native.core import Core
from hone.serve import sample
from hone.serve.model import ServedModel, load_served, resolve

RECIPE = """\
name: r
task: {name: knights, people: [2], quiz: brief, train: 3, test: 4}
prompt: {style: raw, system: "", template: "Q {user} A"}
eval: {sampling: {max_tokens: 7}}
model: {path: tiny, tiny: {max_positions: 512}}
"""


def _said(model: ServedModel, messages: list[dict[str, str]], seed: int, stream: int) -> str:
    ids = model.renderer.messages_ids(messages)
    prompts = [np.array([1])] * stream + [ids]
    turns = model.engine.generate(prompts, model.sampling, samples=1, seed=seed)
    return model.decode(turns[-1][0].completion_ids.tolist())


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_one_answer_is_printed_as_it_is_written(model: ServedModel, capsys: pytest.CaptureFixture[str]) -> None:
    sample.answer_one(model, "the cat", seed=3)
    captured = capsys.readouterr()
    assert captured.out == visible(_said(model, [_user("the cat")], 3, 0)) + "\n"
    assert captured.err in ("", "[cut at 20 tokens]\n")


def _type(monkeypatch: pytest.MonkeyPatch, lines: list[Any]) -> None:
    """What the user enters; an exception is raised in place of a line, and Ctrl-D follows the last."""
    entered: Iterator[Any] = iter(lines)

    def read(prompt: str) -> str:
        line = next(entered, EOFError())
        if isinstance(line, BaseException):
            raise line
        return str(line)

    monkeypatch.setattr("builtins.input", read)


def test_a_chat_remembers_and_can_begin_anew(
    model: ServedModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _type(monkeypatch, ["the cat", "  ", "on?", "x " * 300, "/new", "the cat"])
    sample.chat(model, seed=1)
    first = _said(model, [_user("the cat")], 1, 0)
    history = [_user("the cat"), {"role": "assistant", "content": first}, _user("on?")]
    second = _said(model, history, 1, 1)
    third = _said(model, [_user("the cat")], 1, 2)
    captured = capsys.readouterr()
    assert captured.out == visible(f"{first}\n{second}\n{third}\n\n")
    assert "context of 256" in captured.err
    assert "start over with /new" in captured.err


def test_ctrl_c_stops_an_answer_and_not_the_chat(
    model: ServedModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    steps = [0]
    step = Core.step

    def interrupted(core: Core) -> Any:
        steps[0] += 1
        if steps[0] == 4:
            signal.raise_signal(signal.SIGINT)
        return step(core)

    monkeypatch.setattr(Core, "step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    _type(monkeypatch, ["the cat", "/new", "the cat"])
    sample.chat(model, seed=1)
    out, error = capsys.readouterr()
    first, second, _ = out.split("\n", 1)[0], out.split("\n", 1)[1], ""
    assert "[stopped]" in error
    assert visible(_said(model, [_user("the cat")], 1, 0)).startswith(first)
    assert second.strip("\n") == visible(_said(model, [_user("the cat")], 1, 1))
    assert signal.getsignal(signal.SIGINT) is before


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_of_prompts_is_answered_and_a_cut_one_goes_on_as_it_would_have(
    model: ServedModel, tmp_path: Path
) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text("the cat\n\nan elephant\non a mat\n")
    prompts, out = sample.read_prompts(source), tmp_path / "new" / "answers.jsonl"
    sample.answer_file(model, prompts, out, samples=2, seed=5)
    rows = _read(out)
    assert [(row["index"], row["sample"], row["prompt"]) for row in rows] == [
        (i, g, text) for i, text in enumerate(["the cat", "an elephant", "on a mat"]) for g in (0, 1)
    ]
    assert rows[3]["completion"] != rows[2]["completion"]
    ids = [model.renderer.messages_ids([_user(row["prompt"])]) for row in rows[::2]]
    turns = model.engine.generate(ids, model.sampling, samples=2, seed=5)
    assert [row["completion"] for row in rows] == [
        model.decode(turn.completion_ids.tolist()) for group in turns for turn in group
    ]
    assert {row["model"] for row in rows} == {model.path}

    whole = out.read_text()
    lines = whole.splitlines(keepends=True)
    out.write_text(lines[4] + lines[1] + lines[0][:30])  # in the order in which they finished; the last one torn
    sample.answer_file(model, prompts, out, samples=2, seed=5)
    assert out.read_text() == whole
    with pytest.raises(UserError, match="answers to other prompts or of another model"):
        sample.answer_file(model, prompts[1:], out, samples=2, seed=5)


def test_rows_keep_their_columns_and_may_be_conversations(model: ServedModel, tmp_path: Path) -> None:
    messages = [_user("the cat"), {"role": "assistant", "content": "sat"}, _user("on?")]
    source = _write(tmp_path / "p.jsonl", [{"prompt": "a", "answer": 7}, {"messages": messages, "id": "x"}])
    out = tmp_path / "o.jsonl"
    sample.answer_file(model, sample.read_prompts(source), out, samples=1, seed=0)
    first, second = _read(out)
    assert (first["answer"], second["id"], second["messages"]) == (7, "x", messages)
    assert second["completion"] == _said(model, messages, 0, 1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"text": "a"}\n', r'p.jsonl:2: give \{"prompt"'),
        ("p.jsonl", '{"prompt": 3}\n', "p.jsonl:1: give"),
        ("p.jsonl", '{"messages": [{"role": "assistant", "content": "a"}]}\n', "with the user last"),
        ("p.jsonl", "{no\n", "p.jsonl:1: not JSON"),
        ("p.jsonl", '{"prompt": "a", "completion": "b"}\n', "column completion is written with the answers"),
        ("none.txt", None, "none.txt"),
    ],
)
def test_rows_that_cannot_be_read(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        sample.read_prompts(tmp_path / name)


def test_problems_need_a_recipe(model: ServedModel) -> None:
    with pytest.raises(UserError, match="not a recipe, so it has no problems"):
        sample.show_problems(model, 2)


# --- what a user may name ---


@pytest.fixture
def run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a checkpoint and a final model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    run = tmp_path / "runs" / "r"
    for place in (run / "model", run / "checkpoints" / "step_000004" / "model"):
        shutil.copytree(folder, place)
    from hone.recipe.load import load
    from hone.recipe.recipe import resolved

    (run / "config.resolved.json").write_text(json.dumps(resolved(load("r.yaml"))))
    return run


def test_recipes_runs_and_checkpoints_bring_their_settings(run: Path) -> None:
    step = run / "checkpoints" / "step_000004"
    for target, checkpoint, model in (
        ("r.yaml", None, run / "model"),
        ("runs/r", None, run / "model"),
        ("runs/r", step, step / "model"),
        (str(step), None, step / "model"),
        (str(step / "model"), None, step / "model"),
        (str(run / "model"), None, run / "model"),
        ("runs/r@4", None, step / "model"),
    ):
        stage, path, recipe = resolve(target, ["eval.sampling.temperature=0.5"], checkpoint)
        assert recipe == "r"
        assert Path(path).resolve() == model.resolve()
        assert stage.eval.sampling == SamplingConfig(max_tokens=7, temperature=0.5)
        assert stage.prompt.template == "Q {user} A"


def test_clients_call_a_model_by_the_name_of_the_whole_recipe(run: Path) -> None:
    Path("p.yaml").write_text("name: r\ntask: knights\nstages: [{stage: sft, model: tiny}, {stage: rl, name: last}]\n")
    shutil.copytree(run / "model", run / "last" / "model")
    stage, path, name = resolve("p.yaml", [], None)
    assert (stage.name, Path(path), name) == ("last", Path("runs/r/last/model"), "r")


def test_a_plain_model_has_plain_settings(folder: Path) -> None:
    stage, path, recipe = resolve(str(folder), ["eval.sampling.top_k=5", "model.dtype=bfloat16"], None)
    assert (path, recipe) == (str(folder), None)
    assert stage.eval.sampling == SamplingConfig(max_tokens=1024, top_k=5)
    assert (stage.prompt.system, stage.prompt.template, stage.model.dtype) == ("", "{user}", "bfloat16")
    assert resolve("Qwen/Qwen3-0.6B", [], None)[1:] == ("Qwen/Qwen3-0.6B", None)
    with pytest.raises(UserError, match="--checkpoint belongs to a recipe or a run"):
        resolve(str(folder), [], folder)
    with pytest.raises(ConfigError, match="did you mean"):
        resolve(str(folder), ["eval.sampling.topk=5"], None)
    with pytest.raises(ConfigError, match="no such recipe"):
        resolve("nothing", [], None)


def test_a_recipe_answers_its_problems_and_shows_its_prompt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load_served("runs/r")
    assert model.name == "r"
    sample.show_problems(model, 2)
    out = capsys.readouterr().out
    assert out.count("=> ") == 2
    assert out.count("\nQ ") == 2
