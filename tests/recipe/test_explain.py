"""What is printed is what is computed: the tests evaluate the printed formulas and compare them with `hone.learn`."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from hone.base.settings import ConfigError
from hone.learn.advantages import gae_advantages, group_advantages
from hone.learn.kl import kl_estimate
from hone.learn.losses import LOSSES, Clip, value_loss
from hone.learn.objective import objective
from hone.learn.reduce import token_weights
from hone.recipe import explain, explain_formulas
from hone.recipe.load import load
from hone.recipe.recipe import Pipeline, Recipe
from hone.recipe.sections.algo import AlgoConfig, CorrectionConfig, KLConfig
from hone.recipe.sections.optim import OptimConfig
from hone.types import Block, MicroBatch

ROOT = Path(__file__).resolve().parents[2]
CHOICES = {name: get_args(AlgoConfig.model_fields[name].annotation) for name in ("advantage", "loss", "reduction")}
ESTIMATORS = get_args(KLConfig.model_fields["estimator"].annotation)
CORRECTIONS = get_args(CorrectionConfig.model_fields["kind"].annotation)


def recipe(**settings: Any) -> Recipe:
    return Recipe.model_validate({"name": "x", "task": {"name": "knights"}, **settings})


def paragraphs(**settings: Any) -> dict[str, list[str]]:
    """Label -> its paragraphs, unwrapped, of the one stage."""
    found: dict[str, list[str]] = {}
    label = ""
    for line in explain.explain(recipe(**settings)).splitlines()[1:]:
        new, text = line[2:14].strip(), line[14:]
        label = new or label
        if text.startswith("  "):
            found[label][-1] += f" {text.strip()}"
        else:
            found.setdefault(label, []).append(text)
    return found


def evaluated(formula: str, **values: Any) -> Any:
    """A printed formula as a number."""
    names = {"log": np.log, "exp": np.exp, "min": min, "max": max, "mean": np.mean, "sum": np.sum}
    names |= {"clip": lambda x, low, high: min(max(x, low), high), "stop_gradient": lambda x: x}
    names |= {"std": lambda x: np.std(x, ddof=values.get("ddof", 0))}
    return eval(formula, {"__builtins__": {}}, {**names, **values})


def symbols(lines: list[str]) -> dict[str, str]:
    """The paragraphs `symbol = formula`, without what follows in words."""
    pairs = [line.split(" = ", 1) for line in lines if re.match(r"\w+ = ", line)]
    return {name: re.split(r"; | over the answer|, with | \((?:k[123]|tis|mis)\b", text)[0] for name, text in pairs}


# --- all that can be chosen -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "choices"),
    [
        (explain_formulas.ADVANTAGES, CHOICES["advantage"]),
        (explain_formulas.LOSSES, CHOICES["loss"]),
        (explain_formulas.REDUCTIONS, CHOICES["reduction"]),
        (explain_formulas.ESTIMATORS, ESTIMATORS),
        (explain_formulas.CORRECTIONS, CORRECTIONS),
    ],
)
def test_every_choice_has_its_formula(table: dict[str, Any], choices: tuple[str, ...]) -> None:
    assert table.keys() == set(choices)


def test_every_combination_is_filled_in_and_fits_the_page() -> None:
    for advantage, loss, reduction, updates in itertools.product(*CHOICES.values(), (1, 3)):
        for kind, place, extra in itertools.product(CORRECTIONS, ("loss", "reward"), (0.0, 1e-3)):
            algo = {"advantage": advantage, "loss": loss, "reduction": reduction, "updates_per_rollout": updates}
            algo |= {"correction": {"kind": kind}, "kl": {"coef": extra, "place": place}, "entropy_coef": extra}
            text = explain.explain(recipe(algo=algo))
            assert max(map(len, text.splitlines())) <= 100
            assert not re.search(r"[{}]| $", text, re.MULTILINE)


# --- formulas, evaluated ----------------------------------------------------------------------

OBJECTIVES: list[dict[str, Any]] = [
    {},
    {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 1.5},
    {"loss": "gspo", "clip_low": 0.02, "clip_high": 0.03},
    {"loss": "gspo", "dual_clip": 1.3, "correction": {"kind": "mis", "cap": 1.1}},
    {"loss": "cispo", "clip_low": 1.5, "clip_high": 0.28, "kl": {"coef": 0.3}},
    {"dual_clip": 1.5, "kl": {"coef": 0.2, "estimator": "k2"}, "entropy_coef": 0.1, "correction": {"kind": "tis"}},
    {"kl": {"coef": 0.2, "estimator": "k1"}, "entropy_coef": -0.1, "correction": {"kind": "tis", "cap": 0.9}},
    {"kl": {"coef": 0.2, "place": "reward"}},
]


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("algo", OBJECTIVES)
def test_the_loss_printed_is_the_objective(algo: dict[str, Any], updates: int) -> None:
    """Of every token: 2 answers of 5 and 7 tokens, probabilities far enough apart for every bound to act."""
    algo = {**algo, "updates_per_rollout": updates}
    rng = np.random.default_rng(0)
    p, ref, q, old = rng.uniform(0.2, 0.8, (4, 12))
    old = old if updates > 1 else p
    advantages, entropy = rng.normal(size=12), rng.uniform(size=12)
    answer = np.repeat([0, 1], [5, 7])
    given = symbols(paragraphs(algo=algo)["loss"])
    uses_ref = bool(algo.get("kl"))

    def token(t: int, symbol: str) -> float:
        values: dict[str, Any] = {"p_t": p[t], "p_old_t": old[t], "ref_t": ref[t], "q_t": q[t]}
        if symbol == "s":
            values = {"p_t": p[answer == answer[t]], "p_old_t": old[answer == answer[t]]}
        inner = {name: token(t, name) for name in given if name != symbol and name in given[symbol]}
        return float(evaluated(given[symbol], A_t=advantages[t], H_t=entropy[t], **values, **inner))

    def tensor(x: Any) -> torch.Tensor:
        return torch.as_tensor(x, dtype=torch.float64)

    for t in range(12):
        batch = MicroBatch(
            inputs=torch.zeros(12, dtype=torch.int64),
            positions=torch.zeros(12, dtype=torch.int64),
            layout=(Block(0, (5, 7)),),
            sources=torch.arange(12),
            targets=torch.zeros(12, dtype=torch.int64),
            samples=torch.as_tensor(answer),
            sampled_logprobs=tensor(np.log(q)),
            advantages=tensor(advantages),
            weights=tensor(np.arange(12) == t),
            old_logprobs=tensor(np.log(old)) if updates > 1 else None,
            ref_logprobs=tensor(np.log(ref)) if uses_ref else None,
        )
        computed = objective(batch, tensor(np.log(p)), tensor(entropy), AlgoConfig.model_validate(algo)).loss
        assert token(t, "L_t") == pytest.approx(float(computed), rel=1e-9)


@pytest.mark.parametrize("beta", [0.0, 0.25])
@pytest.mark.parametrize("name", CHOICES["advantage"])
def test_the_advantages_printed_are_those_computed(name: str, beta: float) -> None:
    rewards, lengths = [np.array([1.0, 0.0, 0.5]), np.array([2.0, 0.0, 0.0])], [[2, 1, 3], [1, 2, 2]]
    rng = np.random.default_rng(1)
    kl, values = [[[rng.normal(size=n).astype(np.float32) for n in row] for row in lengths] for _ in range(2)]
    penalty = {"coef": beta, "place": "reward"}
    settings = {"advantage": name, "kl": penalty} | ({"value": {"gamma": 0.9, "lam": 0.8}} if name == "gae" else {})
    lines = paragraphs(algo=settings, samples_per_prompt=3)["advantage"]
    given = symbols(lines)
    expected: Any
    if name == "gae":
        assert ("less 0.25 * KL_t at each" in lines[2]) == bool(beta)
        penalties = [[beta * k for k in row] for row in kl]
        expected, _ = gae_advantages(rewards, values, penalties, gamma=0.9, lam=0.8)
    else:
        expected = group_advantages(rewards, lengths, AlgoConfig.model_validate(settings), kl if beta else None)

    raw: list[list[Any]] = []
    for reward, row_kl, row_values in zip(rewards, kl, values, strict=True):
        raw.append([])
        if "A_i" in given:
            assert bool(beta) == ("R_i here is the reward less 0.25 * (sum of KL_t over answer i)" in lines)
            less = reward - np.array([beta * k.sum() for k in row_kl])
            raw[-1] = [
                np.full(len(k), evaluated(given["A_i"], R_i=r, R=less, ddof=1))
                for r, k in zip(less, row_kl, strict=True)
            ]
        elif name == "gae":
            for r, k, v in zip(reward, row_kl, row_values, strict=True):
                formula, e_next, found = given["E_t"].replace("_(t+1)", "_next"), 0.0, []
                for t in reversed(range(len(k))):
                    r_t = (r if t == len(k) - 1 else 0.0) - beta * k[t]
                    v_next = v[t + 1] if t + 1 < len(k) else 0.0
                    e_next = evaluated(formula, r_t=r_t, V_t=v[t], V_next=v_next, E_next=e_next)
                    found.insert(0, e_next)
                raw[-1].append(np.array(found))
        else:
            formula = (
                given["G_t"].replace("(KL_t + KL_(t+1) + ...)", "KL_sum").removesuffix(", for each token t of answer i")
            )
            for r, k in zip(reward, row_kl, strict=True):
                raw[-1].append(
                    np.array([evaluated(formula, R_i=r, R=reward, KL_sum=k[t:].sum()) for t in range(len(k))])
                )
    flat = np.concatenate([x for row in raw for x in row])
    if "A_t" in given:
        symbol = "E" if name == "gae" else "G"
        flat = np.array([evaluated(given["A_t"], **{f"{symbol}_t": x, symbol: flat}) for x in flat])
    np.testing.assert_allclose(flat, np.concatenate([x for row in expected for x in row]), atol=1e-5)


@pytest.mark.parametrize("name", CHOICES["reduction"])
def test_the_reduction_printed_is_the_weight_of_a_token(name: str) -> None:
    lengths = [2, 6, 0, 4]
    formula = paragraphs(algo={"reduction": name}, sampling={"max_tokens": 10})["reduction"][0].split("tokens of ")[1]
    printed = [evaluated(formula, L_t=1.0, N=sum(lengths), S=len(lengths), T_i=n) for n in lengths if n]
    computed = [w for w, n in zip(token_weights(lengths, name, 10), lengths, strict=True) if n]
    assert printed == pytest.approx(computed)


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_value_loss_printed_is_the_one_computed(clip: float | None) -> None:
    line = paragraphs(algo={"advantage": "gae", "value": {"clip": clip}})["value"][0]
    v, old, target = np.random.default_rng(2).normal(size=(3, 20))
    computed = value_loss(torch.as_tensor(v), torch.as_tensor(old), torch.as_tensor(target), clip)
    formula = line.removeprefix("loss of the value head: ")
    printed = [evaluated(formula, V_t=v[t], V_old_t=old[t], target_t=target[t]) for t in range(20)]
    np.testing.assert_allclose(printed, computed.numpy())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_estimators_printed_are_those_computed(name: str) -> None:
    p, ref = np.array([0.3, 0.9]), np.array([0.6, 0.2])
    computed = kl_estimate(torch.as_tensor(p).log(), torch.as_tensor(ref).log(), name)
    np.testing.assert_allclose(evaluated(explain_formulas.ESTIMATORS[name], p_t=p, ref_t=ref), computed.numpy())


# --- the clip ---------------------------------------------------------------------------------


def weight(loss: str, ratio: float, advantage: float, clip: Clip) -> float:
    """The gradient with respect to the log-prob of one token, less the advantage: its ratio, if nothing is clipped."""
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    out = LOSSES[loss](logprobs, 0 * one, advantage * one, torch.zeros(1, dtype=torch.int64), clip)
    (gradient,) = torch.autograd.grad(out.loss.sum(), logprobs)
    return -float(gradient) / advantage


@pytest.mark.parametrize("loss", CHOICES["loss"])
def test_the_range_printed_is_the_range_in_which_a_ratio_counts(loss: str) -> None:
    """Just inside both ends the gradient follows the ratio, just outside it does not."""
    algo = {"loss": loss, "clip_low": 0.2, "clip_high": 0.28, "updates_per_rollout": 2}
    lines = paragraphs(algo=algo)["clip"]
    assert lines[0].endswith("is clipped to [0.8, 1.28]")
    assert ("sequence" in lines[0]) == (loss == "gspo")
    assert ("weight of a token" in lines[0]) == (loss == "cispo")
    for inside, outside, advantage, end in ((1.27, 1.29, 1.0, 1.28), (0.81, 0.79, -1.0, 0.8)):
        clip = Clip(0.2, 0.28)
        assert weight(loss, inside, advantage, clip) == pytest.approx(inside)
        assert weight(loss, outside, advantage, clip) == pytest.approx(end if loss == "cispo" else 0.0)


@pytest.mark.parametrize("loss", ["clipped", "gspo"])
def test_the_dual_clip_printed_is_where_the_gradient_ends(loss: str) -> None:
    algo = {"loss": loss, "dual_clip": 3.0, "updates_per_rollout": 2}
    line = paragraphs(algo=algo)["clip"][-1]
    assert line.endswith("for A_t > 0 above 1.2; for A_t < 0 below 0.8 or above 3 (dual clip)")
    clip = Clip(0.2, 0.2, 3.0)
    assert weight(loss, 2.9, -1.0, clip) == pytest.approx(2.9)
    assert weight(loss, 3.1, -1.0, clip) == 0.0


def test_an_open_lower_side_is_printed_as_one() -> None:
    algo = {"clip_low": 1.5, "updates_per_rollout": 2}
    lines = paragraphs(algo=algo)["clip"]
    assert lines[0].endswith("[0, 1.2]")
    assert lines[-1] == "the clipped term has no gradient for A_t > 0 above 1.2"
    assert weight("clipped", 1e-3, -1.0, Clip(1.5, 0.2)) == pytest.approx(1e-3)
    assert paragraphs(algo=algo)["note"] == ["algo.clip_low 1.5: no ratio is below 0, so there is no lower bound"]


@pytest.mark.parametrize("loss", CHOICES["loss"])
def test_with_one_update_no_clip_acts_and_the_losses_are_one(loss: str) -> None:
    found = paragraphs(algo={"loss": loss})
    assert found["clip"][0].startswith("never acts")
    assert any(f"loss {loss} has the same gradient as clipped" in line for line in found.get("note", [])) == (
        loss != "clipped"
    )
    logprobs = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    out = LOSSES[loss](logprobs, None, advantages, torch.tensor([0, 0, 1]), Clip(0.0, 0.0))
    assert not out.clipped.any()
    torch.testing.assert_close(torch.autograd.grad(out.loss.sum(), logprobs)[0], -advantages)


# --- counts, rates and sentences --------------------------------------------------------------


def test_counts_of_a_step() -> None:
    found = paragraphs(
        steps=10,
        prompts_per_step=10,
        samples_per_prompt=4,
        sampling={"max_tokens": 100},
        algo={"updates_per_rollout": 4, "refill_rounds": 2, "reduction": "constant"},
    )
    assert (
        "10 prompts x 4 answers = 40 per step, each of at most 100 tokens: at most 4,000 completion"
        in found["rollout"][0]
    )
    assert "at most 2 more rounds: at most 20 more prompts, 80 more answers" in found["rollout"][1]
    assert found["updates"][0].startswith(
        "4 optimizer updates per rollout, each on 2 or 3 of the 10 prompts (8 or 12 answers)"
    )
    assert found["updates"][1].startswith("over the run at most 40 updates on 400 answers")
    assert found["reduction"][:2] == [
        "constant: sum over tokens of L_t / (S * 100)",
        "S = samples of the update, at most 12; 100 is sampling.max_tokens",
    ]


def test_what_is_counted_and_what_is_trained() -> None:
    plain = paragraphs()
    assert plain["reduction"][-1].endswith("are included; not counted: samples whose verifier failed")
    assert plain["trained"][1] == "answers cut off at 256 tokens are trained on, too"
    assert plain["trained"][2].endswith("they are counted, but not computed")
    masked = paragraphs(algo={"mask_truncated": True, "refill_rounds": 1, "entropy_coef": 0.1})
    assert masked["reduction"][-1].endswith(
        "micro-batch; not counted: samples whose verifier failed, truncated samples"
    )
    assert "are left out" in masked["trained"][1]
    assert masked["trained"][2] == "groups without a reward difference are replaced before training"


@pytest.mark.parametrize("name", [n for n in CHOICES["advantage"] if n != "gae"])
@pytest.mark.parametrize("penalised", [False, True])
def test_groups_without_a_reward_difference_learn_where_it_is_said(name: str, penalised: bool) -> None:
    kl = {"coef": 0.1, "place": "reward"} if penalised else {}
    said = "have A_t = 0 and no gradient" in paragraphs(algo={"advantage": name, "kl": kl})["trained"][2]
    rewards, lengths = [np.array([1.0, 0.0]), np.array([1.0, 1.0])], [[2, 5], [3, 1]]
    estimates = [[np.linspace(0.1, 0.5, n, dtype=np.float32) for n in row] for row in lengths]
    algo = AlgoConfig.model_validate({"advantage": name, "kl": kl})
    dull = group_advantages(rewards, lengths, algo, estimates if penalised else None)[1]
    assert said == (not any(a.any() for a in dull))


@pytest.mark.parametrize(
    ("algo", "passes"),
    [
        ({}, ["not computed", "not computed, there is no KL"]),
        ({"updates_per_rollout": 2, "kl": {"coef": 1.0}}, ["one more forward", "a frozen second copy of the model"]),
        ({"kl": {"coef": 1.0, "place": "reward"}}, ["for the KL in the reward", "a frozen second copy"]),
        ({"advantage": "gae"}, ["not computed", "not computed, there is no KL", "values: one more forward pass"]),
    ],
)
def test_forward_passes_and_copies(algo: dict[str, Any], passes: list[str]) -> None:
    lines = paragraphs(algo=algo)["passes"]
    assert [part in line for part, line in zip(passes, lines, strict=True)] == [True] * len(passes)


@pytest.mark.parametrize(
    ("algo", "answerer", "line"),
    [
        ({}, {}, "of a frozen second copy of the model"),
        ({"kl": {"coef": 1.0}}, {}, "of a frozen second copy of the model"),
        ({"kl": {"coef": 1.0}}, {"answerer": "some/model"}, "of a frozen model"),
        ({}, {"answerer": "http://localhost:1/v1", "served_model": "m"}, "on a server"),
    ],
)
def test_a_frozen_answerer_is_one_more_pass(algo: dict[str, Any], answerer: dict[str, str], line: str) -> None:
    lines = paragraphs(algo=algo, reward={"parts": {"perplexity": 1.0}, "perplexity": answerer})["passes"]
    assert lines[-1] == f"perplexity of the gold answers: one more forward pass, {line}"


def test_filters_of_the_sampler_are_said() -> None:
    line = paragraphs(sampling={"temperature": 1.2, "top_p": 0.9, "top_k": 20})["loss"][-1]
    assert line == (
        "p_t: probability of token t at temperature 1.2, over the whole vocabulary, although answers are sampled with "
        "top_p 0.9 and top_k 20"
    )


def test_the_learning_rate_in_words() -> None:
    def rate(**optim: Any) -> str:
        return paragraphs(steps=10, optim={"lr": 0.1, **optim})["rate"][0]

    assert rate() == (
        "AdamW, learning rate 0.1 at the first update, without warm-up; then constant, 0.1 at the last update, 10"
    )
    # Warm-up over 4: the first of 10 updates has 1/5; of the 6 after it the last one has 1 - 5/6.
    assert rate(warmup_steps=4, decay="linear").endswith(
        "0.1 at update 5, after a linear warm-up from 0.02; then linear decay, 0.01667 at the last update, 10"
    )
    assert "the linear warm-up of 19 updates never reaches: 0.05 at the last" in rate(warmup_steps=19)
    schedule = OptimConfig(warmup_steps=1, decay="cosine").schedule
    assert [schedule(k, 5) for k in range(6)] == pytest.approx([0.5, 1.0, 0.8535534, 0.5, 0.1464466, 0.0])


def test_a_supervised_stage() -> None:
    sft = {"examples": 100, "examples_per_step": 30, "epochs": 2, "styles": {"careful": 1.0, "hasty": 3.0}}
    found = paragraphs(stage="sft", sft=sft)
    assert found["examples"] == ["100 worked answers to training problems: careful 25 %, hasty 75 %"]
    assert found["updates"][0] == "6 optimizer updates on 30 examples each, in 2 epochs"
    assert found["updates"][1].startswith("the last 20 examples of the last epoch")


def test_the_example_of_the_documentation() -> None:
    example = re.search(r"From `algo: \{.*?```\n(.*?)```", (ROOT / "docs/config.md").read_text(), re.S)
    if example is None:
        pytest.fail("docs/config.md shows no example")
    algo = {"loss": "gspo", "updates_per_rollout": 4, "clip_high": 0.28, "kl": {"coef": 0.001}}
    assert example[1] in explain.explain(recipe(algo=algo))


def test_every_stage_of_a_pipeline_with_its_own_notes() -> None:
    pipeline = load("demo", ["algo.clip_high=0.3"])
    assert isinstance(pipeline, Pipeline)
    warmup, rl = explain.explain(pipeline).split("\n\n")
    assert warmup.startswith("stage warmup: supervised, 1,280 steps\n")
    assert rl.startswith("stage rl: reinforcement learning, 50 steps\n")
    assert "  note  " not in warmup  # what belongs to the other stage is not idle
    assert "  note        algo.clip_high has no effect with one update per rollout" in rl


def test_a_wrong_recipe_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"did you mean algo\.loss"):
        load("demo", ["algo.los=gspo"])
