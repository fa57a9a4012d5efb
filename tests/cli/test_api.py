"""The Python door: the examples of docs/python.md, and what importing hone costs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hone
from hone.base.settings import UserError
from hone.model.tiny import create
from hone.recipe.sections.model import TinyConfig

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "python.md").read_text(), re.S)
RECIPE = """
name: small
model: {path: tiny, tiny: {vocab_size: 320, hidden_size: 32, layers: 1, heads: 2, kv_heads: 1, mlp_size: 64}}
task: {name: knights}
prompt: {style: raw, system: "", template: "{user}\\n"}
prompts_per_step: 2
samples_per_prompt: 2
reward: well_formed
eval: {problems: 2}
"""


def test_the_example_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    rows = [{"question": f"What is {i} modulo 3?", "answer": str(i % 3)} for i in range(24)]
    space: dict[str, Any] = {"rows": rows}
    exec(BLOCKS[0], space)
    run = space["run"]
    assert list(run.metrics["step"]) == [0, 1]
    assert set(run.metrics["reward/short"]) <= {0.0, 0.25, 0.5, 0.75, 1.0}
    texts = [row["text"] for row in run.samples(step=1)]
    assert len(texts) == 4
    assert space["again"].finished
    assert json.loads((run.folder / "config.resolved.json").read_text())["reward"]["parts"] == {"hone_given:short": 1.0}
    with pytest.raises(UserError, match="no rollouts of step 7; there are steps 0 to 1"):
        run.samples(step=7)
    evaluated = space["evaluated"]
    assert 0.0 <= evaluated.accuracy.value <= 1.0
    assert 0.0 <= evaluated.reward.value <= 1.0
    ungraded = replace(evaluated, models=(replace(evaluated.models[0], graded=False),))
    assert ungraded.accuracy is None, "not 0"


def test_a_loop_of_your_own(tmp_path: Path, capsys: Any) -> None:
    tiny = TinyConfig(vocab_size=320, hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=64)
    create(tmp_path, tiny, ["Zoey is a knight. Oliver is a knave."] * 3, seed=0)
    code = BLOCKS[1]
    assert code.count("\n") <= 40
    space: dict[str, Any] = {"model": str(tmp_path)}
    exec(code, space)
    assert capsys.readouterr().out.count("\n") == 2
    assert space["policy"].updates <= 2


def test_a_folder_without_a_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        hone.load_run(tmp_path)


def test_every_name_is_there_and_importing_hone_loads_nothing_heavy() -> None:
    code = "import sys, hone; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    for name in dir(hone):
        assert getattr(hone, name) is not None or name.startswith("__")
    with pytest.raises(AttributeError, match="it offers"):
        _ = hone.nothing
