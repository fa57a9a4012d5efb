"""What each process of tests/environments/test_world.py runs: python -m tests.environments.world_worker OUT"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from hone.base.parallel import ParallelConfig
from hone.base.settings import UserError
from hone.base.world import World
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
from hone.rollout.native.engine import NativeEngine
from hone.rollout.together import DistributedEngine
from hone.types import Rollout
from tests.environments.toy import PROBLEMS, Replies, episodes

SAMPLING = SamplingConfig(max_tokens=8)


def engine() -> NativeEngine:
    torch.manual_seed(3)
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(**sizes, num_key_value_heads=2, intermediate_size=48, max_position_embeddings=256)
    return NativeEngine(Qwen2ForCausalLM(config).eval(), range(0, 100, 4), RolloutConfig())


def row(rollout: Rollout) -> list[object]:
    """All that must be the same, however many processes play."""
    replies = [[reply["content"] for reply in step.replies] for step in rollout.episode.steps]
    rewards = [step.reward for step in rollout.episode.steps]
    tokens = [(turn.prompt_ids.tolist(), turn.completion_ids.tolist()) for turn in rollout.turns]
    return [rollout.problem_id, rollout.index, rollout.episode.end, replies, rewards, tokens]


def main() -> None:
    world = World.from_env(ParallelConfig(replicate=2))
    result = {}
    for divided in (True, False):
        made = DistributedEngine(lambda event: engine(), world, divided, print)  # type: ignore[arg-type, return-value]
        groups = episodes(world).sample(PROBLEMS, made, SAMPLING, samples=2, seed=5)
        own = world.share(range(len(PROBLEMS)))
        assert [isinstance(group[0].episode.environment, Replies) for group in groups] == [
            p in own for p in range(len(PROBLEMS))
        ]
        result[str(divided)] = [[row(rollout) for rollout in group] for group in groups]
    try:  # what one process refuses, all refuse
        made = DistributedEngine(lambda event: engine(), world, True, print)  # type: ignore[arg-type, return-value]
        episodes(world).sample(PROBLEMS, made, SamplingConfig(max_tokens=300), samples=2, seed=5)
    except UserError as error:
        result["refused"] = str(error)
    (Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
