"""The commands of the tutorials, run in the order in which a reader meets them; slow, since the demo is among them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
#: In this order: later ones use what earlier ones made.
RUN = (
    "first-run",
    "your-data",
    "lora",
    "perplexity",
    "prolonged",
    "distillation",
    "environments",
    "many-gpus",
    "reading-a-run",
)
BLOCK = re.compile(r"```(bash|python|yaml)\n(.*?)```", re.S)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_commands_of_the_tutorials(tmp_path: Path) -> None:
    """Blocks in bash are run; blocks that begin with `# NAME` are written to that file first."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name in RUN:
        for kind, text in BLOCK.findall((TUTORIALS / f"{name}.md").read_text(encoding="utf-8")):
            if kind == "bash":
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", text],
                    cwd=tmp_path,
                    env=environment,
                    capture_output=True,
                    text=True,
                )
                assert done.returncode == 0, f"{name}.md: {text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
            elif match := re.match(r"# ([\w.-]+)(?:\n|:)", text):
                (tmp_path / match[1]).write_text(text, encoding="utf-8")
    steps = {
        "puzzles": 30,
        "lora": 10,
        "perplexity": 4,
        "prolonged": 8,
        "distilled/rl": 2,
        "on-policy": 4,
        "asking/rl": 4,
    }
    for run, count in steps.items():
        rows = (tmp_path / "runs" / run / "metrics.jsonl").read_text().splitlines()
        assert len(rows) == count, run


def test_every_tutorial_is_run() -> None:
    assert {path.stem for path in TUTORIALS.glob("*.md")} == set(RUN)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(TUTORIALS / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    client = NotebookClient(notebook, timeout=1400, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "6 steps, right and short" in printed
