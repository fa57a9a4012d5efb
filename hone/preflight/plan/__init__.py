"""Predicts how much memory and time a recipe takes: `hone plan`.

from hone.preflight.plan import estimate
plan = estimate(load("recipes/knights-distil-full/recipe.yaml"))
print(plan.peak_bytes / 2**30, dict(plan.parts))
"""

from hone.preflight.plan.memory import Plan as Plan
from hone.preflight.plan.memory import estimate as estimate
