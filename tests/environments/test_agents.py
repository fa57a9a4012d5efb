"""Agents of others as programs: each trains a tiny model, and every token of every call is compared.

python -m venv /tmp/agents && /tmp/agents/bin/pip install openai openai-agents "smolagents[openai]" mini-swe-agent
HONE_AGENTS_PYTHON=/tmp/agents/bin/python pytest -n 0 -m agents tests/environments/test_agents.py
"""

import json
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from hone.base import jsonl
from hone.environments.sandbox import has_bubblewrap
from tests.environments.templates import tokenizer_of
from tests.environments.trained import Ears, check_run, recipe_of

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = pytest.mark.agents


def python(library: str) -> str:
    """The interpreter with the library."""
    name = f"HONE_{library}_PYTHON"
    if name not in os.environ:
        pytest.skip(f"{name} is not set")
    return os.environ[name]


@pytest.mark.parametrize("name, fewest", [("openai_client", 2), ("openai_agents", 2), ("smol", 2), ("mini_swe", 3)])
def test_an_agent_trains_and_every_token_is_the_one_that_was_sampled(name, fewest, tmp_path, monkeypatch):
    environment = {
        "program": ["python", str(PROGRAMS / f"{name}.py")],
        "python": python("AGENTS"),
        "runtime": "bwrap" if has_bubblewrap() else "process",
        "reward": "file",
        "timeout": 120,
    }
    ears = Ears(monkeypatch)
    run = check_run(recipe_of(tmp_path, environment), ears)
    for row in jsonl.read(run / "metrics.jsonl"):
        assert row["episode/turns"] >= fewest
        assert row["episode/end/done"] == 1.0, [
            r.get("note") for r in jsonl.read(run / "rollouts" / "step_000000.jsonl")
        ]
    assert len(ears.answers) >= 3 * 2 * fewest


def test_a_taskset_of_verifiers_trains(tmp_path, monkeypatch):
    rows = [{"prompt": f"Task {i}.", "idx": i} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {
        "name": "verifiers:counting",
        "python": python("VERIFIERS"),
        "runtime": "bwrap" if has_bubblewrap() else "process",
        "variables": {"PYTHONPATH": str(PROGRAMS / "tasksets")},
        "readable": [str(PROGRAMS / "tasksets")],
        "timeout": 250,
    }
    ears = Ears(monkeypatch)
    task = {"name": "dataset", "grading": "none", "source": str(tmp_path / "rows.jsonl"), "test": 2, "validation": 2}
    recipe = recipe_of(tmp_path, environment, task=task)
    run = check_run(recipe, ears)
    for row in jsonl.read(run / "rollouts" / "step_000000.jsonl"):
        (step,) = row["steps"]
        letter = "abcdefghijkl"[int(row["prompt"].split("Task ")[1].split(".")[0])]
        expected = {"letters": row["total"], "length": len(step["message"]["content"])}
        assert {name: value for name, value in step["parts"].items() if name != "cut"} == expected
        assert row["total"] == step["message"]["content"].count(letter)


def test_a_taskset_that_comes_with_verifiers_trains(tmp_path, monkeypatch):
    """A game of textarena, several turns against its engine, with words made here: pip install 'verifiers[ta]'."""
    interpreter, words = python("VERIFIERS"), tmp_path / "nltk" / "corpora" / "words"
    if subprocess.run([interpreter, "-c", "import textarena"], capture_output=True, check=False).returncode:
        pytest.skip("HONE_VERIFIERS_PYTHON has no textarena")
    words.mkdir(parents=True)
    for name in ("en", "en-basic", "README"):
        (words / name).write_text("apple\nbanana\ncherry\norange\nlemon\nmelon\ngrape\n")
    environment = {
        "name": "verifiers:textarena?game=Hangman-v0",
        "python": interpreter,
        "runtime": "bwrap" if has_bubblewrap() else "process",
        "variables": {"NLTK_DATA": str(tmp_path / "nltk")},
        "readable": [str(tmp_path / "nltk")],
        "timeout": 250,
        "max_turns": 6,
    }
    rows = [{"prompt": f"Game {i}.", "idx": i} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"name": "dataset", "grading": "none", "source": str(tmp_path / "rows.jsonl"), "test": 2, "validation": 2}
    run = check_run(recipe_of(tmp_path, environment, task=task), Ears(monkeypatch))
    for row in jsonl.read(run / "rollouts" / "step_000000.jsonl"):
        assert len(row["steps"]) > 1
        assert "You are playing Hangman" in row["prompt"]


def test_a_session_of_openenv_trains(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [python("OPENENV"), str(PROGRAMS / "openenv_server.py"), str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(f"http://127.0.0.1:{port}/schema")
        environment = {"name": f"openenv:http://127.0.0.1:{port}", "python": python("OPENENV"), "timeout": 60}
        ears = Ears(monkeypatch)
        run = check_run(recipe_of(tmp_path, environment), ears)
        for row in jsonl.read(run / "rollouts" / "step_000000.jsonl"):
            said = [step["message"]["content"] for step in row["steps"]]
            assert len(said) == 3
            assert row["total"] == sum(text.count("e") for text in said)
            assert row["steps"][0]["replies"][0]["content"] == f"{said[0].count('e')} letters"
            assert "Seed " in row["prompt"]
    finally:
        server.kill()


def test_a_harbor_task_trains(tmp_path, monkeypatch):
    folder = tmp_path / "task"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text("[verifier]\ntimeout_sec = 20.0\n")
    (folder / "instruction.md").write_text("Say something.")
    (folder / "tests" / "test.sh").write_text("date +%N | cut -c 1 > /logs/verifier/reward.txt")  # anything that varies
    ears = Ears(monkeypatch)
    run = check_run(recipe_of(tmp_path, f"harbor:{folder}"), ears)
    texts = [tokenizer_of("Qwen2.5").decode(turn.prompt_ids.tolist()) for _, turn in ears.turns[-4:]]
    assert all("Say something." in text and '"bash"' in text for text in texts)
    totals = {row["total"] for step in range(3) for row in jsonl.read(run / "rollouts" / f"step_{step:06d}.jsonl")}
    assert len(totals) > 1


def _wait(url: str) -> None:
    for _ in range(240):
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(url)
