"""What is printed of adapters, resets, schedules and curricula."""

from __future__ import annotations

from typing import Any

import pytest

from hone.tasks.curriculum import Curriculum, CurriculumConfig
from hone.types import Problem
from tests.recipe.test_explain import evaluated, paragraphs


def test_adapter_resets_and_schedule() -> None:
    found = paragraphs(
        steps=50,
        lora={"rank": 8, "alpha": 4.0, "targets": "attention"},
        layers={"train": "last", "count": 2, "lr_decay": 0.5},
        optim={"lr": 0.1, "warmup_steps": 2},
        algo={"kl": {"coef": 0.1}},
        eval={"every": 1, "problems": 20000},
        reset={"at": [20], "on_stagnation": {}, "limit": 3},
        schedule=[{"at": 0, "samples_per_prompt": 4}, {"at": "reset 1", "lora": {"rank": 16}}],
    )
    assert found["adapter"][0].startswith(
        "W x + 0.5 * B A x in the linear layers of attention; A and B, of rank 8, are trained"
    )
    assert found["layers"][0] == "trained: the adapter in the last 2 layers; no gradient is computed below"
    assert found["rate"][1] == "the warm-up restarts at each hard reset, the decay does not"
    assert found["resets"][0] == "before step 20"
    assert "none of the last 3 means of 3 validations is more than 0.01 above" in found["resets"][1]
    assert found["resets"][1].endswith("since the last reset, at most 3 times")
    assert found["schedule"][:2] == ["at the start: samples_per_prompt=4", "from reset 1 on: lora.rank=16"]
    assert found["rollout"][0].startswith("16 prompts x 4 answers = 64 per step")  # of the first phase
    assert "ref_t: probability under the model at the start of the stage, or at the latest hard reset" in " ".join(
        found["loss"]
    )
    assert found["passes"][1].endswith("of the model with its adapter off, no copy")


@pytest.mark.parametrize(
    ("curriculum", "text"),
    [
        (
            {"kind": "sequential"},
            "one level after the other, the lowest first, each until each of its problems was drawn",
        ),
        ({"kind": "sequential", "steps_per_level": 5}, "one level after the other, the lowest first, each for 5 steps"),
        ({"kind": "mixture", "weights": {"2": 1.0, "3": 3.0}}, "shares of the levels: 2 25 %, 3 75 %"),
        ({"kind": "adaptive", "floor": 0.2}, "share of a level = 0.2 / levels + 0.8 * w / sum(w), w = p * (1 - p)"),
    ],
)
def test_the_curriculum(curriculum: dict[str, Any], text: str) -> None:
    assert paragraphs(curriculum=curriculum)["curriculum"][0].startswith(text)
    assert "curriculum" not in paragraphs()


def test_the_shares_printed_are_those_drawn() -> None:
    problems = [Problem(f"{n}", "t", (), None, level=str(n % 3)) for n in range(9)]
    config = CurriculumConfig(kind="adaptive", floor=0.3)
    course = Curriculum(problems, 0, config)
    rates = {"0": 0.5, "1": 0.9, "2": 0.2}
    course.restore({"drawn": {}, "steps": {}, "pass_rates": rates})
    course.draw(0, 3)
    share, weight = paragraphs(curriculum=config.model_dump())["curriculum"][0].split(", ")
    weights = {level: evaluated(weight.removeprefix("w = "), p=p) for level, p in rates.items()}
    formula = share.removeprefix("share of a level = ").replace("sum(w)", "total")
    for level, w in weights.items():
        printed = evaluated(formula, levels=3, w=w, total=sum(weights.values()))
        assert printed == pytest.approx(course.shares[level])
