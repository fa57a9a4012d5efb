"""A tokenizer of 100 words, an environment that says two of them, and episodes of both."""

from __future__ import annotations

import zlib

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from hone.base.world import ALONE, World
from hone.environments.base import Environment, Observation
from hone.environments.play import Episodes
from hone.recipe.sections.environment import EnvironmentConfig
from hone.recipe.sections.prompt import PromptConfig
from hone.rollout.prompts import Renderer
from hone.types import Problem

PROBLEMS = [Problem(f"p{i}", "t", ({"role": "user", "content": f"w{10 + i} w{20 + i}"},), None) for i in range(5)]


class Replies(Environment):
    """Says two words, which depend on what was said; three turns."""

    def reset(self, problem, seed):
        self.turns = 0

    def step(self, message):
        self.turns += 1
        word = 30 + zlib.crc32(message["content"].encode()) % 50
        return Observation(({"role": "user", "content": f"w{word} w5"},), done=self.turns == 3, reward=float(word))


def renderer() -> Renderer:
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    config = PromptConfig(style="raw", system="", template="{user}", reply_template="{user}")
    return Renderer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", pad_token="w1"), config, "")


def episodes(world: World = ALONE) -> Episodes:
    return Episodes(renderer(), Replies, EnvironmentConfig(max_turns=5), world)
