"""New ability: does a trained model solve what its base never solves?

Choose the problems that the base failed in all of its n samples. On these, the base's accuracy *in the same samples*
is 0 by construction, so any model looks better than it. The base is therefore sampled a second time with other random
numbers: what it then solves is due to chance alone, and the trained model has to beat that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hone.base import stats
from hone.measure.stats import passk
from hone.measure.stats.measured import Array, Measured, shared
from hone.types import Interval


@dataclass(frozen=True)
class Ability:
    """One model on the problems that the base never solved."""

    label: str
    solved: tuple[Interval, ...]  # pass@k for each k, problems resampled
    gain: stats.Comparison | None  # against the resampled base at the largest k, paired; None for the base itself
    rates: tuple[float, ...]  # [problems] share of correct samples


@dataclass(frozen=True)
class NewAbility:
    problems: tuple[str, ...]  # never solved by the base in `tries` samples
    tries: int  # the fewest samples of the selection
    of: int  # number of all problems
    ks: tuple[int, ...]
    rows: tuple[Ability, ...]  # the resampled base first


def new_ability(base: Measured, again: Measured, models: Sequence[Measured], k: int | None = None) -> NewAbility | None:
    """Measure models on the problems that `base` never solved: `again` (the base with other random numbers) and
    `models`.

    `k`: the largest k, by default the fewest samples of any model. Returns None if the base solved everything.
    Raises ValueError if `again` is not an independent sample: the comparison would be 0 by construction.
    """
    check_independent(base, again)
    base, again, *others = shared(base, again, *models)
    if not len(base):
        raise ValueError("new ability: the evaluations share no problem")
    never = base.correct == 0
    if not never.any():
        return None
    again, others = again.where(never), [model.where(never) for model in others]
    limit = min(int(m.drawn.min()) for m in (again, *others))
    if k is not None and k > limit:
        raise ValueError(f"new ability: k is {k}, but some problem has only {limit} samples")
    ks = passk.powers_of_two(k or limit)
    reference = _at(again, ks[-1])
    rows = [Ability(again.label, tuple(again.pass_curve(ks)), None, tuple(again.rates().tolist()))]
    for model in others:
        gain = stats.compare(reference, _at(model, ks[-1]))
        rows.append(Ability(model.label, tuple(model.pass_curve(ks)), gain, tuple(model.rates().tolist())))
    return NewAbility(again.problems, int(base.drawn.min()), len(base), tuple(ks), tuple(rows))


def check_independent(base: Measured, again: Measured) -> None:
    """Raises ValueError unless both are the same model, sampled with the same settings and different seeds."""
    if base.seed is None or again.seed is None or base.seed == again.seed:
        raise ValueError(
            f"new ability: {base.label} and {again.label} were drawn with the seeds {base.seed} and {again.seed}; "
            "problems must be chosen by one sample of the base and scored by another: evaluate it again with "
            "another --seed"
        )
    known = [m.facts.get("weights") for m in (base, again)]
    if known[0] != known[1]:
        raise ValueError(f"new ability: {base.label} and {again.label} are not the same model")
    if dict(base.sampling) != dict(again.sampling):
        raise ValueError(f"new ability: {base.label} and {again.label} were sampled with different settings")


def _at(model: Measured, k: int) -> Array:
    return passk.pass_at_k(model.drawn.tolist(), model.correct.tolist(), [k])[:, 0]
