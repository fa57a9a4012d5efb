"""Published results of others, for comparison. They are labelled as published: no intervals, not measured here.

Sources: Logic-RL, arXiv:2502.14768 and github.com/Unakar/Logic-RL (100 puzzles a cell); reproductions with GRPO and
with distillation on the same puzzles; ProRL, arXiv:2505.24864, and a small-scale reproduction of it on GSM8K/MATH500.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublishedRow:
    model: str
    values: dict[str, float]  # column -> accuracy in 0..1
    average: float


def _knights(model: str, *cells: float) -> PublishedRow:
    *people, average = cells
    return PublishedRow(model, {str(n): cell for n, cell in enumerate(people, start=2)}, average)


#: Knights and knaves: accuracy by number of people, 100 puzzles a cell.
KNIGHTS: tuple[PublishedRow, ...] = (
    _knights("o3-mini-high", 0.99, 0.98, 0.97, 0.95, 0.94, 0.89, 0.83, 0.94),
    _knights("o1-2024-12-17", 0.83, 0.51, 0.38, 0.38, 0.35, 0.30, 0.20, 0.42),
    _knights("GPT-4o", 0.68, 0.57, 0.49, 0.32, 0.23, 0.21, 0.11, 0.37),
    _knights("DeepSeek-R1-Distill-Qwen-32B", 0.97, 0.96, 0.97, 0.84, 0.72, 0.70, 0.67, 0.83),
    _knights("Qwen2.5-7B-Instruct-1M", 0.64, 0.39, 0.33, 0.21, 0.13, 0.03, 0.08, 0.26),
    _knights("Logic-RL (REINFORCE++)", 0.99, 0.99, 0.94, 0.92, 0.91, 0.80, 0.67, 0.89),
    _knights("7B GRPO, step 380", 0.93, 0.98, 0.99, 0.98, 0.84, 0.85, 0.67, 0.89),
    _knights("7B GRPO, step 420", 0.93, 0.98, 1.00, 0.98, 0.90, 0.85, 0.79, 0.92),
    _knights("1.5B distilled", 0.56, 0.80, 0.72, 0.45, 0.35, 0.22, 0.16, 0.47),
    _knights("1.5B distilled + GRPO, step 360", 1.00, 0.99, 0.99, 0.96, 0.93, 0.68, 0.69, 0.89),
)

#: Qwen2-0.5B: (pass@1, pass@32).
GSM8K: dict[str, tuple[float, float]] = {
    "Qwen2-0.5B": (0.10, 0.65), "Qwen2-0.5B-Instruct": (0.34, 0.83),
    "RL, step 2600": (0.43, 0.86), "RL, step 7600": (0.535, 0.86),
}  # fmt: skip
MATH500: dict[str, tuple[float, float]] = {
    "Qwen2-0.5B": (0.09, 0.48), "Qwen2-0.5B-Instruct": (0.21, 0.65),
    "RL, step 2600": (0.23, 0.63), "RL, step 7600": (0.28, 0.67),
}  # fmt: skip

#: OLS of the final model's per-problem accuracy at k = 32 on MATH500: (coefficient, standard error, t, p).
OLS_MATH500: dict[str, tuple[float, float, float, float]] = {
    "level": (-0.1159, 0.009, -12.614, 0.0),
    "Algebra": (0.8643, 0.038, 22.603, 0.0),
    "Prealgebra": (0.7815, 0.042, 18.638, 0.0),
    "Geometry": (0.6182, 0.053, 11.772, 0.0),
    "Counting & Probability": (0.6082, 0.054, 11.197, 0.0),
    "Intermediate Algebra": (0.5632, 0.043, 13.026, 0.0),
    "Number Theory": (0.5765, 0.045, 12.685, 0.0),
    "Precalculus": (0.5118, 0.046, 11.023, 0.0),
}
