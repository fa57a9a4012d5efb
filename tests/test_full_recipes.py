"""The recipes of the reference experiments: every number as published, and a dry run with a model that is on this disk.

`knights-distil-full` is in tests/stages/test_generate.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.base import jsonl
from hone.model import tiny
from hone.preflight.check.run import dry_run
from hone.recipe.explain import explain
from hone.recipe.load import load, presets
from hone.recipe.notes import notices
from hone.recipe.recipe import Pipeline, Recipe
from hone.recipe.schedule import Phases
from hone.recipe.sections.model import TinyConfig

SEVEN_B = "Qwen/Qwen2.5-7B-Instruct-1M"
FULL = sorted(name for name in presets() if name.endswith("-full"))


def only(name: str) -> Recipe:
    recipe = load(name)
    assert isinstance(recipe, Recipe)
    return recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    tiny.create(folder, TinyConfig(hidden_size=16, layers=1, heads=2, kv_heads=1, mlp_size=16), ["2 + 2 = 4"] * 8, 0)
    return folder


@pytest.mark.parametrize("name", FULL)
def test_it_can_be_started(name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """hone train NAME --dry-run, with few problems."""
    task = load(name).stages[0].task
    given = [f"model={model}", "task.test=4", "task.validation=4"]
    if task.name in ("gsm8k", "math", "dataset"):  # otherwise they are on the hub
        rows = [{"question": f"How many legs do {n} cats have?", "answer": f"So #### {4 * n}"} for n in range(40)]
        jsonl.write(tmp_path / "train.jsonl", rows)
        given += [f"task.source={tmp_path}"]
    else:
        given += ["task.train=40"]
    dry_run(load(name, given))
    assert "prompt of" in capsys.readouterr().out
    assert explain(load(name))


@pytest.mark.parametrize("name", FULL)
def test_its_page(name: str) -> None:
    """Says how it is run, on what, and that it was not run."""
    text = " ".join((presets()[name].parent / "README.md").read_text().split())
    assert f"hone train recipes/{name}/recipe.yaml" in text
    for word in ("**Claim.**", "**Settings.**", "**Hardware.**", "Not run here", "**Published result**"):
        assert word in text, word


def test_logic_rl() -> None:
    r = only("logic-rl-full")
    assert (r.model.path, r.algo.advantage, r.optim.lr) == (SEVEN_B, "reinforce_pp", 5e-7)
    assert (r.algo.kl.coef, r.algo.kl.estimator, r.algo.kl.place) == (1e-3, "k1", "reward")
    assert (r.prompts_per_step, r.samples_per_prompt, r.reward.parts) == (8, 8, {"logic_rl": 1.0})
    assert (r.curriculum.kind, r.task.people, r.task.train) == ("sequential", (3, 4, 5, 6, 7), 4500)
    assert r.steps * r.prompts_per_step == 5 * 904, "an epoch is 113 steps of 8 for the 900 puzzles of a level"


def test_knights_7b() -> None:
    recipe = load("knights-7b-full")
    assert isinstance(recipe, Pipeline)
    five, seven = recipe.stages
    phases = Phases(five)
    assert [(p.samples_per_prompt, p.sampling.temperature) for p in (phases.at(99, 0), phases.at(100, 0))] == [
        (8, 1.0),
        (16, 1.3),
    ]
    assert (five.task.people, five.task.train, five.task.validation, five.steps) == ((5,), 900, 100, 380)
    assert (seven.task.people, seven.steps, seven.samples_per_prompt, seven.sampling.temperature) == ((7,), 40, 16, 1.3)
    for stage in (five, seven):
        assert (stage.prompts_per_step, stage.algo.updates_per_rollout, stage.optim.lr) == (128, 4, 1e-6)
        assert (stage.algo.kl.coef, stage.algo.kl.estimator, stage.algo.entropy_coef) == (1e-3, "k3", 1e-3)
        assert (stage.algo.clip_low, stage.algo.clip_high, stage.sampling.max_tokens) == (0.2, 0.2, 2048)
    assert five.model.path == SEVEN_B
    assert seven.model.stage == "five"


def test_direct_rl_is_the_cold_start_of_the_distilled_model_on_another_model() -> None:
    direct, cold = only("knights-direct-full"), load("knights-distil-full").stages[-1]
    assert direct.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    for key in ("task", "reward", "sampling", "algo", "optim", "steps", "prompts_per_step", "samples_per_prompt"):
        assert getattr(direct, key) == getattr(cold, key), key
    assert direct.watch.duplicate_thinking < 1, "dummy thinking is noticed"
    assert direct.watch.length_drop > 0


def test_prolonged() -> None:
    r = only("prolonged-full")
    phases = Phases(r)
    each = [phases.at(0, resets) for resets in range(5)]
    assert [p.sampling.top_p for p in each] == [0.7, 0.9, 1.0, 1.0, 1.0]
    assert [p.sampling.temperature for p in each] == [1.0, 1.0, 1.0, 1.2, 1.2]
    assert [p.sampling.max_tokens for p in each] == [4096] * 4 + [6144]
    assert [p.samples_per_prompt for p in each] == [16] * 4 + [32]
    assert [p.lora and p.lora.rank for p in each] == [32] * 4 + [64]
    assert [p.lora and p.lora.targets for p in each] == [("q_proj", "k_proj")] * 4 + ["all"]
    assert each[4].reward.overlong.buffer == 4096
    assert each[4].reward.parts == {"boxed_numeric": 1.0, "overlong": 1.0}
    assert (r.model.path, r.prompts_per_step, r.optim.lr) == ("Qwen/Qwen2-0.5B", 2, 2e-6)
    assert (r.algo.clip_low, r.algo.clip_high, r.algo.kl.coef) == (0.2, 0.4, 1e-3)
    assert r.algo.refill_rounds
    assert (r.eval.sampling.temperature, r.eval.sampling.top_p, r.eval.problems) == (1.0, 0.7, 100)
    assert any("algo.clip_high has no effect with one" in line for line in notices(r)), (
        "the published clip range never acted; it is said"
    )


def test_prorl_and_dapo() -> None:
    r = only("prorl-full")
    assert (r.prompts_per_step, r.algo.updates_per_rollout, r.samples_per_prompt) == (256, 256 // 64, 16)
    assert (r.algo.clip_low, r.algo.clip_high, r.sampling.temperature, r.optim.lr) == (0.2, 0.4, 1.2, 2e-6)
    assert r.optim.decay == "constant"
    assert r.reset.on_stagnation
    assert r.algo.refill_rounds
    d = only("dapo-full")
    assert (d.prompts_per_step, d.samples_per_prompt, d.optim.lr) == (512, 16, 1e-6)
    assert (d.algo.clip_low, d.algo.clip_high, d.algo.kl.coef, d.algo.reduction) == (0.2, 0.28, 0.0, "token_mean")
    assert (d.reward.overlong.max_tokens, d.reward.overlong.buffer, d.sampling.max_tokens) == (20480, 4096, 20480)
    assert d.reward.parts["outcome"] == 2 * d.reward.parts["overlong"], "1 and -1 are 2 apart; overlong takes 1 at most"


def test_perplexity() -> None:
    r = only("perplexity-full")
    assert (r.task.name, r.lora and r.lora.rank, r.lora and r.lora.scale_alpha) == ("gsm8k", 16, 16)
    assert (r.optim.lr, r.optim.decay, r.optim.betas, r.optim.grad_clip) == (5e-6, "cosine", (0.9, 0.99), 0.1)
    assert r.optim.warmup_steps == int(0.1 * r.steps)
    assert (r.samples_per_prompt, r.sampling.max_tokens) == (6, 1024)
    assert (r.reward.perplexity.kind, r.reward.perplexity.alpha) == ("hybrid", 0.5)


def test_countdown() -> None:
    r = only("countdown-full")
    assert (r.model.path, r.prompts_per_step, r.samples_per_prompt) == ("Qwen/Qwen2.5-3B-Instruct", 8, 8)
    assert (r.algo.updates_per_rollout, r.optim.lr, r.algo.entropy_coef) == (4, 1e-6, 1e-3)
    assert (r.algo.clip_low, r.algo.clip_high, r.sampling.max_tokens) == (0.2, 0.2, 896)
    assert (r.sampling.temperature, r.checkpoint.every) == (1.0, 20)


def test_linear_algebra() -> None:
    r = only("linear-algebra-full")
    assert (r.task.rungs, r.task.tolerance) == (("near_identity_2", "inverse_2", "inverse_3"), 0.1)
    assert (r.reward.parts, r.reward.linear_algebra.thinking) == ({"linear_algebra": 1.0}, 0.0)
    assert r.curriculum.steps_per_level == 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_it_fits_devices_of_80_gb(name: str, tmp_path: Path) -> None:
    from hone.preflight.plan import estimate
    from hone.preflight.plan.memory import GIB

    given = ["task.test=4", "task.validation=4"]
    if load(name).stages[0].task.name in ("gsm8k", "math", "dataset"):
        rows = [{"question": f"How many legs do {n} cats have?", "answer": f"So #### {4 * n}"} for n in range(40)]
        jsonl.write(tmp_path / "train.jsonl", rows)
        given += [f"task.source={tmp_path}"]
    else:
        given += ["task.train=40"]
    peak = estimate(load(name, given)).peak_bytes / GIB
    page = " ".join((presets()[name].parent / "README.md").read_text().split())
    assert f"predicts {peak:.0f} GiB" in page
    assert peak < 80
