"""Random streams: the seed or key of every generator, in one place, so that no two streams of a stage meet.

    engine.generate(prompts, sampling, samples=8, seed=streams.answers("step", seed, step, round))
    order = streams.generator("problems", seed=seed, epoch=2).permutation(size)
    rng = streams.text("knights", seed, "train", 5)

Every stream is a function of the recipe's seed and of a place in the run, so that there is no random state to save. An
argument outside of its range (`RANGES`) is an error; inside, `tests/base/test_streams.py` proves that the streams of
each of the four tables below are disjoint, for all seeds together:

- `ANSWERS`: 64-bit seeds of the engines, which hash them with the prompt and the sample. Disjoint intervals.
- `KEYS`: keys of NumPy generators. NumPy pads a key with zeros to four words, so that (7, 2) and (7, 2, 0) are the same
  stream. Disjoint within a stage; an RL stage and a supervised stage with the same seed share some of them, for draws
  that have nothing to do with each other.
- `TORCH`: seeds of PyTorch's global generator, which on a CPU uses only their lower 32 bits. Disjoint within a run.
- `TEXT`: `random.Random` of a text that starts with the stream's name. Python hashes the text with SHA-512.

Hashes (`eval_block`, `server_prompt`, `environment`) meet another stream only by a collision: the chance is that of two
random 62-bit numbers.
"""

from __future__ import annotations

import hashlib
import random
import zlib

import numpy as np

from hone.base.settings import UserError

SEEDS = 1 << 20  # seeds of recipes
STEPS = 1_000_003  # steps of a stage; also the distance between the answers of two seeds
ROUNDS = 1 << 9  # rounds of a step: the first, and refills
RESETS = (1 << 10) - 1  # hard resets of a stage
WORD = 1 << 32  # one word of a NumPy key

#: Argument -> its values.
RANGES = {
    "seed": range(SEEDS),
    "step": range(STEPS),
    "round": range(ROUNDS),
    "refill": range(1, ROUNDS),
    "epoch": range(WORD),
    "problem": range(WORD),
    "place": range(1 << 20),
    "sample": range(1 << 20),
    "turn": range(1 << 20),
    "level": range(1, WORD),
    "probe": range(WORD),
    "reset": range(RESETS + 1),
    "update": range(1 << 21),
    "rank": range(1 << 10),
}

# --- answers: seeds of engines --------------------------------------------------------------------------------------

#: Stream -> factor of the recipe's seed, and offset. A step adds its number, and a refill ROUND times its round.
ANSWERS = {
    "step": (STEPS, 0),
    "evaluation": (1, 1 << 40),
    "check": (1, 1 << 41),  # hone check
    "generation": (STEPS, 1 << 43),  # stage: generate
    "model check": (0, 1 << 59),  # hone.rollout.exactness
    "identity check": (0, 1 << 60),  # hone.rollout.identity
}
ROUND = 1 << 50


def answers(name: str, seed: int = 0, step: int = 0, round: int = 0) -> int:
    """The engine's seed for the answers of `ANSWERS[name]`. Raises UserError for a value out of range."""
    _check(seed=seed, step=step, round=round)
    factor, offset = ANSWERS[name]
    return factor * seed + offset + step + ROUND * round


def eval_block(seed: int, problem: int, sample: int) -> int:
    """The 63-bit seed of a block of `hone eval` that starts with this problem and sample."""
    return int.from_bytes(hashlib.sha256(f"hone eval {seed} {problem} {sample}".encode()).digest()[:8], "little") >> 1


def server_prompt(seed: int, prompt: int) -> int:
    """A 62-bit seed for each (seed, prompt); rollout servers count up from it for the samples of a prompt."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{prompt}".encode(), digest_size=8).digest(), "big") >> 2


#: What most OpenAI-compatible endpoints, and SGLang, accept as a seed. Streams of different runs can meet here.
ENDPOINT_SEEDS = 1 << 31


def endpoint(seed: int, problem: int = 0, sample: int = 0) -> int:
    """The seed of a request to an endpoint. The first 1009 samples of a problem have seeds that no other problem has,
    among the first two million problems."""
    return (seed + 1009 * problem + sample) % ENDPOINT_SEEDS


def turn(problem: int, sample: int, turn: int) -> int:
    """The stream of a turn within a batch of an engine; those of first turns from a common prompt are below 2**20.

    `problem` and `sample`: places in the batch.
    """
    _check(place=problem, sample=sample, turn=turn)
    return problem | (sample + 1) << 20 | turn << 42


def environment(seed: int, problem_id: str) -> int:
    """A 63-bit seed for the environment of a problem, in a batch that is sampled with `seed`."""
    return int.from_bytes(hashlib.sha256(f"environment {seed} {problem_id}".encode()).digest()[:8], "little") >> 1


# --- NumPy ----------------------------------------------------------------------------------------------------------

#: Stream -> its key: arguments by their names, and constants.
KEYS: dict[str, tuple[str | int, ...]] = {
    # stages rl and distil: hone.tasks.curriculum
    "problems": ("seed", "epoch"),  # their order
    "shares": ("seed", "step", 0, 1),  # which level gets the problem that is left over
    "refill": ("seed", "step", "refill"),  # problems that replace others
    "level": ("seed", "epoch", 1, "level"),  # the order of a level's problems
    # stage sft: hone.learn.examples, hone.stages.sft
    "styles": ("seed", 1),
    "example order": ("seed", 2, "epoch"),
    "validation styles": ("seed", 4),
    # stage generate: which right answer to keep
    "kept answer": ("seed", 3, "problem"),
    # outside of stages
    "probe tokens": (1 << 59, "probe"),  # hone.rollout.exactness
    "resampling": ("seed",),  # bootstrap intervals
}
#: Streams that are used together.
STAGES = (
    ("problems", "shares", "refill", "level"),
    ("styles", "example order", "validation styles"),
    ("kept answer",),
    ("probe tokens",),
    ("resampling",),
)


def generator(name: str, **fields: int) -> np.random.Generator:
    """The generator of `KEYS[name]`. Raises UserError for a value out of range."""
    _check(**fields)
    return np.random.default_rng([fields[part] if isinstance(part, str) else part for part in KEYS[name]])


def level_word(level: str) -> int:
    """The word of a level's name in the key of its stream."""
    return zlib.crc32(level.encode()) or 1


# --- PyTorch --------------------------------------------------------------------------------------------------------

#: Stream -> its lowest seed; each ends where the next one begins, the last at 2**32.
TORCH = {"weights": 0, "adapter": 1 << 30, "dropout": 1 << 31}


def weights(seed: int) -> int:
    """The seed of the initial weights of a model from scratch."""
    _check(seed=seed)
    return TORCH["weights"] + seed


def adapter(seed: int, reset: int) -> int:
    """The seed of an adapter's initial A. `reset`: hard resets so far."""
    _check(seed=seed, reset=reset)
    return TORCH["adapter"] + SEEDS * reset + seed


def dropout(seed: int, update: int, rank: int) -> int:
    """The seed of the dropout of an update in one process. Of one seed no two are equal; 31 bits are too few for all
    seeds, which are spread over them by a multiplication (Knuth's constant is odd)."""
    _check(seed=seed, update=update, rank=rank)
    place = (rank << 21) | update
    return TORCH["dropout"] + (place ^ (seed * 2_654_435_761 % (1 << 31)))


# --- Python ---------------------------------------------------------------------------------------------------------

#: First part of the text -> what it draws. Styles of worked answers are names too.
TEXT = {
    "knights": "puzzles",
    "countdown": "puzzles",
    "linear_algebra": "exercises",
    "reasoning_gym": "seeds of its data sets",
    "perturb": "changes of puzzles",
    "junk": "a probe of hone check",
    "careful": "worked answers",
    "terse": "worked answers",
    "calculator": "worked answers",
    "hasty": "worked answers",
}


def text(name: str, *parts: str | int) -> random.Random:
    """The generator of a stream of `TEXT`. Only the last part may contain a slash."""
    if name not in TEXT:
        raise ValueError(f"{name!r}: not in hone.base.streams.TEXT, which lists the streams; add a line for it there")
    if any("/" in str(part) for part in parts[:-1]):
        raise ValueError(f"{name}, {parts}: only the last part may contain a slash, or streams could meet")
    return random.Random("/".join(map(str, (name, *parts))))


def trace(seed: int, example: int) -> int:
    """The seed of a worked answer. Raises UserError for a seed out of range."""
    _check(seed=seed)
    return seed * STEPS + example


def _check(**fields: int) -> None:
    for name, value in fields.items():
        allowed = RANGES[name]
        if value not in allowed:
            raise UserError(
                f"{name} {value}: random streams are kept apart for {name}s from {allowed[0]} to {allowed[-1]:,}; "
                "give one of these"
            )
