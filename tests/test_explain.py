"""What is printed is what is computed."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch

from hone import explain
from hone.algo.config import AlgoConfig, KLConfig
from hone.algo.kl import kl_estimate
from hone.algo.losses import LOSSES
from hone.recipe import Recipe, notices
from hone.tasks.knights import KnightsConfig


def recipe(**settings: Any) -> Recipe:
    return Recipe.model_validate({"name": "x", "task": KnightsConfig(name="knights"), **settings})


def lines(text: str) -> dict[str, str]:
    """Label -> text of the one section."""
    found: dict[str, str] = {}
    label = ""
    for line in text.splitlines()[1:]:
        label = line[2:14].strip() or label
        found[label] = f"{found.get(label, '')} {line[14:].strip()}".strip()
    return found


@pytest.mark.parametrize(
    ("table", "model", "field"),
    [
        (explain.ADVANTAGES, AlgoConfig, "advantage"),
        (explain.LOSSES, AlgoConfig, "loss"),
        (explain.RATIOS, AlgoConfig, "loss"),
        (explain.REDUCTIONS, AlgoConfig, "reduction"),
        (explain.ESTIMATORS, KLConfig, "estimator"),
    ],
)
def test_every_choice_has_its_formula(table: dict[str, str], model: Any, field: str) -> None:
    assert table.keys() == set(get_args(model.model_fields[field].annotation))


def test_the_demo_word_for_word() -> None:
    said = lines(explain.explain(recipe(steps=50, prompts_per_step=32, samples_per_prompt=8)))
    assert said["update"] == "1 per rollout, each on 32 prompts x 8 answers; 50 in all"
    assert said["advantage"] == "A_i = (R_i - mean R) / (std R + 1e-6), over the 8 answers to one prompt; std over 7"
    assert said["loss"] == "-min(rho_t A_t, clip(rho_t, 0.8, 1.2) A_t)"
    assert said["clip"].startswith("never acts")
    assert said["passes"].endswith(": none")


def test_everything_at_once() -> None:
    algo = {
        "advantage": "gae",
        "loss": "gspo",
        "clip_high": 0.28,
        "updates_per_rollout": 4,
        "kl": {"coef": 1e-3, "estimator": "k1"},
        "entropy_coef": 1e-3,
        "correction": {"kind": "tis", "cap": 2},
        "mask_truncated": True,
    }
    said = lines(explain.explain(recipe(algo=algo, steps=10, prompts_per_step=8)))
    assert said["loss"] == "min(w_t, 2) x -min(s A_t, clip(s, 0.8, 1.28) A_t) + 0.001 KL_t - 0.001 H_t"
    assert "KL_t = log(p_t / ref_t) (k1)" in said["where"]
    assert said["update"] == "4 per rollout, each on 2 of 8 prompts x 8 answers; 40 in all"
    assert said["clip"].startswith("from the second of 4 updates on: a sequence's ratio counts within [0.8, 1.28]")
    assert "cut at the limit" in said["counted"]
    for text in ("old log-probs", "second copy of the model", "values"):
        assert text in said["passes"]
    assert "within 0.2 of V_old" in said["value"]


@pytest.mark.parametrize("loss", LOSSES)
def test_the_range_printed_is_the_range_in_which_a_ratio_counts(loss: str) -> None:
    """Just inside both ends the loss follows the ratio, just outside it does not."""
    algo = AlgoConfig(loss=loss, clip_low=0.2, clip_high=0.28, updates_per_rollout=2)  # type: ignore[arg-type]
    low, high = explain.clip_range(algo)

    def weight(ratio: float, advantage: float) -> float:
        """The gradient with respect to the log-prob: of a token that counts, ratio times -advantage."""
        logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
        out = LOSSES[loss](
            logprobs,
            torch.zeros(1, dtype=torch.float64),
            torch.tensor([advantage], dtype=torch.float64),
            torch.zeros(1, dtype=torch.int64),
            clip_low=0.2,
            clip_high=0.28,
        )
        (gradient,) = torch.autograd.grad(out.loss.sum(), logprobs)
        return -float(gradient) / advantage

    for inside, outside, advantage, end in ((high - 0.01, high + 0.01, 1.0, high), (low + 0.01, low - 0.01, -1.0, low)):
        assert weight(inside, advantage) == pytest.approx(inside)
        assert weight(outside, advantage) == pytest.approx(end if loss == "cispo" else 0.0)


@pytest.mark.parametrize("name", explain.ESTIMATORS)
def test_the_estimators_are_the_formulas_printed(name: str) -> None:
    p, ref = torch.tensor([0.3, 0.9]), torch.tensor([0.6, 0.2])
    formula = explain.ESTIMATORS[name].replace("^", "**").replace("_t", "")
    got = eval(formula, {"p": p, "ref": ref, "log": torch.log})
    torch.testing.assert_close(kl_estimate(p.log(), ref.log(), name), got)


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"algo": {"updates_per_rollout": 2, "kl": {"estimator": "k1"}}}, "algo.kl.estimator: no effect while kl.coef"),
        ({"algo": {"updates_per_rollout": 2, "correction": {"cap": 3.0}}}, "algo.correction.cap: no effect while"),
        ({"algo": {"updates_per_rollout": 2}, "steps": 5, "optim": {"warmup_steps": 10}}, "the 10 updates end before"),
        ({"algo": {"updates_per_rollout": 2}, "steps": 5, "eval": {"every": 6}}, "eval.every: 6 is more than steps, 5"),
        ({"algo": {"updates_per_rollout": 2}}, None),
    ],
)
def test_what_has_no_effect_is_said(settings: dict[str, Any], note: str | None) -> None:
    found = notices(recipe(**settings))
    assert [note in line for line in found] == [True] if note else found == []
    if note:
        assert f"note: {found[0]}" in explain.explain(recipe(**settings))
