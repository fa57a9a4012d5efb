"""The recipes for pretrained models on GSM8K: by prediction they fit their GPU; a dry run with a local model passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.base import jsonl
from hone.model import tiny
from hone.preflight.check.run import dry_run
from hone.preflight.plan import estimate
from hone.preflight.plan.memory import GIB
from hone.recipe.load import load, presets
from hone.recipe.recipe import Recipe
from hone.recipe.sections.model import TinyConfig

NAMES = ("gsm8k-qwen2.5-0.5b", "gsm8k-qwen3-0.6b")
FILES = (
    ("recipe.yaml", 22.4),
    pytest.param("lora.yaml", 22.4, marks=pytest.mark.slow),
    pytest.param("80gb.yaml", 79.0, marks=pytest.mark.slow),
)
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}{% if enable_thinking %}<think>{% endif %}"


def recipe(name: str, file: str, *overrides: str) -> Recipe:
    loaded = load(presets()[name].parent / file, overrides)
    assert isinstance(loaded, Recipe)
    return loaded


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("file, gib", FILES)
def test_the_prediction_on_the_page(name: str, file: str, gib: float) -> None:
    predicted = estimate(recipe(name, file), device="cuda", total_bytes=int(gib * GIB)).peak_bytes / GIB
    assert predicted < 0.9 * gib
    page = (presets()[name].parent / "README.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| `{file}` |"))
    assert float(row.split("|")[3]) == pytest.approx(predicted, rel=0.02)
    assert "Not run here" in page


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = TinyConfig(hidden_size=16, layers=1, heads=2, kv_heads=1, mlp_size=16)
    tiny.create(tmp_path / "model", small, ["2 + 2 = 4"] * 8, 0)
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    rows = [{"question": f"How many legs do {n} cats have?", "answer": f"So #### {4 * n}"} for n in range(40)]
    (tmp_path / "rows").mkdir()
    jsonl.write(tmp_path / "rows" / "train.jsonl", rows)
    given = [f"model={tmp_path / 'model'}", f"task.source={tmp_path / 'rows'}", "task.test=4", "task.validation=4"]
    dry_run(recipe(name, "lora.yaml", *given))
    assert "prompt of" in capsys.readouterr().out
