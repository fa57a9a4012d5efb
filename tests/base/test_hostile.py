"""Text and files that come from elsewhere: a terminal, a spreadsheet, a run and a parser that meet them stay whole."""

from __future__ import annotations

import ast
import json
import os
import pickle
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hone.base import jsonl
from hone.base.progress import Track
from hone.base.settings import ConfigError, UserError, read
from hone.base.visible import visible, well_formed
from hone.cli.app import app
from hone.model import tiny
from hone.model.load import load_model, load_tokenizer
from hone.recipe.sections.model import ModelConfig, TinyConfig
from hone.recipe.sections.prompt import PromptConfig
from hone.report.tables import to_csv
from hone.rollout.prompts import Renderer

ESCAPES = "\x1b[2J\x1b]0;owned\x07 \u202etxt.exe\x9b31m\r\ud800"
ROOT = Path(__file__).resolve().parents[2]

#: Modules that print what models, servers, data files and other programs say.
PRINTING = [
    "serve/sample.py", "cli/data.py", "base/progress.py", "runs/writer.py", "base/stop.py", "rollout/engine.py",
    "runs/sinks.py",
    "launch/supervise.py",
]  # fmt: skip


def test_what_steers_a_terminal_is_shown_by_number() -> None:
    shown = visible(ESCAPES)
    assert not any(c in shown for c in "\x1b\x07\u202e\x9b\r\ud800")
    assert "⟨U+001B⟩[2J" in shown
    assert visible("plain\n\ttext é 数") == "plain\n\ttext é 数"
    assert well_formed("a\ud83d\ude00\ud800b") == "a😀\ufffdb"


@pytest.mark.parametrize("module", PRINTING)
def test_text_of_others_is_printed_visibly(module: str) -> None:
    """Each argument of `print` is written by us (a constant, or with `visible` in it)."""
    source = (ROOT / "hone" / module).read_text()
    tree = ast.parse(source)
    made = {
        target.id for node in ast.walk(tree) if isinstance(node, ast.Assign) and "visible(" in ast.unparse(node.value)
        for target in node.targets if isinstance(target, ast.Name)
    }  # fmt: skip
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            wrong += [
                f"{module}:{node.lineno}: {ast.unparse(a)}"
                for a in node.args
                if not isinstance(a, ast.Constant) and "visible(" not in ast.unparse(a) and ast.unparse(a) not in made
            ]
    assert not wrong


def test_rows_of_a_data_file_reach_the_terminal_visibly(tmp_path: Path) -> None:
    rows = [{"question": f"What is {i}? \x1b]0;owned\x07\u202e", "answer": str(i)} for i in range(3)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = CliRunner().invoke(app, ["data", "show", str(file)])
    assert done.exit_code == 0, done.output
    assert "⟨U+001B⟩]0;owned⟨U+0007⟩⟨U+202E⟩" in done.output
    assert "\x1b" not in done.output


def test_progress_says_it_visibly(capsys: pytest.CaptureFixture[str]) -> None:
    with Track("work", 1) as progress:
        progress.say(ESCAPES)
    assert "\x1b" not in capsys.readouterr().err


def test_half_a_character_ends_no_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    jsonl.append(file, {"text": "a\ud800b", "\udfff": [os.fsdecode(b"\xff")]})
    jsonl.write(tmp_path / "again.jsonl", [{"text": "\udc00"}])
    assert jsonl.read(file) == [{"text": "a\ufffdb", "\ufffd": ["\ufffd"]}]


@pytest.mark.parametrize("cell", ["=1+1", "+A1", "-A1", "@SUM(A1)", "\t=1", "\r=1", "  =1", "\n=1", "＝1", "-1+cmd|x"])
def test_a_cell_that_a_spreadsheet_would_run_is_inert(cell: str) -> None:
    assert to_csv(["a"], [[cell]]).splitlines()[1].lstrip('"').startswith("'")


def test_numbers_in_cells_stay_numbers() -> None:
    assert to_csv(["a"], [[-1.5, "-1.5", "+3", "-1e-5", 7, "text", None]]) == "a\n-1.5,-1.5,+3,-1e-5,7,text,\n"


def bomb() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        bomb(),
        "a: " + "[" * 50_000,
        "a: " + "{b: " * 50_000,
        "a: " + "[" * 500 + "]" * 500,
        "\n".join(" " * i + "a:" for i in range(1200)),
        "a: &a [*a]",
        "# " + "x" * (2 << 20),
    ],
    ids=["aliases", "brackets", "braces", "closed", "indentation", "itself", "size"],
)
def test_a_recipe_that_explodes_is_refused_at_once(tmp_path: Path, text: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=r"too deep|more than \d+ values|at most \d+|contains itself"):
        read(file)
    assert time.monotonic() - begin < 20  # under load; seconds at most on a quiet machine


def test_brackets_without_end_in_json_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(ConfigError, match="nested too deep"):
        read(file)


def test_files_that_extend_each_other_in_diamonds_are_read_once(tmp_path: Path) -> None:
    """Thirty levels of two that both extend the same two: 2^30 ways to the root."""
    (tmp_path / "0a.yaml").write_text("name: root\n")
    (tmp_path / "0b.yaml").write_text("steps: 3\n")
    for i in range(1, 31):
        for side in "ab":
            (tmp_path / f"{i}{side}.yaml").write_text(f"extends: [{i - 1}a.yaml, {i - 1}b.yaml]\nseed: {i}\n")
    begin = time.monotonic()
    layer = read(tmp_path / "30a.yaml")
    assert layer.data == {"name": "root", "steps": 3, "seed": 30}
    assert read(tmp_path / "30a.yaml").where(("seed",)).endswith("30a.yaml:2")
    assert time.monotonic() - begin < 20
    for i in range(200):
        (tmp_path / f"c{i}.yaml").write_text(f"extends: c{i + 1}.yaml\n")
    with pytest.raises(ConfigError, match="more than 40 files deep"):
        read(tmp_path / "c0.yaml")
    (tmp_path / "x.yaml").write_text("extends: [y.yaml, y.yaml]\n")
    (tmp_path / "y.yaml").write_text("extends: x.yaml\n")
    with pytest.raises(ConfigError, match="leads back to itself"):
        read(tmp_path / "x.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "small"
    size = TinyConfig(vocab_size=300, hidden_size=16, layers=1, heads=2, kv_heads=1, mlp_size=16, max_positions=64)
    tiny.create(folder, size, ["the cat sat"], seed=0)
    return folder


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("pickle-was-run",)


def test_weights_that_are_a_program_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in folder.iterdir():
        if file.suffix != ".safetensors" and file.name != "checksums.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"w": Evil()}))
    with pytest.raises(UserError, match=r"model\.path"):
        load_model(ModelConfig(path=str(tmp_path)))
    assert not Path("pickle-was-run").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception('no system role') }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages[7].content }}",
        "{% if %}",
    ],
)
def test_a_template_that_fails_is_an_error_of_the_user(folder: Path, template: str) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=r"the (model|tokenizer)'s chat template (fails|refuses)"):
        Renderer(tokenizer, PromptConfig(), "").messages_ids([{"role": "user", "content": "hi"}])
