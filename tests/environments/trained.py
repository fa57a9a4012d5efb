"""Trains a tiny chat model with a program or other environment, and compares what was sampled with what was trained."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.numpy import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from hone.base import jsonl, streams
from hone.environments import play
from hone.environments.recorder import Line
from hone.recipe.load import load
from hone.recipe.sections.prompt import PromptConfig
from hone.rollout.prompts import Renderer
from hone.rollout.turns import open_turns
from hone.stages import pipeline
from tests.environments.templates import tokenizer_of


def chat_model(folder: Path) -> Path:
    """An untrained model of bytes with Qwen2.5's chat template."""
    torch.manual_seed(0)
    tokenizer = tokenizer_of("Qwen2.5")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    end = tokenizer.eos_token_id
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=1,
        max_position_embeddings=16384,
        eos_token_id=end,
        bos_token_id=end,
        **sizes,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def recipe_of(folder: Path, environment: Any, **settings: Any) -> Any:
    """A recipe of three steps; `folder` gets the model, the recipe and the run."""
    whole = {
        "name": "small",
        "runs": str(folder / "runs"),
        "stage": "rl",
        "steps": 3,
        "model": {"path": str(chat_model(folder / "model"))},
        "task": {"name": "countdown", "train": 12, "validation": 4, "test": 4},
        "prompt": {"system": ""},
        "environment": environment,
        "prompts_per_step": 1,
        "samples_per_prompt": 2,
        "tokens_per_microbatch": 16384,
        "sampling": {"max_tokens": 24},
        "reward": {"parts": {"environment": 1.0}},
        "optim": {"lr": 1.0e-3},
        "checkpoint": {"every": 1, "keep": 4},
        "eval": {"every": 0, "problems": 1, "sampling": {"max_tokens": 24}},
        **settings,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(whole))
    return load(folder / "recipe.yaml")


class Ears:
    """Hears what the engine samples and what programs are answered."""

    def __init__(self, monkeypatch: Any) -> None:
        self.turns: list[tuple[int, Any]] = []  # (seed of the batch, turn)
        self.answers: list[Any] = []
        answer = Line.answer

        @contextmanager
        def heard(engine: Any, sampling: Any, seed: int, **named: Any) -> Any:
            with open_turns(engine, sampling, seed, **named) as turns:
                ended = turns.ended

                def hear() -> Any:
                    new = ended()
                    self.turns += [(seed, turn) for _, turn in new]
                    return new

                turns.ended = hear  # type: ignore[method-assign]
                yield turns

        def answered(line: Any, message: Any) -> None:
            self.answers.append(message)
            answer(line, message)

        monkeypatch.setattr(play, "open_turns", heard)
        monkeypatch.setattr(Line, "answer", answered)


def check_run(recipe: Any, ears: Ears) -> Path:
    """Train. Every turn that was sampled for a step is trained once, exactly, in whole turns; and nothing else is."""
    run = pipeline.run(recipe)
    assert len(jsonl.read(run / "metrics.jsonl")) == 3
    for step in range(3):
        notes = [row.get("note") for row in jsonl.read(run / "rollouts" / f"step_{step:06d}.jsonl")]
        assert notes == [None] * len(notes)
        own = streams.answers("step", recipe.seed, step)
        left = [(turn.completion_ids.tolist(), turn.logprobs.tolist()) for seed, turn in ears.turns if seed == own]
        for ids, logprobs in trained(run, step):
            while ids:
                turn = next(t for t in left if t == (ids[: len(t[0])], logprobs[: len(t[0])]))
                left.remove(turn)
                ids, logprobs = ids[len(turn[0]) :], logprobs[len(turn[0]) :]
        assert left == []
    renderer = Renderer(tokenizer_of("Qwen2.5"), PromptConfig(), "")
    texts = [renderer.text(turn.completion_ids) for _, turn in ears.turns]
    assert all(any(message["content"] in text for text in texts) for message in ears.answers)
    return run


def trained(run: Path, step: int) -> list[tuple[list[int], list[float]]]:
    """(ids, log-probs) of the trained tokens of each sample of a step."""
    tokens = load_file(run / "tokens" / f"step_{step:06d}.safetensors")
    cuts = np.cumsum(tokens["lengths"])[:-1]
    parts = (np.split(tokens[name], cuts) for name in ("ids", "sampled_logprobs"))
    return [(ids.tolist(), logprobs.tolist()) for ids, logprobs in zip(*parts, strict=True)]


def bits(run: Path) -> dict[str, bytes]:
    """The files of a run that must not depend on whether it was killed."""
    patterns = ("metrics.jsonl", "evals.jsonl", "rollouts/*", "tokens/*", "model/model.safetensors")
    return {str(p.relative_to(run)): p.read_bytes() for pattern in patterns for p in sorted(run.glob(pattern))}
