"""History forgets what nothing reads: what the watch and the guards say stays the same."""

from __future__ import annotations

import math
import random
from typing import Any

from hone.learn.watch import collapse_warnings
from hone.recipe.sections.algo import WatchConfig
from hone.runs.history import History, reach
from hone.stages.guard import skipped_in_a_row, usual_grad_norm


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    luck = random.Random(seed)
    made: list[dict[str, Any]] = []
    for step in range(count):
        calm = 1.0 if step < count // 2 else 0.02  # entropy and lengths collapse in the second half
        row = {"step": step, "reset": 0.0, "entropy": calm * luck.uniform(1, 2), "length/mean": 90 * calm}
        row |= {"grad_norm": luck.choice([0.1, 0.2, 9.0, math.nan]), "skipped": float(luck.random() < 0.3)}
        row |= {"trained_tokens": luck.choice([0, 5]), "text": "x" * 50}
        if step > count // 3:
            row["kl"] = luck.uniform(0, 5)  # a metric that comes later
        made.append(row)
    return made


def test_what_is_read_of_a_bounded_history_is_what_is_read_of_all_rows() -> None:
    watch = WatchConfig(window=3, max_skipped=4)
    for seed in range(5):
        every = rows(600, seed)
        history = History(reach=reach({"watch": watch.model_dump()}))
        warned = 0
        for end, row in enumerate(every, start=1):
            history.append(row)
            expected = collapse_warnings(every[:end], watch)
            assert collapse_warnings(history, watch) == expected
            warned += len(expected)
            assert usual_grad_norm(history[:-1], watch) == usual_grad_norm(every[: end - 1], watch)
            limit = watch.max_skipped
            assert min(skipped_in_a_row(history), limit) == min(skipped_in_a_row(every[:end]), limit)
        assert warned > 3
        assert len(history) < 300
        assert "text" not in history[-1]
    assert len(History(rows(20_000, 0), reach=30)) < 700
