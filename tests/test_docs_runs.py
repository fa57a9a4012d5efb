"""docs/metrics.md and docs/run-folder.md: every column and file of real runs is described, and what they describe is
written by the code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hone.base import jsonl
from hone.recipe.load import load
from hone.stages import pipeline

ROOT = Path(__file__).parents[1]
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "hone").rglob("*.py")))

RECIPE = """
name: small
runs: {folder}/runs
model: {{path: tiny, tiny: {{vocab_size: 320, hidden_size: 32, layers: 1, heads: 2, kv_heads: 1, mlp_size: 64}}}}
task: {{name: knights, people: [2, 3], quiz: brief, names: 3, train: 40, validation: 6, test: 6, repeats: true}}
prompt: {{style: raw, system: "", template: "{{user}}\\n", reply_template: "{{user}}\\n"}}
prompts_per_step: 2
samples_per_prompt: 2
steps: 2
sampling: {{max_tokens: 4}}
eval: {{problems: 4, every: 1, samples: 2, sampling: {{max_tokens: 4}}}}
checkpoint: {{every: 1}}
stages:
  - {{name: sft, stage: sft, sft: {{examples: 8, examples_per_step: 4, validate_every: 1}}}}
  - name: turns
    stage: rl
    environment: {{name: "{folder}/echo.py:Echo", max_turns: 2}}
    sampling: {{max_tokens: 64, stop: [a, e, i, o, n, t]}} # an untrained model hardly ever ends a turn
    reward: [environment, outcome]
    curriculum: {{kind: mixture, weights: {{2: 1, 3: 1}}}}
    algo: {{refill_rounds: 1, kl: {{coef: 0.1}}}}
    lora: {{rank: 2}}
    reset: {{at: [1]}}
  - {{name: ppo, stage: rl, algo: {{advantage: gae}}}}
  - {{name: distil, stage: distil, teacher: stages.sft, eval: {{every: 0, samples: 1}}}}
"""
ECHO = """
from hone import Environment, Observation


class Echo(Environment):
    def reset(self, problem, seed):
        return None

    def step(self, message):
        text = message["content"]
        return Observation(({"role": "user", "content": "Go on."},), reward=float(len(text) % 2), parts={"said": 1.0})
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with most of what adds columns or files; `generate` needs a model with right answers."""
    folder = tmp_path_factory.mktemp("documented")
    (folder / "echo.py").write_text(ECHO)
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    return pipeline.run(load(folder / "recipe.yaml"))


def described(page: str, start: str, end: str = "\n## ") -> list[str]:
    """The names in the first column of the tables of a section."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    section = text[text.index(start) + len(start) :].split(end)[0]
    cells = re.findall(r"^\| (`[^|]*?) \|", section, re.M)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def fits(name: str, names: list[str]) -> bool:
    """Whether a name is among `names`, in which words in capitals stand for any name."""
    return any(re.fullmatch(re.sub(r"\\?[A-Z]{4,}", ".+", re.escape(one)), name) for one in names)


def columns(run: Path, file: str) -> Iterator[str]:
    for path in run.rglob(file):
        for row in jsonl.read(path):
            yield from row


@pytest.mark.parametrize("file", ["metrics.jsonl", "timings.jsonl", "evals.jsonl"])
def test_every_column_of_a_run_is_described(run: Path, file: str) -> None:
    names = described("metrics.md", f"## {file}\n")
    if file == "evals.jsonl":  # several in a cell of another column
        names += ["reward/mean", "reward/NAME"]
    written = set(columns(run, file))
    assert len(written) > 4
    assert [name for name in sorted(written) if not fits(name, names)] == []


def test_no_column_is_described_that_nothing_writes(run: Path) -> None:
    """Those that the run here has not are in the code."""
    for file in ("metrics.jsonl", "timings.jsonl", "evals.jsonl"):
        written = set(columns(run, file))
        for name in described("metrics.md", f"## {file}\n"):
            fixed = max(re.split(r"[A-Z]{4,}", name), key=len).strip("/")
            group, _, last = name.rpartition("/")
            in_code = f'"{fixed}' in SOURCE or (f'"{group}/{{' in SOURCE and f'"{last}"' in SOURCE)
            assert in_code or any(fits(one, [name]) for one in written), name


def test_every_file_of_a_run_is_described(run: Path) -> None:
    names = described("run-folder.md", "## Of a run\n", "\n## A row")
    patterns = [re.sub(r"\d+", r"\\d+", re.escape(name)) + (".*" if name.endswith("/") else "") for name in names]
    stages = [row["name"] for row in json.loads((run / "stages.json").read_text())]
    files = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
    inner = {str(Path(*file.parts[1:])) if file.parts[0] in stages else str(file) for file in files}
    assert len(inner) > 40
    assert [file for file in sorted(inner) if not any(re.fullmatch(one, file) for one in patterns)] == []
    for name, pattern in zip(names, patterns, strict=True):
        stem = re.split(r"\d|/", name)[0]
        assert any(re.fullmatch(pattern, file) for file in inner) or f'"{stem}' in SOURCE, name


def test_every_key_of_a_rollout_is_described(run: Path) -> None:
    names = described("run-folder.md", "## A row of rollouts\n", "\nFrom Python")
    written = {key for path in run.rglob("step_*.jsonl") for row in jsonl.read(path) for key in row}
    assert written - set(names) == set()
    assert set(names) - written <= {"note"}
