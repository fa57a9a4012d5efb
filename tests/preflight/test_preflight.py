"""The preflight: what makes a run impossible is found by `train`, `train --dry-run` and `check` alike, before anything
is created, moved or sampled."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hone.base import jsonl
from hone.base.settings import UserError
from hone.cli.app import app
from hone.environments.base import Environment
from hone.environments.play import Episodes
from hone.preflight.check import preflight
from hone.preflight.check.episodes import _shown
from hone.recipe.load import load
from hone.stages import pipeline
from hone.tasks import keeping, make_task
from hone.tasks.knights.task import KnightsConfig
from hone.types import Problem

RECIPE = """
name: small
model: {path: tiny, tiny: {vocab_size: 300, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, mlp_size: 64}}
task: {name: knights, people: [2], quiz: brief, names: 4, train: 20, validation: 5, test: 5, repeats: true}
prompt: {style: raw, system: "", template: "{user}\\n"}
prompts_per_step: 2
samples_per_prompt: 4
steps: 2
sampling: {max_tokens: 8}
eval: {problems: 4}
"""
FUNCTIONS = """
import random
def none(completions, **kwargs):
    return [None] * len(completions)
def short(completions, **kwargs):
    return [1.0]
def text(completions, **kwargs):
    return ["0.5"] * len(completions)
def raises(completions, **kwargs):
    raise KeyError("solution")
def length(completions, **kwargs):
    random.random()
    return [float(len(completion) % 7) for completion in completions]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    Path("mine.py").write_text(FUNCTIONS)
    Path("odd.jsonl").write_text('{"other": 1}\n')
    return tmp_path


def outcome(verb: list[str], *overrides: str) -> tuple[int, str]:
    """(exit code, all that was said) of `hone VERB recipe.yaml OVERRIDES`."""
    done = CliRunner().invoke(app, [verb[0], "recipe.yaml", *overrides, *verb[1:]])
    if isinstance(done.exception, UserError):
        return done.exception.exit_code, done.output + str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


VERBS = {"train": ["train"], "dry run": ["train", "--dry-run"], "check": ["check", "--no-model"]}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "override, message",
    [
        ("runs=mine.py", "mine.py is a file, and the run folder would be"),
        ("rollout.engine=sglang", "has no sglang; install it there"),
        ("task.test=0", "the test split is empty; give it a size"),
        ("task.train=0", "the train split is empty; give it a size, e.g. task.train=1000"),
        ("curriculum.kind=adaptive", "the training problems have only one level; use uniform"),
        ("sampling.max_tokens=2040", "are more than the 2048 positions of the model; set sampling.max_tokens to"),
        ("rollout.engine=vllm rollout.vllm.url=http://127.0.0.1:9", "no usable server"),
        ("stage=sft sft.data=odd.jsonl", "odd.jsonl"),
        ("stage=distil teacher=no/where", "no/where"),
    ],
)
def test_what_a_run_cannot_do_is_said_by_all_three(folder, verb, override, message):
    if override.startswith("stage=sft"):
        lines = RECIPE.splitlines(keepends=True)
        own = [line for line in lines if not line.startswith(("prompts_per_step", "samples_per_prompt", "steps"))]
        Path("recipe.yaml").write_text("".join(own))
    code, said = outcome(VERBS[verb], *override.split())
    assert message in " ".join(said.split())
    assert code == (2 if verb == "train" else 1)
    assert not Path("runs").exists()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "function, message",
    [
        (
            "none",
            "leave every sample out: 42 of 42 samples have no reward and were left out: 42 x verifier_error (none:",
        ),
        ("none", "Give a number, such as 0, for unreadable answers"),
        ("raises", "The function raises an error; fix it"),
        ("short", "mine.py:short: gave 1 rewards for 7 completions"),
        ("text", "mine.py:text: gave str '0.5'; a reward is a number, or None"),
    ],
)
def test_a_faulty_reward_is_found_before_anything_starts(folder, verb, function, message):
    code, said = outcome(VERBS[verb], f"reward.parts={{mine.py:{function}: 1.0}}")
    assert message in said
    assert code == 2
    assert not Path("runs").exists()


def test_on_resume_the_stages_that_are_complete_are_passed_over(folder):
    stages = "stages:\n- {name: warmup, stage: sft, sft: {data: odd.jsonl}}\n- name: rl\n  stage: rl\n"
    head, own = RECIPE.split("prompts_per_step")
    Path("two.yaml").write_text(
        head + stages + "".join(f"  {line}\n" for line in f"prompts_per_step{own}".splitlines())
    )
    Path("runs/small/warmup/model").mkdir(parents=True)
    with pytest.raises(UserError, match=r"examples: .*odd\.jsonl"):
        pipeline.checked(load("two.yaml"))
    findings = pipeline.checked(load("two.yaml"), resume=True)
    assert [finding["level"] for finding in findings if finding["name"] == "examples"] == []


def test_each_check_stands_in_the_list_once():
    assert len({check.name for check in preflight.CHECKS}) == len({check.run for check in preflight.CHECKS}) == 16


def test_an_earlier_run_stays_where_it_is(folder):
    Path("runs/small").mkdir(parents=True)
    Path("runs/small/results.json").write_text("{}")
    assert outcome(["train"], "rollout.engine=sglang")[0] == 2
    assert [path.name for path in Path("runs").iterdir()] == ["small"]


def test_a_reward_that_is_no_use_is_a_failure_of_check_and_dry_run_and_said_by_train(folder, capsys):
    part = "reward.parts={mine.py:length: 1.0}"
    for verb in ("dry run", "check"):
        code, said = outcome(VERBS[verb], part)
        assert (code, "FAIL  hack" in said) == (1, True)
    code, said = outcome(["train"], part)
    assert code == 0
    assert "FAIL  hack" in said
    kept = json.loads(Path("runs/small/preflight.json").read_text())
    assert {"fail", "pass"} <= {finding["level"] for finding in kept}
    evals = jsonl.read(Path("runs/small/evals.jsonl"))
    assert all(0.0 <= row["reward/mean"] == row["reward/length"] <= 6.0 for row in evals)
    assert all(row["truncation_rate"] == 1.0 for row in evals)
    assert all(row["sampling"]["max_tokens"] == 8 for row in evals)  # as in training


def test_a_task_that_grades_nothing_has_no_accuracy_anywhere(folder):
    rows = [{"question": f"Write a word about {n} and {n * 7}", "answer": str(n)} for n in range(30)]
    jsonl.write(Path("rows.jsonl"), rows)
    task = "task={name: dataset, source: rows.jsonl, grading: none, validation: 3, test: 4}"
    Path("recipe.yaml").write_text(RECIPE.replace(RECIPE.splitlines()[3] + "\n", ""))
    best = ["checkpoint={every: 1, keep_best: 1}", "eval.every=1"]
    code, said = outcome(["train"], task, "reward.parts={mine.py:length: 1.0}", *best)
    assert code == 0
    assert "accuracy" not in said
    assert "correct 0." not in said
    assert "before: reward " in said
    folder = Path("runs/small")
    rows = jsonl.read(folder / "evals.jsonl") + jsonl.read(folder / "metrics.jsonl")
    assert rows
    assert not any("accuracy" in row or "reward/outcome" in row for row in rows)
    assert "| accuracy" not in (folder / "model" / "README.md").read_text()
    chosen = json.loads((folder / "results.json").read_text())["best"]
    validated = {row["step"]: row["reward"]["value"] for row in rows if row.get("label") == "validation"}
    assert chosen["reward"]["value"] == max(value for step, value in validated.items() if step > 0)
    code, said = outcome(
        ["check", "--no-model"], task, "reward.parts={mine.py:length: 1.0}", "curriculum.kind=adaptive"
    )
    assert code == 1
    assert "curriculum.kind: adaptive: needs an accuracy" in said
    said = outcome(["check", "--no-model"], task, "reward.parts={mine.py:length: 1.0}", *best)[1]
    assert "keep_best" not in said  # by the mean reward
    changed = "schedule=[{at: 1, reward: {parts: {mine.py:length: 2.0}}}]"
    for other in ("reward.parts={outcome: 1.0}", "reward.parts={perplexity: 1.0}", changed):
        parts = [other] if other != changed else ["reward.parts={mine.py:length: 1.0}", changed]
        code, said = outcome(["check", "--no-model"], task, *parts, *best)
        assert code != 0, other
        assert "checkpoint.keep_best: needs an accuracy" in said, other


def test_the_order_is_from_cheap_to_expensive():
    costs = ["recipe", "data", "tokenizer", "answers", "model"]
    before_answers = [costs.index(c.needs) for c in preflight.CHECKS if c.blocking]
    assert before_answers == sorted(before_answers)


def test_problems_are_made_once_within_keeping_and_anew_without():
    config = KnightsConfig(people=(2,), train=4)
    with keeping() as kept:
        assert make_task(config, 1) is make_task(config, 1)
        assert make_task(config, 1) is not make_task(config, 2)
        with keeping():
            assert len(kept) == 2
    assert make_task(config, 1) is not make_task(config, 1)


def test_a_dry_run_says_how_few_test_problems_there_are_and_names_long_answers_once(folder):
    code, said = outcome(VERBS["dry run"], "eval.problems=50", "sampling.max_tokens=2040")
    assert "evaluation on 5 test problems (eval.problems is 50, but there are no more)" in said
    assert "an accuracy near 50% is known to ±44 percentage points" in said
    faults = [line for line in said.splitlines() if line.startswith("FAIL")]
    assert code == 1
    assert len(faults) == 1
    assert "set sampling.max_tokens to " in faults[0]
    assert "set eval.sampling.max_tokens to " in faults[0]


def test_an_environment_whose_tools_raise_is_closed():
    class Broken(Environment):
        closed = False

        @property
        def tools(self):
            raise RuntimeError("no tools")

        def reset(self, problem, seed):
            return None

        def close(self):
            self.closed = True

    environment = Broken()
    problem = Problem("p", "t", ({"role": "user", "content": "?"},), None)
    assert list(_shown(Episodes(None, lambda: environment), problem)) == []
    assert environment.closed
