"""Rollout engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.rollout.config import RolloutConfig

if TYPE_CHECKING:
    from hone.rollout.base import Engine
    from hone.train.policy import Policy


def make_engine(config: RolloutConfig, policy: Policy) -> Engine:
    """The engine that the recipe names; each is imported only when asked for."""
    from hone.data.stream import decoder
    from hone.rollout.native.engine import NativeEngine

    return NativeEngine(policy.model, policy.stop_ids, config, decode=decoder(policy.tokenizer))
