"""A run folder may be moved, cut or damaged: the results are the same, or it is said what is wrong. Never a traceback.

One small run (an adapter, a hard reset, data and a reward of the user's) is made once: finished, and cut at step 4.
The full sweep over every file is slow: `pytest -m slow tests/test_integrity.py`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hone.base import places, terminal
from hone.base.settings import UserError
from hone.base.stop import Interrupted
from hone.measure.run import cli_eval
from hone.preflight.plan.shapes import config_of
from hone.recipe.load import load
from hone.recipe.sections.model import ModelConfig
from hone.report.build import build
from hone.runs.run import Run
from hone.stages import audit as runs
from hone.stages import pipeline

RECIPE = """
name: x
runs: {runs}
model: {{path: tiny, tiny: {{vocab_size: 300, hidden_size: 32, layers: 1, heads: 2, kv_heads: 2, mlp_size: 64}}}}
task: {{name: dataset, source: rows/train.jsonl, validation: 6, test: 6, grading: text}}
prompt: {{style: raw, system: "", template: "{{user}}\\n"}}
checkpoint: {{every: 2, keep: 4}}
stage: rl
steps: 6
lora: {{rank: 2}}
reset: {{at: [3]}}
prompts_per_step: 2
samples_per_prompt: 4
sampling: {{max_tokens: 8}}
optim: {{lr: 1.0e-2}}
reward: {{parts: {{"mine/reward.py:vowels": 1.0}}}}
eval: {{problems: 4, every: 2, sampling: {{max_tokens: 8}}}}
"""

REWARD = "from helper import share\n\n\ndef vowels(problem, rollouts):\n    return [share(r.text) for r in rollouts]\n"
HELPER = "def share(text):\n    return sum(text.count(c) for c in 'aeiou') / (1 + len(text))\n"

#: What must be the same whatever happened on the way.
RESULTS = (
    *("metrics.jsonl", "evals.jsonl", "ledger.jsonl", "files.jsonl"),
    *("evals/*", "rollouts/*", "tokens/*", "model/model.safetensors", "adapter/adapter_model.safetensors"),
)


def bits(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for pattern in RESULTS for p in run.glob(pattern) if p.is_file()}


class Made:
    """The folder that the run was made in; `finished` and `cut` are copies of it, and their results."""

    def __init__(self, home: Path) -> None:
        self.home, self.finished, self.cut = home, home / "runs" / "x", home / "cut" / "x"

    def copy(self, of: Path, to: Path) -> Path:
        shutil.copytree(of, to, symlinks=True)
        return to


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    home = tmp_path_factory.mktemp("home")
    (home / "rows").mkdir()
    rows = [{"question": f"What is {i} and {i}?", "answer": str(2 * i)} for i in range(40)]
    (home / "rows" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "mine").mkdir()
    (home / "mine" / "reward.py").write_text(REWARD)
    (home / "mine" / "helper.py").write_text(HELPER)
    before = Path.cwd()
    os.chdir(home)
    try:
        (home / "recipe.yaml").write_text(RECIPE.format(runs="runs"))
        with pytest.MonkeyPatch.context() as patch:
            stop = Run.stop_if_asked

            def interrupt(run: Run, step: int) -> None:
                if step == 5:
                    run.checkpoints.settle()
                    raise Interrupted(step)
                stop(run, step)

            patch.setattr(Run, "stop_if_asked", interrupt)
            with pytest.raises(Interrupted):
                pipeline.run(load("recipe.yaml"))
        shutil.copytree(home / "runs" / "x", home / "cut" / "x")
        pipeline.run(load("recipe.yaml"), resume=True)
        yield Made(home)
    finally:
        os.chdir(before)
        places.forget()


def outcome(call: Callable[[], Any]) -> str | None:
    """What the command line would print before it ends with exit code 2; None if all went well."""
    try:
        call()
    except UserError as error:
        return str(error) or "an error without a message"
    except Exception as error:
        problem = terminal.disk_problem(error)
        if problem is None:
            raise
        return problem
    return None


# --- moved ----------------------------------------------------------------------------------------------------------


def elsewhere(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: Path) -> Path:
    """A copy of a run, used from another folder, when neither the run nor the user's files are where they were."""
    run = made.copy(of, tmp_path / "archive" / "y")
    hidden = made.home.with_name("hidden")
    made.home.rename(hidden)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return run


@pytest.fixture
def hidden(made: Made) -> Iterator[None]:
    """Whatever a test does, the home of the run comes back."""
    yield
    if not made.home.exists():
        made.home.with_name("hidden").rename(made.home)


@pytest.mark.usefixtures("hidden")
def test_a_run_that_was_moved_goes_on_to_the_same_end(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = bits(made.finished)
    run = elsewhere(made, tmp_path, monkeypatch, made.cut)
    pipeline.run(load(run), resume=True)
    assert bits(run) == expected
    assert "file_changed" not in (run / "events.jsonl").read_text()


def test_the_folder_of_a_model_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first" / "warm").mkdir(parents=True)
    (tmp_path / "second").mkdir()
    small = {"model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 300}
    (tmp_path / "first" / "warm" / "config.json").write_text(json.dumps(small))
    config = {"model": {"path": "warm"}}
    monkeypatch.chdir(tmp_path / "first")
    run = tmp_path / "second" / "away"
    run.mkdir()
    (run / places.FILE).write_text(places.record(run, config)[0])
    monkeypatch.chdir(tmp_path / "second")
    try:
        places.use(Path("away"))
        assert config_of(ModelConfig(path="warm"))[0].hidden_size == 32
        (tmp_path / "first" / "warm").rename(tmp_path / "gone")
        places.use(Path("away"))
        with pytest.raises(
            UserError, match=r"model\.path: warm is not there .*it was .*first/warm.* give model\.path="
        ):
            config_of(ModelConfig(path="warm"))
    finally:
        places.forget()


@pytest.mark.usefixtures("hidden")
def test_a_run_that_was_moved_is_evaluated_exported_and_reported(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = elsewhere(made, tmp_path, monkeypatch, made.finished)
    cli_eval(load(run), [f"{run}@4"])  # an adapter on the base of a hard reset
    runs.export(f"{run}@2", tmp_path / "out")  # one on the base that the run began with
    assert (tmp_path / "out" / "model.safetensors").exists()
    build(run)
    assert runs.check(run)[1] == 0


@pytest.mark.usefixtures("hidden")
def test_what_cannot_be_found_is_named_with_the_way_to_give_it(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = elsewhere(made, tmp_path, monkeypatch, made.finished)
    shutil.rmtree(run / "inputs")
    with pytest.raises(UserError, match=r"task\.source: rows/train\.jsonl is not there .* or give task\.source=PATH"):
        load(run)


# --- damaged --------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_early(path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 5] ^= 2
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def delete(path: Path) -> None:
    path.unlink()


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


HOW = (flip, flip_early, truncate, empty, delete, replace_by_folder)

#: Of no consequence for what is compared here: prose, and seconds.
UNIMPORTANT = ("model/README.md", "sessions.jsonl")


def kinds(run: Path) -> list[str]:
    """One file of every kind."""
    seen: dict[str, str] = {}
    for path in sorted(p for p in run.rglob("*") if p.is_file()):
        name = str(path.relative_to(run))
        kind = "".join("0" if c.isdigit() else c for c in name)
        seen.setdefault(kind, name)
    return list(seen.values())


def resumed(made: Made, run: Path) -> None:
    pipeline.run(load(run), resume=True)


def damage_and(made: Made, tmp_path: Path, name: str, how: Callable[[Path], None], capsys: Any) -> list[str]:
    """Faults of what happens with a run in which one file was damaged: none, or lines."""
    wrong = []

    def attempt(verb: str, of: Path, call: Callable[[Path], Any], same: Callable[[Path], bool]) -> None:
        run = made.copy(of, tmp_path / verb / "x")
        if (run / name).is_file():
            how(run / name)
            capsys.readouterr()
            try:
                message = outcome(lambda: call(run))
            except Exception as error:
                wrong.append(f"{verb}: {how.__name__} {name}: traceback: {error!r}")
            else:
                said = capsys.readouterr().err
                if message is None and not same(run) and Path(name).name not in said:
                    wrong.append(f"{verb}: {how.__name__} {name}: a silent difference")
        shutil.rmtree(tmp_path / verb)

    expected = bits(made.finished)
    attempt("resume", made.cut, lambda run: resumed(made, run), lambda run: bits(run) == expected)
    attempt("resume when finished", made.finished, lambda run: resumed(made, run), lambda run: bits(run) == expected)

    def evaluate(run: Path) -> None:
        cli_eval(load(run), [], out=run.parent / "out")

    def samples(run: Path) -> list[str]:
        return [p.read_text() for p in sorted((run.parent / "out").glob("*/samples.jsonl"))]

    if not hasattr(made, "samples"):
        clean = made.copy(made.finished, tmp_path / "clean" / "x")
        evaluate(clean)
        made.samples = samples(clean)  # type: ignore[attr-defined]
        shutil.rmtree(tmp_path / "clean")
        build(made.copy(made.finished, tmp_path / "clean" / "x"), tmp_path / "clean" / "report")
        made.page = (tmp_path / "clean" / "report" / "report.html").read_text()  # type: ignore[attr-defined]
        shutil.rmtree(tmp_path / "clean")
    attempt("eval", made.finished, evaluate, lambda run: samples(run) == made.samples)  # type: ignore[attr-defined]
    attempt(
        "report",
        made.finished,
        lambda run: build(run, run.parent / "report"),
        lambda run: (run.parent / "report" / "report.html").read_text() == made.page,  # type: ignore[attr-defined]
    )
    return wrong


@pytest.mark.parametrize(
    "name",
    [
        "resets/reset_001/model.safetensors",
        "metrics.jsonl",
        "evals.jsonl",
        "config.resolved.json",
        "base/model.safetensors",
        "model/model.safetensors",
    ],
)
def test_a_flipped_bit_is_noticed(made: Made, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert damage_and(made, tmp_path, name, flip, capsys) == []


@pytest.mark.parametrize("how", [flip, delete])
@pytest.mark.parametrize(
    "name",
    [
        "ledger.jsonl",
        "tokens/step_000004.safetensors",
        "adapter/adapter_model.safetensors",
        "model/model.safetensors",
    ],
)
def test_damage_of_a_finished_run_is_said_when_it_is_resumed(
    made: Made, tmp_path: Path, name: str, how: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run = made.copy(made.finished, tmp_path / "x")
    how(run / name)
    message = outcome(lambda: resumed(made, run))
    assert Path(name).name in (message or capsys.readouterr().err)
    assert (message is not None) == (name.startswith("model"))  # nothing is computed from the others any more


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("how", HOW, ids=lambda how: how.__name__)
def test_every_file_damaged_in_every_way(
    made: Made, tmp_path: Path, how: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    names = [name for name in kinds(made.finished) + kinds(made.cut) if name not in UNIMPORTANT]
    wrong = []
    for name in dict.fromkeys(names):
        lines = damage_and(made, tmp_path, name, how, capsys)
        with capsys.disabled():
            print(f"{how.__name__} {name}: {lines or 'fine'}", flush=True)  # the sweep takes long
        wrong += lines
    assert wrong == []
