"""Starts without YAML. Both fill in the recipe `start.yaml`, which lies beside this file.

hone init sums --model Qwen/Qwen2.5-0.5B-Instruct        # writes sums/recipe.yaml, rows and a reward to change
hone train --model Qwen/Qwen2.5-0.5B-Instruct --data rows.jsonl --reward my.py:right --steps 50
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.base.overrides import source as override_source
from hone.base.settings import ConfigError, UserError

START = Path(__file__).with_name("start.yaml")
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
NAME = re.compile(r"\w[\w.-]*")

REWARD = '''"""The reward of answers. Change it freely; try it with `hone check {recipe}`."""

import re


def right(completions, answer, **columns):
    """One number per completion: 1 if its final answer is the row's, else 0.

    `completions` are the answers to one problem; every column of your rows is passed by its name, one value for each
    answer.
    """
    return [float(final_answer(text) == str(gold).strip()) for text, gold in zip(completions, answer)]


def final_answer(text):
    """The text after the last `Answer:`, without its box."""
    last = text.rsplit("Answer:", 1)[-1].strip().rstrip(".")
    box = re.fullmatch(r"\\\\boxed\\{{(.*)\\}}", last)
    return (box[1] if box else last).strip()
'''


@dataclass(frozen=True)
class Choices:
    """The choices that replace a recipe; None: not given."""

    model: str | None = None
    data: str | None = None
    reward: str | None = None
    steps: int | None = None
    device: str | None = None

    def settings(self) -> dict[str, Any]:
        """The choices as settings of a recipe, by their dotted names."""
        from hone.tasks import TASKS, kind_of
        from hone.tasks.registered import registered

        settings: dict[str, Any] = {}
        if self.model is not None:
            settings["model"] = self.model
        if self.data is not None:
            is_task = kind_of(self.data) in TASKS or self.data in registered()
            settings["task"] = {"name": self.data} if is_task else {"name": "dataset", "source": self.data}
        if self.reward is not None:
            settings["reward"] = self.reward
        if self.steps is not None:
            settings["steps"] = self.steps
        if self.device is not None:
            settings["device"] = self.device
        return settings


def train_arguments(recipe: str | None, overrides: Sequence[str], choices: Choices) -> tuple[str, list[str]]:
    """The recipe and the settings that `hone train` runs. Without a recipe, `--data` is needed.

    Raises UserError if there is neither, or if the model cannot be trained without a recipe.
    """
    if recipe is not None and "=" in recipe and not Path(recipe).exists():
        overrides = [recipe, *overrides]
        recipe = None
    settings = choices.settings()
    if recipe is None:
        if choices.data is None:
            raise UserError(
                "train: give a recipe, or --data with rows or the name of a task; `hone config presets` lists the "
                "recipes that come with hone, and `hone init NAME` writes one to start from"
            )
        _refuse_tiny(choices.model)
        shrunk = _shrunk(_steps(choices, overrides))
        recipe, settings = str(START), {"name": run_name(choices.data), **settings, **shrunk}
    return recipe, [*(f"{key}={json.dumps(value)}" for key, value in settings.items()), *overrides]


def _steps(choices: Choices, overrides: Sequence[str]) -> int | None:
    """The number of steps that the user asked for, as an option or as `steps=2`."""
    settings = [text.removeprefix("steps=") for text in overrides if text.startswith("steps=")]
    return int(settings[-1]) if settings and settings[-1].isdecimal() else choices.steps


def _shrunk(steps: int | None) -> dict[str, int]:
    """The settings of `start.yaml` that are too large for a run of so few steps, by their dotted names."""
    from ruamel.yaml import YAML

    if not steps:
        return {}
    start = YAML(typ="safe").load(START)
    fitting = {"eval.every": steps, "optim.warmup_steps": steps // 2}
    of_start = {"eval.every": start["eval"]["every"], "optim.warmup_steps": start["optim"]["warmup_steps"]}
    return {key: most for key, most in fitting.items() if most < of_start[key]}


def as_options(error: ConfigError, choices: Choices) -> ConfigError:
    """The error with settings that came from options named as the user wrote them: `--model x`."""
    options = {"model": choices.model, "task": choices.data, "reward": choices.reward}
    settings = choices.settings()
    lines = list(error.lines)
    for key, value in options.items():
        if value is not None:
            source = override_source(f"{key}={json.dumps(settings[key])}")
            option = f"--{'data' if key == 'task' else key} {value}"
            lines = [line.replace(f"{source}: ", f"{option}: ") for line in lines]
    return ConfigError(lines)


def run_name(data: str) -> str:
    """A run's name from its data: `my rows.jsonl` gives `my-rows`."""
    return re.sub(r"[^\w.-]+", "-", Path(data).stem).strip("-.") or "start"


def init(name: str, choices: Choices, ask: Callable[[str, str], str]) -> list[Path]:
    """Writes a recipe, and the rows and reward that the user does not have yet, into the folder `name`.

    `ask(question, default)` is called for choices that were not given. Returns the files. Raises UserError if the name
    cannot be a run's, a file exists already, or a choice names what is not there; the folder is checked before anything
    is asked. Raises OSError if the folder cannot be written.
    """
    folder = Path(name)
    if not NAME.fullmatch(folder.name):
        raise UserError(f"init: {name}: a name consists of letters, digits and . _ - and starts with a letter or digit")
    recipe, rows, reward = folder / "recipe.yaml", folder / "rows.jsonl", folder / "reward.py"
    if recipe.exists():
        _refuse_present([recipe, rows, reward])
    _require_writable(folder)
    model = choices.model or ask("Model (a hub id or a folder)", MODEL)
    _refuse_tiny(model)
    _require_model(model)
    data = choices.data or ask("Rows (a file or folder; a new file gets examples)", rows.as_posix())
    example = f"{reward.as_posix()}:right"
    function = choices.reward or ask("Reward (file.py:function; a new file gets an example)", example)
    chosen = Choices(model, data, function, choices.steps, choices.device)
    texts = {recipe: _recipe_text(folder.name, recipe, chosen)}
    if Path(data) == rows:
        texts[rows] = _example_rows()
    if function == example:
        texts[reward] = REWARD.format(recipe=recipe.as_posix())
    _refuse_present(list(texts))
    _require_inputs(data if Path(data) != rows else None, function if function != example else None, rows)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def _refuse_present(paths: Sequence[Path]) -> None:
    present = [str(path) for path in paths if path.exists()]
    if present:
        exists, them = ("exists", "it") if len(present) == 1 else ("exist", "them")
        raise UserError(f"init: {', '.join(present)} {exists} already; give another name, or remove {them}")


def _require_writable(folder: Path) -> None:
    """Raises OSError if the folder, or where it will be made, is a file or cannot be written."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def _require_model(model: str) -> None:
    """Raises UserError if a path is not the folder of a model. Hub ids are not looked up."""
    from hone.recipe.load import is_path
    from hone.recipe.sections.model import WITHOUT_OWNER

    folder = Path(model).expanduser()
    if not is_path(model) and ("/" in model or model in WITHOUT_OWNER):
        return
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        what = "has no config.json" if folder.is_dir() else "is not a folder here"
        raise UserError(f"init: model {model} {what}; give the folder of a model, or a hub id such as {MODEL}")


def _require_inputs(data: str | None, function: str | None, rows: Path) -> None:
    """Raises UserError for rows or a reward function that are not there; None: an example is written."""
    from hone.grade.targets import functions_in, read_target
    from hone.recipe.load import is_data

    if data is not None and is_data(data) and not Path(data).expanduser().exists():
        raise UserError(f"init: --data {data}: no such file or folder; leave it out to get example rows in {rows}")
    if function is None or ":" not in function or (source := read_target(function)) is None:
        return
    name = function.rpartition(":")[2]
    try:
        there = functions_in(source)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"init: --reward {function}: cannot be parsed: {error}") from None
    if "." not in name and name.encode() not in source:  # it may also be imported or assigned
        raise UserError(f"init: --reward {function}: no function {name} there; there are {', '.join(there) or 'none'}")


def _refuse_tiny(model: str | None) -> None:
    if model == "tiny":
        raise UserError(
            "model tiny: starts from random weights, so no answer would be right and nothing could be learned; see "
            "recipes/demo, which warms it up with worked answers first"
        )


def _recipe_text(name: str, recipe: Path, choices: Choices) -> str:
    """`start.yaml` with the choices in their places; its comments stay."""
    from ruamel.yaml import YAML

    yaml = YAML()  # keeps comments and the style of mappings
    yaml.width = 120
    tree = yaml.load(
        START.read_text(encoding="utf-8").replace("{recipe}", recipe.as_posix()).replace("runs/start", f"runs/{name}")
    )
    settings = choices.settings()
    tree["name"] = name
    for key in ("model", "steps"):
        tree[key] = settings.pop(key, tree[key])
    task = settings.pop("task")
    tree["task"].clear()
    tree["task"].update(task)
    for dotted, most in _shrunk(choices.steps).items():
        section, key = dotted.split(".")
        tree[section][key] = most
    for place, (key, value) in enumerate(settings.items(), start=list(tree).index("task") + 1):
        tree.insert(place, key, value)
    out = io.StringIO()
    yaml.dump(tree, out)
    return out.getvalue()


def _example_rows() -> str:
    """200 sums of two numbers, in words so that repeating the question is no answer: rows to be replaced."""
    pairs = [(10 + i % 40, 20 + 13 * (i // 40)) for i in range(200)]
    question = "Ann has {} apples and buys {} more. How many does she have now?"
    rows = [{"question": question.format(a, b), "answer": str(a + b)} for a, b in pairs]
    return "".join(json.dumps(row) + "\n" for row in rows)


def asker() -> Callable[[str, str], str]:
    """Asks on a terminal; elsewhere takes the default, and says so."""
    import typer

    def default(question: str, value: str) -> str:
        print(f"{question}: {value}", file=sys.stderr)
        return value

    return (lambda question, value: str(typer.prompt(question, default=value))) if sys.stdin.isatty() else default
