"""What the workers that grade reasoning-gym answers import: the package with it, before any deadline runs."""

from __future__ import annotations

from hone.tasks.gym.package import reasoning_gym_package, score

__all__ = ["score"]

reasoning_gym_package()
