"""Starts without YAML: `hone init`, and `hone train` with --model, --data and --reward."""

from __future__ import annotations

import json
import os
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hone.base import device
from hone.base.settings import UserError
from hone.cli import start
from hone.cli.app import app
from hone.cli.start import Choices, init, train_arguments
from hone.model.tiny import create
from hone.recipe.load import load
from hone.recipe.notes import notices
from hone.recipe.recipe import Recipe
from hone.recipe.sections.model import TinyConfig


def first(question: str, default: str) -> str:
    return default


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    tiny = TinyConfig(vocab_size=320, hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=64)
    create(tmp_path / "small", tiny, ["What is 1 + 2? Answer: 3"], seed=0)
    return "small"


def loaded(target: str, overrides: list[str]) -> Recipe:
    recipe = load(target, overrides)
    assert isinstance(recipe, Recipe)
    return recipe


def test_init_writes_a_short_recipe_with_rows_and_a_reward(model: str) -> None:
    files = init("my/sums", Choices(model=model, steps=7, device="cpu"), first)
    assert files == [Path("my/sums/recipe.yaml"), Path("my/sums/rows.jsonl"), Path("my/sums/reward.py")]
    text = files[0].read_text()
    assert text.count("\n") <= 25
    assert "{recipe}" not in text
    recipe = loaded("my/sums", [])
    assert (recipe.name, recipe.model.path, recipe.steps, recipe.device) == ("sums", "small", 7, "cpu")
    assert recipe.task.source == "my/sums/rows.jsonl"
    assert recipe.reward.parts == {"my/sums/reward.py:right": 1.0}
    rows = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert len({row["question"] for row in rows}) == 200
    a, b = (int(word) for word in rows[150]["question"].split() if word.isdigit())
    assert rows[150]["answer"] == str(a + b)


def test_the_example_reward_reads_the_final_answer(model: str) -> None:
    files = init("sums", Choices(model=model), first)
    right = runpy.run_path(str(files[2]))["right"]
    texts = ["Answer: 12", "First 3. Answer: \\boxed{12}.", "Answer: 12 cats", "12", "Answer: 112", ""]
    assert right(texts, answer=["12"] * 6, question=["?"] * 6) == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]


def test_init_asks_only_for_what_was_not_given_and_overwrites_nothing(model: str) -> None:
    asked: list[str] = []

    def ask(question: str, default: str) -> str:
        asked.append(question.split(" ")[0])
        return default

    Path("mine.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    files = init("a", Choices(data="mine.jsonl", reward="outcome"), ask)
    assert asked == ["Model"]
    with pytest.raises(UserError, match="exists already"):
        init("a", Choices(), ask)
    assert asked == ["Model"], "asked before it looked"
    assert files == [Path("a/recipe.yaml")]
    with pytest.raises(UserError, match=r"a/recipe\.yaml exists already"):
        init("a", Choices(model=model, data="mine.jsonl", reward="outcome"), first)
    init("b", Choices(model=model), first)
    with pytest.raises(UserError, match=r"b/recipe\.yaml, b/rows\.jsonl, b/reward\.py exist already; .*remove them"):
        init("b", Choices(model=model), first)
    with pytest.raises(UserError, match=r"--data gone\.jsonl: no such file or folder; leave it out"):
        init("c", Choices(model=model, data="gone.jsonl", reward="outcome"), first)
    with pytest.raises(UserError, match="a name consists of letters"):
        init("a b", Choices(model=model), first)
    with pytest.raises(UserError, match="starts from random weights"):
        init("d", Choices(model="tiny"), first)
    assert not Path("c").exists()
    assert not Path("d").exists()


def test_init_refuses_what_is_not_there(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine.py").write_text("def right(completions, **columns):\n    return [1.0]\n")
    for name in ("./gone", "gone", "some/where/else"):
        with pytest.raises(UserError, match=f"init: model {name} is not a folder here"):
            init("a", Choices(model=name), first)
    with pytest.raises(UserError, match=r"mine\.py:nofunc: no function nofunc there; there are right"):
        init("a", Choices(model=model, reward="mine.py:nofunc"), first)
    with pytest.raises(UserError, match=r"gone\.py cannot be read"):
        init("a", Choices(model=model, reward="gone.py:right"), first)
    Path("file").touch()
    for name in ("file", "file/a"):
        with pytest.raises(NotADirectoryError):
            init(name, Choices(), lambda *_: pytest.fail("asked before it looked"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # as for a user who is not root
    with pytest.raises(PermissionError):
        init("a", Choices(), lambda *_: pytest.fail("asked before it looked"))
    assert not Path("a").exists()


def test_init_takes_a_hub_id_without_an_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    init("a", Choices(model="gpt2", data="knights"), first)
    assert "model: gpt2" in Path("a/recipe.yaml").read_text()


@pytest.mark.parametrize("given", [(Choices(steps=2), []), (Choices(), ["steps=2"])])
def test_a_run_of_few_steps_has_no_notes_on_settings_that_nobody_made(model: str, given: tuple) -> None:
    Path("rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    choices, overrides = given
    recipe = loaded(*train_arguments(None, overrides, replace(choices, model=model, data="rows.jsonl")))
    assert (recipe.steps, recipe.eval.every, recipe.optim.warmup_steps) == (2, 2, 1)
    assert notices(recipe) == []
    init("few", replace(choices, model=model, data="rows.jsonl"), first)
    recipe = loaded("few/recipe.yaml", overrides)
    assert recipe.steps == 2
    assert choices.steps is None or notices(recipe) == []
    recipe = loaded(*train_arguments(None, ["eval.every=9"], Choices(model=model, data="rows.jsonl", steps=2)))
    assert any("eval.every 9 is more than steps (2)" in note for note in notices(recipe))


def test_train_without_a_recipe(model: str) -> None:
    Path("my rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    chosen = Choices(model=model, data="my rows.jsonl", reward="outcome", steps=3)
    target, settings = train_arguments("optim.lr=1e-3", ["steps=4"], chosen)
    recipe = loaded(target, settings)
    assert (recipe.name, recipe.steps, recipe.optim.lr) == ("my-rows", 4, 1e-3)  # settings beat the options
    assert recipe.task.source == "my rows.jsonl"
    task = loaded(*train_arguments(None, [], Choices(model=model, data="knights"))).task
    assert task.name == "knights"
    with pytest.raises(UserError, match="--data"):
        train_arguments(None, ["steps=3"], Choices())
    target, settings = train_arguments("demo", [], Choices(steps=3))
    assert (target, settings) == ("demo", ["steps=3"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model ./gone --data rows.jsonl", "--model ./gone: model.path: ./gone is not a folder here"),
        ("--model small --data gone.jsonl", "--data gone.jsonl: task.source: no file gone.jsonl"),
        (
            "--model small --data rows.jsonl --reward mine.py",
            "--reward mine.py: reward.parts: no reward 'mine.py'; .* a function of yours is mine.py:right$",
        ),
        ("--model small --data rows.jsonl optim.lr=x", "override 'optim.lr=x': optim.lr: 'x' is not allowed"),
    ],
)
def test_what_is_wrong_in_an_option_is_named_as_it_was_written(model: str, options: str, message: str) -> None:
    Path("rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    Path("mine.py").write_text("def _inner():\n    pass\n\n\ndef right(completions, **columns):\n    return [1.0]\n")
    with pytest.raises(UserError, match=f"^{message}"):
        CliRunner().invoke(app, ["train", *options.split()], catch_exceptions=False)


def test_a_run_from_the_command_line_alone(model: str, capfd: Any) -> None:
    rows = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(30)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("mine.py").write_text(
        "def right(completions, **columns):\n    return [float(len(c) % 2) for c in completions]\n"
    )
    line = "train --model small --data rows.jsonl --reward mine.py:right --steps 1 --device cpu sampling.max_tokens=4"
    result = CliRunner().invoke(app, [*line.split(), "prompts_per_step=2", "eval.every=0", "eval.problems=2"])
    assert result.exit_code == 0, result.output
    steps = [json.loads(line) for line in Path("runs/rows/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == [0]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.fixture(autouse=True)
def _devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """`device: cpu` sets a variable of the process; undone after each test."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="PyTorch sees no GPU"):
        device.select("cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UserError, match="already uses a GPU"):
        device.select("cpu")


def test_off_a_terminal_the_defaults_are_taken_and_said(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert start.asker()("Model", "x/y") == "x/y"
    assert capsys.readouterr().err == "Model: x/y\n"


def test_the_reward_of_the_readme_reads_the_form_that_the_prompt_asks_for() -> None:
    """The task's system prompt asks for `Answer: \\boxed{...}`."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (code,) = [block for block in readme.split("```") if block.startswith("python\n# reward.py")]
    space: dict[str, Any] = {}
    exec(code.removeprefix("python\n"), space)
    texts = ["So 12.\nAnswer: \\boxed{12}", "Answer: 12.", "Answer: 13", "Answer: \\boxed{112}", ""]
    assert space["right"](texts, answer=["12"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert space["right"](texts[:1], answer=[12]) == [1.0]


def test_a_recipe_for_a_gpu_is_shown_and_planned_without_one(model: str, capfd: Any) -> None:
    Path("rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 12)
    recipe = init("gpu", Choices(model=model, data="rows.jsonl", reward="outcome", device="cuda"), first)[0]
    assert CliRunner().invoke(app, ["config", "show", str(recipe)]).exit_code == 0
    with pytest.raises(UserError, match="PyTorch sees no GPU"):
        CliRunner().invoke(app, ["check", str(recipe)], catch_exceptions=False)
