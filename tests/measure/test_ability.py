"""New ability: the naive comparison is 0 by construction, the one with an independent resampling is not."""

from __future__ import annotations

import numpy as np
import pytest

from hone.measure.stats.ability import new_ability
from hone.measure.stats.measured import Measured, measured

RATES = np.random.default_rng(0).beta(0.2, 3.0, 400)


def draw(label: str, rates: np.ndarray, seed: int, n: int = 16, **facts: object) -> Measured:
    hits = np.random.default_rng(seed).random((len(rates), n)) < rates[:, None]
    records = [
        {"problem_id": f"p{i}", "verdict": "correct" if hit else "wrong"} for i, row in enumerate(hits) for hit in row
    ]
    return measured(label, records, seed=seed, facts={"weights": facts.get("weights", label)})


def test_the_naive_way_is_zero_by_construction_and_ours_is_not() -> None:
    base, again = draw("base", RATES, 1), draw("base", RATES, 2)
    never = base.correct == 0
    assert base.where(never).pass_curve([16])[0].value == 0.0  # selected and scored on the same samples: always
    found = new_ability(base, again, [])
    assert found is not None
    assert (len(found.problems), found.tries, found.of) == (int(never.sum()), 16, 400)
    luck = found.rows[0].solved[-1]
    # what remains after 16 failures: the mean of 1 - (1 - p)^16 weighted with (1 - p)^16
    weight = (1 - RATES) ** 16
    expected = float((weight * (1 - weight)).sum() / weight.sum())
    assert expected > 0.05
    assert luck.low <= expected <= luck.high


def test_a_model_no_better_than_its_base_has_no_new_ability() -> None:
    base, again, same = (draw("base", RATES, seed) for seed in (1, 2, 3))
    found = new_ability(base, again, [same])
    assert found is not None
    gain = found.rows[1].gain
    assert gain is not None
    assert gain.difference.low < 0 < gain.difference.high


def test_a_better_model_has_some() -> None:
    base, again = draw("base", RATES, 1), draw("base", RATES, 2)
    found = new_ability(base, again, [draw("trained", np.minimum(1, RATES + 0.1), 4)], k=8)
    assert found is not None
    assert found.ks == (1, 2, 4, 8)
    gain = found.rows[1].gain
    assert gain is not None
    assert gain.difference.low > 0.3
    assert gain.difference.value == pytest.approx(found.rows[1].solved[-1].value - found.rows[0].solved[-1].value)
    assert gain.p_value < 0.001


def test_only_an_independent_resampling_is_accepted() -> None:
    base = draw("base", RATES, 1)
    with pytest.raises(ValueError, match="another --seed"):
        new_ability(base, draw("base", RATES, 1), [])
    with pytest.raises(ValueError, match="not the same model"):
        new_ability(base, draw("base", RATES, 2, weights="others"), [])
    with pytest.raises(ValueError, match="only 16 samples"):
        new_ability(base, draw("base", RATES, 2), [], k=32)
    assert new_ability(draw("b", np.ones(5), 1), draw("b", np.ones(5), 2), []) is None
