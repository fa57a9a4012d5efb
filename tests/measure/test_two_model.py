"""Two-model evaluation by hand, and a short training run with the perplexity reward."""

import json
import math
import types

import numpy as np
import pytest

from hone.measure.two_model import cli_two_model, grade, mean_perplexity, two_model
from hone.model.tiny import create
from hone.recipe.load import load
from hone.recipe.notes import notices
from hone.recipe.sections.model import TinyConfig
from hone.rewards.config import PerplexityReward
from hone.stages.pipeline import run
from hone.tasks.knights.task import KnightsConfig, KnightsTask
from hone.types import Grade, Problem, Turn

CUE = "The final answer is: "


class Sums:
    name, system = "sums", ""

    def grade(self, problem, text):
        answer = text.split("<answer>")[-1].split("</answer>")[0].strip() if "<answer>" in text else None
        return Grade("malformed") if answer is None else Grade("correct" if answer == problem.answer else "wrong")


PROBLEMS = [Problem(f"p{i}", "sums", (), answer) for i, answer in enumerate(("4", "9"))]

#: The answerer believes good contexts and what is given away, and has no idea otherwise.
SURPRISE = {"": 2.0, "good": 0.5, "bad": 3.0, "The answer is 4": 0.1, "The answer is 9": 0.1}


class Answerer:
    renderer = types.SimpleNamespace(
        tokenizer=types.SimpleNamespace(
            decode=lambda ids, **_: "".join(map(chr, ids)),
            encode=lambda text, **_: list(map(ord, text)),
            all_special_ids=[],
            all_special_tokens=[],
            eos_token_id=0,
            pad_token_id=0,
            bos_token_id=None,
        )
    )

    def logprobs(self, problem, contexts, cue, answer):
        assert (cue, answer) == (CUE, problem.answer)
        return [np.array([0.0, -2 * SURPRISE[c]], np.float32) for c in contexts]

    def prompt_ids(self, problem, context, cue):
        return (problem, context)


class Engine:
    def generate(self, prompts, sampling, *, samples, seed, progress=None):
        assert (sampling.temperature, sampling.max_tokens, samples) == (0.0, 13, 1)  # one token and 12
        said = [f" {p.answer}\nrest" if SURPRISE[context] < 1 else " 0" for p, context in prompts]
        return [
            [Turn(np.ones(1, np.int64), np.array([*map(ord, s)]), np.zeros(len(s), np.float32), "stop", 0)]
            for s in said
        ]


def test_conditions_by_hand():
    contexts = [["good", "bad"], ["good", "The answer is 9"]]
    row = two_model(PROBLEMS, contexts, Sums(), Answerer(), Engine(), PerplexityReward())
    # Mean surprise per problem: (0.5 + 3) / 2 = 1.75 and (0.5 + 0.1) / 2 = 0.3.
    assert row["context"]["gold_perplexity"]["value"] == pytest.approx(math.exp((1.75 + 0.3) / 2))
    assert row["none"]["gold_perplexity"]["value"] == pytest.approx(math.exp(2.0))
    assert row["leaked"]["gold_perplexity"]["value"] == pytest.approx(math.exp(0.1))
    assert [row[name]["accuracy"]["value"] for name in ("context", "none", "leaked")] == [0.75, 0.0, 1.0]
    assert row["leak_rate"] == 0.25
    hybrid = [0.5 * max(0, 1 - math.exp(s - 2)) + 0.5 * math.exp(-s) for s in (0.5, 3.0, 0.5, 0.1)]
    assert row["reward"]["value"] == pytest.approx(np.mean(hybrid))
    assert row["by_problem"]["gold_nll"] == pytest.approx([1.75, 0.3])


def test_what_follows_the_cue_is_the_answer():
    sums = PROBLEMS[0]
    assert grade(Sums(), sums, CUE, " 4\nBecause.").verdict == "correct"
    assert grade(Sums(), sums, CUE, "\n\n 5 4").verdict == "wrong"
    assert grade(Sums(), sums, "<answer>", "4</answer>").verdict == "correct"
    assert grade(Sums(), sums, CUE, "").verdict == "wrong"
    knights = KnightsTask(KnightsConfig(people=(2,), train=1))
    problem = knights.problems("train")[0]
    gold = str(problem.reference).split("<answer>")[1]
    assert grade(knights, problem, "<answer>", gold).verdict == "correct"


def test_the_mean_perplexity_is_geometric():
    found = mean_perplexity([0.0, 2.0])
    assert (found.value, found.n) == (pytest.approx(math.e), 2)
    assert found.low <= found.value <= found.high


RECIPE = """
name: small
runs: {runs}
task: {{name: knights, people: [2], train: 12, validation: 0, test: 4, quiz: brief}}
prompt: {{style: raw, system: "", template: "Puzzle: {{user}}\\n"}}
model: {base}
prompts_per_step: 2
samples_per_prompt: 3
steps: 2
sampling: {{max_tokens: 12}}
reward: {{parts: {{perplexity: 1.0}}, perplexity: {{answerer: policy, leak: zero}}}}
eval: {{problems: 4, sampling: {{max_tokens: 12}}}}
"""


def test_a_run_with_the_perplexity_reward_and_its_two_model_evaluation(tmp_path, capsys):
    texts = [str(p.reference) for p in KnightsTask(KnightsConfig(people=(2,), train=4)).problems("train")]
    create(tmp_path / "base", TinyConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=32), texts, 0)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(runs=tmp_path / "runs", base=tmp_path / "base"))
    recipe = load(tmp_path / "recipe.yaml")
    folder = run(recipe)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert row["reward/gold_ppl"] > 1
        assert 0 < row["reward/absolute"] < 1
        assert row["reward/mean"] == pytest.approx(0.5 * row["reward/relative"] + 0.5 * row["reward/absolute"])
        assert row["reward/leak"] == 0
    cli_two_model(recipe, folder / "model", str(tmp_path / "base"), out=tmp_path / "two.json")
    result = json.loads((tmp_path / "two.json").read_text())
    assert result["none"]["gold_perplexity"]["n"] == 4
    assert "gold perplexity" in capsys.readouterr().out


def test_a_server_gets_the_raw_template(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "name: x\ntask: knights\nmodel: tiny\nreward: {parts: {perplexity: 1}, perplexity: "
        "{answerer: 'http://localhost:1/v1', served_model: m}}\n"
    )
    assert any("so they use prompt.template" in line for line in notices(load(tmp_path / "recipe.yaml")))
    assert not any("prompt.template" in line for line in notices(load(tmp_path / "recipe.yaml", ["prompt.style=raw"])))
