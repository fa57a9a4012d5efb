"""What environments cost: reading a reply, the layer itself, and environments that hang, crash or answer nonsense.

    .venv/bin/python benchmarks/environments.py                    # all three, about five minutes with one thread
    .venv/bin/python benchmarks/environments.py --only reading --turns 12 --reply 64

Random models in float32. `reading`: 8 conversations, whose turns are one token each, so that time is spent on reading:
tokens that were computed and seconds for each turn, with what was read kept, and with every conversation read again.
`overhead`: 32 prompts x 8 answers of 64 tokens, by the engine alone, and as episodes of one turn, without an
environment and with one whose step does nothing, in a thread; rounds alternate, and ratios are paired. `hostile`:
1 000 episodes of three turns, of which 50 hang, crash, answer nonsense or something huge.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from hone.base import streams
from hone.environments.base import Environment, Observation
from hone.environments.play import Episodes
from hone.model.tiny import train_tokenizer
from hone.recipe.sections.environment import EnvironmentConfig
from hone.recipe.sections.prompt import PromptConfig
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
from hone.rollout.native.conversations import Conversations
from hone.rollout.native.engine import NativeEngine
from hone.rollout.prompts import Renderer
from hone.rollout.turns import Prompt, Turns, in_rounds, open_turns
from hone.types import Problem

WORDS = ["one two three four five six seven eight nine ten what is the sum of these numbers please"]
VOCABULARY = 512


def model_of(width: int, layers: int) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    heads = max(2, width // 64)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval()


# --- reading a reply -----------------------------------------------------------------------------


def reading(turns: int, reply: int) -> list[dict[str, float]]:
    """A row for each turn: the length of the conversations, and the tokens read and seconds of both forms."""
    model = model_of(512, 8)
    engine = NativeEngine(model, range(VOCABULARY), RolloutConfig())  # every token ends a turn
    sampling = SamplingConfig(max_tokens=1)
    kept = _conversations(open_turns(engine, sampling, 0), turns, reply)
    again = _conversations(in_rounds(engine, sampling, 0), turns, reply)
    rows = []
    for turn, ((length, tokens, seconds), (_, all_tokens, all_seconds)) in enumerate(zip(kept, again, strict=True)):
        rows.append(
            {
                "turn": turn + 1,
                "tokens of a conversation": length,
                "read, kept": tokens,
                "read, again": all_tokens,
                "seconds, kept": round(seconds, 4),
                "seconds, again": round(all_seconds, 4),
            }
        )
    return rows


def _conversations(
    opened: AbstractContextManager[Turns], turns: int, reply: int, count: int = 8
) -> list[tuple[int, int, float]]:
    """For each turn: tokens of a conversation, tokens read for all of them, seconds."""
    rng = np.random.default_rng(0)
    prompts = [Prompt(rng.integers(0, VOCABULARY, reply), p, ((p, 0),)) for p in range(count)]
    rows = []
    read = 0
    with opened as table:
        for turn in range(turns):
            started = time.perf_counter()
            table.submit(prompts)
            ended = []
            while table.running:
                ended += table.ended()
            seconds = time.perf_counter() - started
            total = sum(len(prompt.ids) for prompt in prompts)
            before, read = read, table.core.read_tokens if isinstance(table, Conversations) else read + total
            rows.append((len(prompts[0].ids), read - before, seconds))
            prompts = [
                Prompt(
                    np.concatenate([said.prompt_ids, said.completion_ids, rng.integers(0, VOCABULARY, reply)]),
                    streams.turn(*speaker, turn + 1),
                    (speaker,),
                )
                for speaker, said in ended
            ]
    return rows


# --- the layer itself ----------------------------------------------------------------------------


class Nothing(Environment):
    """Answers nothing, and ends."""

    def step(self, message):  # type: ignore[no-untyped-def]
        return Observation(done=True)


def overhead(rounds: int, width: int, layers: int) -> dict[str, float]:
    """Processor seconds of the engine alone (median), and the time of episodes relative to it (medians of paired
    ratios): of the processor, and on the clock."""
    tokenizer = _tokenizer()
    renderer = Renderer(tokenizer, PromptConfig(style="raw", system="", template="{user}\n"), "")
    engine = NativeEngine(model_of(width, layers), [VOCABULARY - 1], RolloutConfig())
    sampling = SamplingConfig(max_tokens=64)
    problems = [Problem(f"p{i}", "t", ({"role": "user", "content": f"{WORDS[0]} {i}"},), None) for i in range(32)]
    prompts = [renderer.messages_ids(problem.messages) for problem in problems]
    sides: dict[str, Callable[[int], object]] = {
        "engine": lambda seed: engine.generate(prompts, sampling, samples=8, seed=seed),
        "episodes": lambda seed: Episodes(renderer).sample(problems, engine, sampling, samples=8, seed=seed),
        "environment": lambda seed: Episodes(renderer, Nothing).sample(
            problems, engine, sampling, samples=8, seed=seed
        ),
    }
    for side in sides.values():
        side(0)
    clocks = {"CPU": time.process_time, "wall": time.perf_counter}
    seconds: dict[tuple[str, str], list[float]] = {(name, clock): [] for name in sides for clock in clocks}
    for seed in range(rounds):
        for name, side in sides.items():
            started = {clock: read() for clock, read in clocks.items()}
            side(seed)
            for clock, read in clocks.items():
                seconds[name, clock].append(read() - started[clock])
    ratios = {
        f"{name} / engine, {clock}": round(
            statistics.median(a / b for a, b in zip(seconds[name, clock], seconds["engine", clock], strict=True)), 4
        )
        for name in ("episodes", "environment")
        for clock in clocks
    }
    return {"engine, CPU seconds": round(statistics.median(seconds["engine", "CPU"]), 3), **ratios}


def _tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(WORDS * 50, VOCABULARY)


# --- hostile environments ------------------------------------------------------------------------


class Hostile(Environment):
    """Three turns; every twentieth problem hangs, crashes, answers nonsense or something huge in its second turn."""

    def reset(self, problem, seed):  # type: ignore[no-untyped-def]
        number = int(problem.id)
        self.deed = number // 20 % 5 if number % 20 == 0 else None
        self.left = 3

    def step(self, message):  # type: ignore[no-untyped-def]
        self.left -= 1
        if self.left == 1 and self.deed == 0:
            time.sleep(120)
        if self.left == 1 and self.deed == 1:
            raise RuntimeError("crashed")
        if self.left == 1 and self.deed == 2:
            return "nonsense"
        if self.left == 1 and self.deed == 3:
            return Observation(({"role": "user", "content": "huge " * 200_000},))
        if self.left == 1 and self.deed == 4:
            raise SystemExit(1)
        return Observation(({"role": "user", "content": f"{self.left} to go"},), done=self.left == 0)


ENDS = {0: "environment_timeout", 1: "environment_error", 2: "environment_error", 3: "max_tokens"}


def hostile(timeout: float = 2.0) -> dict[str, float | int]:
    """How long it takes, and how many episodes ended as they should."""
    renderer = Renderer(_tokenizer(), PromptConfig(style="raw", system="", template="{user}\n"), "")
    engine = NativeEngine(model_of(128, 2), range(VOCABULARY), RolloutConfig())
    config = EnvironmentConfig(timeout=timeout, max_turns=4)
    problems = [Problem(str(i), "t", ({"role": "user", "content": f"{WORDS[0]} {i}"},), None) for i in range(1000)]
    started = time.perf_counter()
    groups = Episodes(renderer, Hostile, config).sample(
        problems, engine, SamplingConfig(max_tokens=4), samples=1, seed=0
    )
    seconds = time.perf_counter() - started
    right = 0
    for i, (rollout,) in enumerate(groups):
        expected = "done" if i % 20 else ENDS.get(i // 20 % 5, "environment_error")
        right += rollout.episode.end == expected and rollout.problem_id == str(i)
    return {"episodes": len(groups), "right": right, "seconds": round(seconds, 1), "timeout": timeout}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["reading", "overhead", "hostile"])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--reply", type=int, default=64, help="tokens of a reply")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only in (None, "reading"):
        for row in reading(arguments.turns, arguments.reply):
            print(json.dumps(row))
    if arguments.only in (None, "overhead"):
        for width, layers in ((128, 4), (512, 8)):
            print(json.dumps({"width": width, "layers": layers, **overhead(arguments.rounds, width, layers)}))
    if arguments.only in (None, "hostile"):
        print(json.dumps(hostile()))


if __name__ == "__main__":
    main()
