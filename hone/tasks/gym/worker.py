"""The target of the workers that grade reasoning-gym answers; imports the package before any deadline starts."""

from __future__ import annotations

from hone.tasks.gym.package import reasoning_gym_package, score

__all__ = ["score"]

reasoning_gym_package()
