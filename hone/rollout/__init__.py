"""Rollout engines."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hone.recipe.sections.rollout import RolloutConfig

if TYPE_CHECKING:
    from hone.learn.policy import Policy
    from hone.rollout.engine import Engine, Event, ModelTraits
    from hone.rollout.identity import Verified
    from hone.rollout.servers.server import ServerEngine
    from hone.rollout.together import DistributedEngine


def make_engine(config: RolloutConfig, policy: Policy, folder: Path, event: Event) -> Verified | DistributedEngine:
    """Make the engine that the recipe names (see `_make`), for all processes of the policy's world."""
    if policy.world.size == 1:
        return _make(config, policy, folder, event)
    from hone.rollout.together import DistributedEngine

    return DistributedEngine(partial(_make, config, policy, folder), policy.world, config.engine == "native", event)


def _make(config: RolloutConfig, policy: Policy, folder: Path, event: Event) -> Verified:
    """Make the engine that the recipe names, verified after every sync; its module is imported only here.

    `folder` holds a server's log and the weights for it. Raises UserError if the engine is not available: no port, no
    interpreter, no server.
    """
    from hone.rollout.engine import ModelTraits
    from hone.rollout.identity import Verified

    traits = ModelTraits.of(policy)
    engine: Engine
    if config.engine == "native":
        from hone.rollout.local import native_engine

        engine = native_engine(policy.model, policy.tokenizer, config, event)
    elif config.engine == "vllm" and config.vllm.in_process:
        from hone.rollout.servers.vllm_inside import VLLMInside

        engine = VLLMInside(config.vllm, traits, config.max_sequences, folder)
    else:
        engine = _server(config, traits, folder, event)
    return Verified(engine, policy.tokenizer, config.identity, traits.dtype, event)


def check_server(config: RolloutConfig, folder: Path) -> None:
    """Raises UserError if the server is not available, here or at its url; nothing is started or written."""
    from hone.rollout.engine import ModelTraits

    _server(config, ModelTraits(), folder, lambda kind, message: None).close()


def _server(config: RolloutConfig, traits: ModelTraits, folder: Path, event: Event) -> ServerEngine:
    from hone.rollout.servers.host import host_of_servers

    if config.engine == "vllm":
        from hone.rollout.servers.vllm import VLLMEngine

        return VLLMEngine(config.vllm, traits, config.max_sequences, folder, event, host_of_servers(config.vllm))
    from hone.rollout.servers.sglang import SGLangEngine

    return SGLangEngine(config.sglang, traits, config.max_sequences, folder, event, host_of_servers(config.sglang))
