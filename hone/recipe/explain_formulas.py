"""The formulas of `hone.learn`, by the names of the settings, in a form that can be evaluated.

    ADVANTAGES["dr_grpo"][0]  # "A_i = R_i - mean(R)"

`{low}` and other names in braces are filled in with the numbers of a recipe, by `hone.recipe.explain`.
`tests/recipe/test_explain.py` evaluates each formula and compares it with what `hone.learn` computes.
"""

from __future__ import annotations

from typing import NamedTuple

OVER_THE_GROUP = "R: rewards of the {answers} answers to a prompt"
EVERY_TOKEN = "A_t = A_i for every token t of answer i"
OVER_THE_STEP = "mean and std over all completion tokens of the step"
#: The formula, then the meaning of its symbols.
ADVANTAGES = {
    "grpo": (
        "A_i = (R_i - mean(R)) / (std(R) + 1e-6)",
        f"{OVER_THE_GROUP}; std divides by {{others}}; {EVERY_TOKEN}",
    ),
    "dr_grpo": ("A_i = R_i - mean(R)", f"{OVER_THE_GROUP}; {EVERY_TOKEN}"),
    "rloo": (
        "A_i = R_i - (sum(R) - R_i) / {others}",
        f"{OVER_THE_GROUP}; R_i less the mean of the others; {EVERY_TOKEN}",
    ),
    "reinforce_pp": (
        "A_t = (G_t - mean(G)) / (std(G) + 1e-6)",
        "G_t = R_i{to_go}, for each token t of answer i",
        OVER_THE_STEP,
    ),
    "reinforce_pp_baseline": (
        "A_t = (G_t - mean(G)) / (std(G) + 1e-6)",
        "G_t = R_i - mean(R){to_go}, for each token t of answer i",
        OVER_THE_GROUP,
        OVER_THE_STEP,
    ),
    "gae": (
        "A_t = (E_t - mean(E)) / (std(E) + 1e-6)",
        "E_t = r_t + {gamma} * V_(t+1) - V_t + {gamma} * {lam} * E_(t+1), with the values before the first update",
        "r_t = R_i at the last token of answer i and 0 before it{at_each}; E and V are 0 after it",
        OVER_THE_STEP,
    ),
}


class Surrogate(NamedTuple):
    """The formula of a loss."""

    formula: str
    ratio: tuple[str, str]  # a symbol in it, and its formula
    clipped: str  # what the clip range applies to


LOSSES = {
    "clipped": Surrogate(
        "-min(rho_t * A_t, clip(rho_t, {low}, {high}) * A_t)", ("rho_t", "p_t / p_old_t"), "ratio of a token"
    ),
    "gspo": Surrogate(
        "-min(s * A_t, clip(s, {low}, {high}) * A_t)",
        ("s", "exp(mean(log(p_t / p_old_t)))"),
        "ratio of the sequence (the same for all its tokens)",
    ),
    "cispo": Surrogate(
        "-stop_gradient(clip(rho_t, {low}, {high})) * A_t * log(p_t)", ("rho_t", "p_t / p_old_t"), "weight of a token"
    ),
}
ESTIMATORS = {
    "k1": "log(p_t / ref_t)",
    "k2": "log(p_t / ref_t) ** 2 / 2",
    "k3": "ref_t / p_t - 1 - log(ref_t / p_t)",
}
CORRECTIONS = {
    "none": "1",
    "tis": "min(p_old_t / q_t, {cap})",
    "mis": "p_old_t / q_t if p_old_t / q_t <= {cap} else 0",
}
REDUCTIONS = {
    "token_mean": "L_t / N",
    "sequence_mean": "L_t / (S * T_i)",
    "constant": "L_t / (S * {longest})",
}
