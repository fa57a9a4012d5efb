"""One side of `train_step.py`: its own process, which prints what it measured as one line of JSON.

`make_models` writes what both sides load; `hone_child` and `trl_child` run steps and time their parts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

STOPS = 5  # tokens that end an answer in `varied`
LR = 1e-6


def seconds() -> float:
    """Seconds; of CPU time with --cpu-time."""
    return time.process_time() if "--cpu-time" in sys.argv else time.perf_counter()


# --- what both sides share --------------------------------------------------------------------


def make_models(folder: Path, architecture: str = "qwen2") -> None:
    from hone.model.tiny import create
    from hone.recipe.sections.model import TinyConfig

    small = {
        "architecture": architecture,
        "hidden_size": 256,
        "heads": 4,
        "kv_heads": 2,
        "mlp_size": 688,
        "init_std": 0.02,
    }
    create(folder / "step", TinyConfig(vocab_size=512, layers=4, **small), prompts(64), seed=0)
    create(folder / "memory", TinyConfig(vocab_size=151_936, layers=2, **small), prompts(64), seed=0)


def prompts(count: int) -> list[str]:
    """Puzzles in the public wording, about 150 tokens each."""
    from hone.tasks.knights.task import KnightsConfig, KnightsTask

    task = KnightsTask(KnightsConfig(name="knights", people=(3,), train=count), 0)
    return [problem.messages[-1]["content"] for problem in task.problems("train")]


def score_of(ids: list[int]) -> float:
    """Differs between any two answers, and costs nothing."""
    return sum(ids) % 1009 / 1009


def stop_ids(setting: str, eos: int) -> list[int]:
    return [eos, *range(300, 300 + STOPS - 1)] if setting == "varied" else [eos]


def peak_rss_bytes() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def given_answers(size: dict[str, int]) -> tuple[list[list[int]], list[list[list[int]]]]:
    """For `memory`: 4 prompts of 64 tokens, and 4 answers to each."""
    import numpy as np

    rng = np.random.default_rng(0)
    asked = rng.integers(300, 500, (4, 64)).tolist()
    return asked, rng.integers(300, 500, (4, 4, size["answer"])).tolist()


# --- hone -------------------------------------------------------------------------------------


def hone_child(setting: str, folder: Path, size: dict[str, int], arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from hone.learn.policy import Policy
    from hone.recipe.sections.model import ModelConfig
    from hone.recipe.sections.optim import OptimConfig
    from hone.recipe.sections.rollout import RolloutConfig
    from hone.rollout.native import NativeEngine

    torch.set_num_threads(arguments.threads)
    kind = "memory" if setting == "memory" else "step"
    policy = Policy.load(ModelConfig(path=str(folder / kind)), OptimConfig(lr=LR, betas=(0.9, 0.999)), 100)
    if setting == "memory":
        return hone_memory(policy, size)
    eos = policy.tokenizer.eos_token_id
    stops = stop_ids(setting, eos) if setting == "varied" else ()
    engine = NativeEngine(policy.model, stops, RolloutConfig())
    asked = [policy.tokenizer.encode(text) for text in prompts(64)]
    steps, count = [], size["prompts"]
    for step in range(1 + arguments.steps):
        chosen = [asked[(step * count + i) % len(asked)] for i in range(count)]
        steps.append(hone_step(policy, engine, chosen, size[setting], size["samples"], step))
    train = statistics.median(s["train"] for s in steps[1:])
    flops = statistics.median(s.pop("flops") for s in steps)
    return {
        "steps": steps[1:],
        "peak_rss_bytes": peak_rss_bytes(),
        "train_share": flops / train / ceiling(),
    }


def hone_step(
    policy: Any, engine: Any, asked: list[list[int]], longest: int, samples: int, seed: int
) -> dict[str, float]:
    import numpy as np

    from hone.recipe.sections.rollout import SamplingConfig

    sampling = SamplingConfig(max_tokens=longest)
    start = seconds()
    turns = engine.generate([np.asarray(ids) for ids in asked], sampling, samples=samples, seed=seed)
    generated = seconds()
    groups = groups_of(turns)
    scored = seconds()
    batch, stats = hone_update(policy, groups, sampling, 4096)
    end = seconds()
    lengths = [len(turn.completion_ids) for group in turns for turn in group]
    assert stats.num_tokens == sum(lengths)
    return {
        "step": end - start,
        "generate": generated - start,
        "score": scored - generated,
        "train": end - scored,
        "tokens": sum(lengths),
        "longest": max(lengths),
        "flops": sum(training_flops(policy.model, m) for update in batch.minibatches for m in update),
    }


def groups_of(turns: list[list[Any]]) -> list[Any]:
    from hone.types import Group, Problem, Reward, Rollout

    groups = []
    for p, group in enumerate(turns):
        problem = Problem(f"p{p}", "benchmark", ({"role": "user", "content": ""},), None)
        answers = tuple(Rollout(problem.id, g, (turn,), "") for g, turn in enumerate(group))
        rewards = tuple(Reward(score_of(turn.completion_ids.tolist()), {}, "wrong") for turn in group)
        groups.append(Group(problem, answers, rewards))
    return groups


def hone_update(policy: Any, groups: list[Any], sampling: Any, budget: int) -> tuple[Any, Any]:

    from hone.learn.batches import prepare
    from hone.learn.pack import Packer
    from hone.recipe.sections.algo import AlgoConfig

    batch = prepare(groups, policy, None, AlgoConfig(), sampling, Packer(budget))
    return batch, policy.update(batch.minibatches, AlgoConfig(), 1.0)


def hone_memory(policy: Any, size: dict[str, int]) -> dict[str, Any]:
    import numpy as np

    from hone.recipe.sections.rollout import SamplingConfig
    from hone.types import Turn

    asked, answers = given_answers(size)
    turns = [
        [Turn(np.asarray(q), np.asarray(a), np.zeros(len(a), np.float32), "length", 0) for a in group]
        for q, group in zip(asked, answers, strict=True)
    ]
    before = rss_bytes()
    hone_update(policy, groups_of(turns), SamplingConfig(max_tokens=size["answer"]), 4096)
    return {"added_bytes": peak_rss_bytes() - before, "peak_rss_bytes": peak_rss_bytes()}


def training_flops(model: Any, batch: Any) -> float:
    """Of the products, forward and backward (twice forward): weights on packed tokens, head, attention, and the states
    of recurrent mixers, which every token reads, changes and reads again."""
    config = model.config
    weights = sum(p.numel() for name, p in model.named_parameters() if p.ndim >= 2 and "embed" not in name)
    head = config.vocab_size * config.hidden_size * len(batch.targets)
    kinds = config.layer_types
    attended = kinds.count("full_attention") * pairs(batch.layout, None)
    attended += kinds.count("sliding_attention") * pairs(batch.layout, getattr(config, "sliding_window", None))
    attention = 2 * config.hidden_size * attended
    return 6.0 * ((weights + 3 * state_size(model)) * len(batch.inputs) + head + attention)


def pairs(layout: Any, window: int | None) -> int:
    """Pairs of a token and one that it attends to; the position of a completion's first is the prompt's length."""
    spans = [(0, block.prompt_len) for block in layout]
    spans += [(block.prompt_len, block.prompt_len + n) for block in layout for n in block.completion_lens]
    return sum(min(i + 1, window or i + 1) for first, end in spans for i in range(first, end))


def state_size(model: Any) -> int:
    """Numbers in the recurrent states of one sequence, over all mixers; convolutions are counted by their weights."""
    import torch

    from hone.model import mixers

    total = 0
    for mixer in mixers.recurrent(model):
        states = mixers.States()
        with torch.no_grad():
            mixers.apply(mixer, torch.zeros(1, 2, model.config.hidden_size), states)
        total += sum(t.numel() for t in states.recurrent_states.values())
    return total


def ceiling() -> float:
    """Floating-point operations per second of the fastest product of this model's shapes, measured now."""
    import torch

    from hone.model.linear import OneDNNLinear, available

    product = (lambda x, w: OneDNNLinear.apply(x, w, None)) if available() else torch.nn.functional.linear
    best = 0.0
    for n, k in ((688, 256), (256, 688), (256, 256)):
        x, w = torch.randn(4096, k), torch.randn(n, k)
        for _ in range(20):
            start = seconds()
            product(x, w)
            best = max(best, 2 * 4096 * n * k / (seconds() - start))
    return best


# --- TRL --------------------------------------------------------------------------------------


def trl_child(setting: str, folder: Path, size: dict[str, int], arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.set_num_threads(arguments.threads)
    memory = setting == "memory"
    trainer, clock = trl_trainer(setting, folder, size, 1 if memory else 1 + arguments.steps)
    if memory:
        before = rss_bytes()
        trainer.train()
        return {"added_bytes": peak_rss_bytes() - before, "peak_rss_bytes": peak_rss_bytes()}
    assert clock is not None
    trainer.train()
    steps = [{**s, "train": s["step"] - s["generate"] - s["score"]} for s in clock.steps]
    return {"steps": steps[1:], "peak_rss_bytes": peak_rss_bytes()}


def trl_trainer(setting: str, folder: Path, size: dict[str, int], steps: int) -> tuple[Any, Clock | None]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    memory = setting == "memory"
    path = folder / ("memory" if memory else "step")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    model.generation_config.eos_token_id = stop_ids(setting, tokenizer.eos_token_id)
    samples = 4 if memory else size["samples"]
    batch = 16 if memory else size["prompts"] * samples
    longest = size["answer"] if memory else size[setting]
    config = GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=min(size["micro"], batch),
        gradient_accumulation_steps=batch // min(size["micro"], batch),
        num_generations=samples,
        max_completion_length=longest,
        generation_kwargs={"min_new_tokens": longest} if setting == "fixed" else None,
        max_steps=steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="dapo",
        temperature=1.0,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=False,
        logging_steps=10_000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
        seed=0,
    )
    rollout = {"rollout_func": given_rollouts(size)} if memory else {}
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completion_ids, **_: [score_of(list(ids)) for ids in completion_ids],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts(64)}),
        **rollout,
    )
    return trainer, None if memory else Clock(trainer)


def given_rollouts(size: dict[str, int]) -> Any:
    asked, answers = given_answers(size)

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        flat = [answer for group in answers for answer in group]
        assert len(prompts) == len(flat)
        return {
            "prompt_ids": [q for q in asked for _ in range(4)],
            "completion_ids": flat,
            "logprobs": [[0.0] * len(a) for a in flat],
        }

    return rollouts


class Clock:
    """Times the parts of TRL's steps: what lies between the begin and the end of a step, by wrapping its methods."""

    def __init__(self, trainer: Any) -> None:
        from transformers import TrainerCallback

        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = {}
        clock = self

        class Callback(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                clock._now = {"start": seconds()}

            def on_step_end(self, *_: Any, **__: Any) -> None:
                now = clock._now
                step = seconds() - now.pop("start")
                clock.steps.append({"step": step, **now, "score": now.pop("both") - now["generate"]})

        trainer.add_callback(Callback())
        self._wrap(trainer, "_generate_single_turn", "generate")
        self._wrap(trainer, "_generate_and_score_completions", "both")

    def _wrap(self, trainer: Any, name: str, key: str) -> None:
        inner = getattr(trainer, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = seconds()
            result = inner(*args, **kwargs)
            self._now[key] = self._now.get(key, 0.0) + seconds() - start
            if key == "generate":
                lengths = [len(ids) for ids in result[0]]
                self._now |= {"tokens": sum(lengths), "longest": max(lengths)}
            return result

        setattr(trainer, name, timed)


CHILDREN = {"hone": hone_child, "trl": trl_child}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=CHILDREN)
    parser.add_argument("setting", choices=("fixed", "varied", "memory"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=json.loads, help="see `train_step.shape`")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    print(json.dumps(CHILDREN[arguments.side](arguments.setting, arguments.folder, arguments.size, arguments)))


if __name__ == "__main__":
    main()
