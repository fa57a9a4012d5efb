"""Rollout engines."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.recipe.sections.rollout import RolloutConfig

if TYPE_CHECKING:
    from hone.learn.policy import Policy
    from hone.rollout.engine import Engine, Event
    from hone.rollout.identity import Verified
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
    from hone.rollout.identity import Verified

    dtype = str(next(policy.model.parameters()).dtype).removeprefix("torch.")
    vocabulary: int = policy.model.config.get_text_config().vocab_size
    engine: Engine
    if config.engine == "native":
        from hone.rollout.local import native_engine

        engine = native_engine(policy.model, policy.tokenizer, config, event)
    elif config.engine == "vllm" and config.vllm.in_process:
        from hone.rollout.servers.vllm_inside import VLLMInside

        engine = VLLMInside(config.vllm, policy.stop_ids, dtype, config.max_sequences, folder)
    elif config.engine == "vllm":
        from hone.rollout.servers.host import host_of_servers
        from hone.rollout.servers.vllm import VLLMEngine

        engine = VLLMEngine(
            config.vllm,
            policy.stop_ids,
            dtype=dtype,
            max_sequences=config.max_sequences,
            folder=folder,
            event=event,
            host=host_of_servers(config.vllm),
            vocabulary=vocabulary,
        )
    else:
        from hone.rollout.servers.host import host_of_servers
        from hone.rollout.servers.sglang import SGLangEngine

        engine = SGLangEngine(
            config.sglang,
            policy.stop_ids,
            dtype=dtype,
            max_sequences=config.max_sequences,
            folder=folder,
            event=event,
            host=host_of_servers(config.sglang),
            vocabulary=vocabulary,
        )
    return Verified(engine, policy.tokenizer, config.identity, dtype, event)


def check_server(config: RolloutConfig, folder: Path) -> None:
    """Raises UserError if the server is not available, here or at its url; nothing is started or written."""
    from hone.rollout.servers.host import host_of_servers

    def quiet(*_: object, **__: object) -> None: ...

    more: dict[str, Any] = {"dtype": "float32", "max_sequences": config.max_sequences, "folder": folder, "event": quiet}
    if config.engine == "vllm":
        from hone.rollout.servers.vllm import VLLMEngine

        VLLMEngine(config.vllm, (), host=host_of_servers(config.vllm), **more).close()
    else:
        from hone.rollout.servers.sglang import SGLangEngine

        SGLangEngine(config.sglang, (), host=host_of_servers(config.sglang), **more).close()
