"""Notes: of every setting that has no effect one line, of defaults none, and nothing twice."""

import pytest

from hone.recipe.load import load, presets
from hone.recipe.notes import notices
from hone.recipe.recipe import Recipe
from hone.rewards import REWARDS
from hone.rewards.config import RewardConfig

ON_POLICY = {"updates_per_rollout": 1}
OFF_POLICY = {"updates_per_rollout": 2}


def recipe(**settings) -> Recipe:
    return Recipe.model_validate({"name": "x", "task": {"name": "knights"}, **settings})


def algo(**settings) -> dict:
    return {"algo": settings}


@pytest.mark.parametrize("stage", ["sft", "rl", "generate", "distil"])
def test_defaults_have_no_notes(stage):
    assert notices(recipe(stage=stage, **({"teacher": "m"} if stage == "distil" else {}))) == []


@pytest.mark.parametrize("name", presets())
def test_no_preset_says_anything_twice(name):
    lines = notices(load(name, check_files=False))
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"steps": 5, "watch": {"max_skipped": 1}}, None),
        ({**algo(kl={"coef": 0.1, "estimator": "k2", "place": "reward"}), "watch": {"kl": 0.5}}, None),
        (algo(kl={"estimator": "k3", "place": "loss"}, correction={"cap": 2.0}), None),  # as by default
        (algo(correction={"kind": "tis", "cap": 3.0}, dual_clip=3.0), None),
        (algo(advantage="gae", value={"clip": 0.5}), None),
        (algo(value={"lr": 0.1}), "algo.value has no effect with advantage grpo"),
        (algo(loss="cispo", dual_clip=3.0), "algo.dual_clip has no effect with loss cispo, whose weights are bounded"),
        (algo(loss="cispo", clip_low=1.0), "algo.clip_low 1: no ratio is below 0, so there is no lower bound,"),
        (algo(kl={"estimator": "k1"}), "algo.kl.estimator has no effect while kl.coef is 0"),
        (
            algo(kl={"estimator": "k1", "place": "reward"}),
            "algo.kl.estimator and algo.kl.place have no effect while kl.coef is 0",
        ),
        (algo(kl={"coef": 0.1, "estimator": "k1"}), "algo.kl.estimator k1 in the loss: on-policy its gradient"),
        (algo(correction={"cap": 3.0}), "algo.correction.cap has no effect while correction.kind is none"),
        ({"steps": 5, "optim": {"warmup_steps": 10}}, "optim.warmup_steps 10: the stage has at most 10 updates"),
        ({"steps": 5, "optim": {"warmup_steps": 9}}, None),
        ({"optim": {"lr": 1000.0}}, "optim.lr 1000: each update of AdamW moves every weight by up to this much"),
        ({"optim": {"lr": 0.02}}, None),
        ({"layers": {"count": 2}}, "layers.count has no effect with layers.train all"),
        ({"steps": 5, "eval": {"every": 6}}, "eval.every 6 is more than steps (5)"),
        ({"steps": 5, "eval": {"every": 5}}, None),
        ({"watch": {"kl": 0.5}}, "watch.kl has no effect while algo.kl.coef is 0"),
        ({"watch": {"clip_fraction": 0.5}}, None),
        ({"steps": 9, "watch": {"window": 4}}, None),
        ({"steps": 7, "watch": {"window": 4}}, "watch.window 4: changes since the start show after two windows"),
        ({"reset": {"limit": 2}}, "reset.limit has no effect without reset.on_stagnation"),
        (
            {"prompt": {"style": "raw", "template_args": {"a": 1}}},
            "prompt.template_args has no effect with prompt.style",
        ),
        ({"model": {"path": "o/m", "tiny": {"layers": 2}}}, "model.tiny has no effect: model.path is o/m"),
    ],
)
def test_settings_of_the_loop(settings, expected):
    settings = {**settings, "algo": {**OFF_POLICY, **settings.get("algo", {})}}
    lines = notices(recipe(**settings))
    assert [line.startswith(expected) for line in lines] == [True] if expected else lines == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (algo(clip_high=0.28), "algo.clip_high has no effect with one update per rollout: every token is on-policy"),
        (algo(clip_low=0.1, clip_high=0.3), "algo.clip_low and algo.clip_high have no effect with one update"),
        (algo(loss="gspo"), "algo.loss gspo has the same gradient as clipped with one update per rollout"),
        (algo(advantage="gae", value={"lr": 0.1}), None),
        (algo(advantage="gae", value={"clip": None}), None),
        (algo(advantage="gae", value={"clip": 0.5}), "algo.value.clip has no effect with one update"),
        ({"watch": {"clip_fraction": 0.5}}, "watch.clip_fraction has no effect with one update per rollout"),
    ],
)
def test_with_one_update_per_rollout(settings, expected):
    lines = notices(recipe(**settings))
    assert [line.startswith(expected) for line in lines] == [True] if expected else lines == []


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ({"parts": {"outcome": 1.0, "overlong": 1.0}, "overlong": {"max_tokens": 256}}, None),
        (
            {"parts": {"outcome": 1.0, "overlong": 1.0}, "overlong": {"max_tokens": 320, "buffer": 64}},
            "reward.parts.overlong has no effect: it begins above 256 tokens",
        ),
        ({"countdown": {"wrong": 0.2}}, "reward.countdown has no effect: reward.parts does not name countdown"),
        ({"thinking": {"dummy": 2.0}}, "reward.thinking has no effect: reward.parts does not name thinking"),
        (
            {"perplexity": {"kind": "absolute"}},
            "reward.perplexity has no effect: reward.parts does not name perplexity",
        ),
        (
            {"judge": {"url": "https://x.org/v1", "model": "m"}},
            "reward.judge has no effect: reward.parts does not name",
        ),
        ({"functions": {"isolate": True}}, "reward.functions has no effect: reward.parts names no function"),
        (
            {"parts": {"a:b": 1.0}, "functions": {"workers": 3}},
            "reward.functions.workers has no effect without reward.functions.isolate: true",
        ),
        ({"parts": {"a:b": 1.0}, "functions": {"isolate": True, "workers": 3}}, None),
        (
            {"parts": {"perplexity": 1.0}, "perplexity": {"kind": "absolute", "alpha": 0.3}},
            "reward.perplexity.alpha has no effect with kind absolute",
        ),
        (
            {"parts": {"perplexity": 1.0}, "perplexity": {"served_model": "x"}},
            "reward.perplexity.served_model has no effect: answerer is policy",
        ),
    ],
)
def test_settings_of_rewards(reward, expected):
    lines = notices(recipe(reward=reward))
    assert [line.startswith(expected) for line in lines] == [True] if expected else lines == []


def test_settings_of_a_reward_have_its_name():
    """So that the note above is made for every reward with settings."""
    assert set(RewardConfig.model_fields) - {"parts", "functions"} <= set(REWARDS)


def test_settings_of_the_linear_algebra_reward():
    settings = {"parts": {"linear_algebra": 1.0}, "linear_algebra": {"thinking_chars": 10}}
    lines = notices(recipe(task={"name": "linear_algebra"}, reward=settings))
    assert lines == [
        "reward.linear_algebra.thinking_chars has no effect while reward.linear_algebra.thinking is 0; set both"
    ]


@pytest.mark.parametrize(
    "key, value", [("port", 8000), ("python", "x"), ("arguments", ["--x"]), ("environment", {"A": "b"})]
)
def test_a_server_that_already_runs_takes_no_settings_of_its_process(key, value):
    rollout = {"engine": "vllm", "vllm": {"url": "http://x:1", key: value}}
    assert notices(recipe(rollout=rollout)) == [
        f"rollout.vllm.{key} has no effect on the server at http://x:1, which already runs"
    ]
    assert notices(recipe(rollout={"engine": "vllm", "vllm": {key: value}})) == []
    assert notices(recipe(rollout={"engine": "vllm", "vllm": {"in_process": True, "port": 1}})) == [
        "rollout.vllm.port has no effect with rollout.vllm.in_process, which starts no server"
    ]


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"name": "knights", "operators": ["<=>"], "width": 3}, "task.width has no effect without the operators"),
        ({"name": "knights", "train_file": "x.jsonl", "train": 5}, "task.train has no effect beside train_file"),
        ({"name": "countdown", "test_file": "x.jsonl", "test": 5}, "task.test has no effect beside test_file"),
        ({"name": "dataset", "train_file": "a", "subset": "x"}, "task.subset has no effect without source"),
    ],
)
def test_settings_of_tasks(task, expected):
    (line,) = notices(recipe(task=task))
    assert line.startswith(expected)


def test_settings_of_supervised_stages():
    assert notices(recipe(stage="sft", watch={"max_skipped": 5})) == []
    assert notices(recipe(stage="sft", watch={"kl": 0.5})) == [
        "watch: only max_skipped has an effect in a stage of kind sft"
    ]
    assert notices(recipe(stage="sft", sft={"data": "x", "examples": 9})) == [
        "sft.examples has no effect with sft.data, whose rows are all used"
    ]
    assert notices(recipe(stage="sft", sft={"validation": 0.2})) == [
        "sft.validation has no effect without sft.data: the task has a validation split"
    ]


def test_settings_of_distillation():
    found = notices(recipe(stage="distil", teacher="m", algo={"advantage": "rloo", "value": {"lr": 0.1}}))
    assert found == [f"algo.{key} has no effect in a stage of kind distil" for key in ("advantage", "value")]
