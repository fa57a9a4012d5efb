"""Conversations in a running batch: what is kept between turns changes what is read, and nothing that is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from hone.base import streams
from hone.model.load import load_model
from hone.recipe.sections.model import ModelConfig
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
from hone.rollout.native.conversations import Conversations
from hone.rollout.native.engine import NativeEngine
from hone.rollout.native.memory import Budget
from hone.rollout.turns import Prompt, Speaker, Turns, in_rounds, open_turns
from hone.types import IntArray, Turn
from tests.tiny_families import make

SAMPLING = SamplingConfig(max_tokens=12)
STOPS = tuple(range(60))  # of 512 tokens: most turns end by themselves
Said = dict[Speaker, list[Turn]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conversations")


@cache
def model_of(name: str, folder: Path) -> PreTrainedModel:
    make(name, folder / name)
    return load_model(ModelConfig(path=str(folder / name)))


@dataclass(frozen=True)
class Script:
    """What is told to each speaker: problem p has a prompt of `prompts[p]` tokens, reply k has `replies[k]`."""

    prompts: Sequence[int]
    samples: int = 2
    replies: Sequence[int] = (3, 0, 7)
    branches: bool = False  # every third reply rewrites the conversation

    def first(self) -> list[Prompt]:
        speakers = [tuple((p, g) for g in range(self.samples)) for p in range(len(self.prompts))]
        return [Prompt(_ids(p, length=n), p, speakers[p]) for p, n in enumerate(self.prompts)]

    def next(self, speaker: Speaker, turns: Sequence[Turn]) -> Prompt | None:
        if len(turns) > len(self.replies) or turns[-1].finish != "stop":
            return None
        reply = _ids(*speaker, len(turns), length=self.replies[len(turns) - 1])
        before = [turns[-1].prompt_ids, turns[-1].completion_ids]
        if self.branches and sum((*speaker, len(turns))) % 3 == 0:
            before = [before[0][1:], before[1]]
        return Prompt(np.concatenate([*before, reply]), streams.turn(*speaker, len(turns)), (speaker,))


def _ids(*key: int, length: int) -> IntArray:
    return np.random.default_rng(key).integers(5, 500, length)


def talk(script: Script, opened: AbstractContextManager[Turns], lag: int = 0) -> tuple[Said, Turns]:
    """Every turn of every speaker. `lag`: replies come so many calls later than they could."""
    said: Said = {}
    late: list[list[Prompt]] = [[] for _ in range(lag)]
    with opened as turns:
        turns.submit(script.first())
        while True:
            ended = turns.ended()
            prompts = []
            for speaker, turn in ended:
                said.setdefault(speaker, []).append(turn)
                prompt = script.next(speaker, said[speaker])
                if prompt is None:
                    turns.forget(speaker)
                else:
                    prompts.append(prompt)
            late.append(prompts)
            turns.submit(late.pop(0))
            if not turns.running and not any(late):
                return said, turns


def engine_of(model: PreTrainedModel, room: float | None = None, rows: int = 4) -> NativeEngine:
    """`room`: its memory, in conversations of 120 tokens."""
    budget = Budget.of(model, 1.0)
    memory = None if room is None else room * budget.positions(1, 120, 1, 12) * budget.bytes_per_token / 2**30
    return NativeEngine(model, STOPS, RolloutConfig(max_sequences=rows, kv_cache_gib=memory))


def assert_same(said: Said, expected: Said) -> None:
    assert said.keys() == expected.keys()
    for speaker, turns in expected.items():
        assert len(said[speaker]) == len(turns)
        for turn, other in zip(said[speaker], turns, strict=True):
            np.testing.assert_array_equal(turn.prompt_ids, other.prompt_ids)
            np.testing.assert_array_equal(turn.completion_ids, other.completion_ids)
            np.testing.assert_allclose(turn.logprobs, other.logprobs, rtol=0, atol=1e-5)


@settings(max_examples=5, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    replies=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    room=st.one_of(st.none(), st.floats(1.0, 1.6)),
    rows=st.integers(1, 6),
    lag=st.integers(0, 2),
    branches=st.booleans(),
)
@pytest.mark.parametrize("name", ["qwen2", "mistral (window)", "lfm2"])
def test_what_is_kept_or_evicted_changes_nothing_that_is_said(
    name: str,
    folder: Path,
    prompts: list[int],
    replies: list[int],
    room: float | None,
    rows: int,
    lag: int,
    branches: bool,
) -> None:
    script = Script(prompts, replies=replies, branches=branches)
    model = model_of(name, folder)
    expected, _ = talk(script, in_rounds(engine_of(model), SAMPLING, seed=3))
    said, _ = talk(script, open_turns(engine_of(model, room, rows), SAMPLING, 3), lag)
    assert_same(said, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("gemma2", "gemma3", "gpt-oss", "llama4", "deepseek-v3", "gemma3n", "lfm2", "nemotron-h", "mamba2"),
        *("falcon-h1", "bamba", "qwen3.5", "qwen3-next", "granite4-h"),
    ],
)
def test_families_continue_what_they_kept(name: str, folder: Path) -> None:
    script, model = Script((1, 11, 30), samples=3), model_of(name, folder)
    expected, _ = talk(script, in_rounds(engine_of(model), SAMPLING, seed=3))
    said, turns = talk(script, open_turns(engine_of(model), SAMPLING, 3))
    assert isinstance(turns, Conversations)
    assert turns.core.read_tokens < sum(len(turn.prompt_ids) for of in said.values() for turn in of) / 2
    for speaker, of_speaker in expected.items():  # large logits of random models: rounding of 2e-5
        for turn, other in zip(said[speaker], of_speaker, strict=True):
            np.testing.assert_array_equal(turn.completion_ids, other.completion_ids)
            np.testing.assert_allclose(turn.logprobs, other.logprobs, rtol=0, atol=5e-5)


@pytest.mark.parametrize("opened", [in_rounds, open_turns])
def test_each_turn_ends_at_the_limits_of_its_own_prompt(
    opened: Callable[[NativeEngine, SamplingConfig, int], AbstractContextManager[Turns]], folder: Path
) -> None:
    def decode(tokens: Sequence[int]) -> str:
        return "".join(chr(1000 + token) for token in tokens)

    def said(*limits: tuple[int | None, tuple[str, ...]]) -> list[tuple[str, str]]:
        found: dict[Speaker, Turn] = {}
        with opened(engine, SAMPLING, 3) as turns:
            turns.submit([Prompt(ids, 0, ((p, 0),), most, stop) for p, (most, stop) in enumerate(limits)])
            while turns.running:
                found |= dict(turns.ended())
        return [(decode(found[p, 0].completion_ids.tolist()), found[p, 0].finish) for p in range(len(limits))]

    engine = NativeEngine(model_of("qwen2", folder), (), RolloutConfig(max_sequences=4), decode=decode)
    ids = _ids(7, length=9)
    ((whole, _),) = said((None, ()))
    assert len(whole) == SAMPLING.max_tokens
    end = next(i for i in range(4, len(whole)) if whole[i] not in whole[:i])
    stop = (whole[end], "not said")
    assert said((None, ()), (3, ()), (100, ()), (None, stop), (3, stop)) == [
        (whole, "length"),
        (whole[:3], "length"),
        (whole, "length"),
        (whole[: end + 1], "stop"),
        (whole[:3], "length"),
    ]


def test_a_reply_costs_its_own_tokens(folder: Path) -> None:
    """Read are the first prompts, once for all samples, and for each later turn the reply and the token before it."""
    script = Script((30, 12, 25), samples=2, replies=(4, 6))
    said, turns = talk(script, open_turns(engine_of(model_of("qwen2", folder)), SAMPLING, 3))
    replies = sum(1 + script.replies[k] for of_speaker in said.values() for k in range(len(of_speaker) - 1))
    assert isinstance(turns, Conversations)
    assert max(map(len, said.values())) == 3
    assert (turns.core.read_tokens, turns.core.evicted) == (30 + 12 + 25 + replies, 0)
    assert sum(turn.read or 0 for of_speaker in said.values() for turn in of_speaker) == turns.core.read_tokens


def test_memory_evicts_the_conversation_that_has_waited_longest(folder: Path) -> None:
    """Room for two or three conversations, of which 8 wait."""
    script, model = Script((50, 55, 60, 65), samples=2, replies=(9, 9)), model_of("qwen2", folder)
    expected, kept = talk(script, open_turns(engine_of(model), SAMPLING, 3), lag=1)
    said, turns = talk(script, open_turns(engine_of(model, 2.0), SAMPLING, 3), lag=1)
    assert isinstance(turns, Conversations)
    assert isinstance(kept, Conversations)
    assert turns.core.evicted > 0
    assert turns.core.read_tokens > kept.core.read_tokens
    assert sum(turn.read or 0 for of_speaker in said.values() for turn in of_speaker) == turns.core.read_tokens
    assert_same(said, expected)


def test_a_conversation_that_is_over_or_rewritten_is_not_kept(folder: Path) -> None:
    every_token = NativeEngine(model_of("qwen2", folder), range(512), RolloutConfig())  # ends a turn
    with open_turns(every_token, SAMPLING, 3) as turns:
        assert isinstance(turns, Conversations)
        turns.submit(Script((20, 20), samples=1).first())
        assert len(turns.ended()) == len(turns.core._kept) == 2
        turns.forget((1, 0))
        assert len(turns.core._kept) == 1
        turns.submit([Prompt(_ids(9, length=30), 77, ((0, 0),))])  # not what was said before
        assert len(turns.core._kept) == 0
        turns.ended()
        assert turns.core.read_tokens == 20 + 20 + 30


def test_a_mixer_that_cannot_go_on_reads_again(folder: Path) -> None:
    """Mamba-1 scans from zero."""
    script, model = Script((6, 9), samples=1), model_of("falcon-mamba", folder)
    expected, _ = talk(script, in_rounds(engine_of(model), SAMPLING, seed=3))
    said, turns = talk(script, open_turns(engine_of(model), SAMPLING, 3))
    assert isinstance(turns, Conversations)
    assert turns.core.read_tokens == sum(len(turn.prompt_ids) for of_speaker in said.values() for turn in of_speaker)
    assert_same(said, expected)
