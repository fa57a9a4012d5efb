"""No two random streams meet: by intervals, by the words of keys, and by drawing arguments at random."""

import ast
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hone.base import streams
from hone.base.settings import UserError
from hone.tasks import TASKS

HONE = Path(streams.__file__).resolve().parents[1]
LAST = {name: values[-1] for name, values in streams.RANGES.items()}


def one_of(name: str) -> st.SearchStrategy[int]:
    values = streams.RANGES[name]
    return st.integers(values[0], values[-1])


# --- seeds of engines ---------------------------------------------------------------------------


def test_the_answers_of_steps_evaluations_checks_and_teachers_are_in_intervals_that_do_not_overlap():
    spans = {}
    for round in range(streams.ROUNDS):  # a seed grows with each argument, so its ends are those of the arguments
        first, last = (
            streams.answers("step", seed, step, round) for seed, step in ((0, 0), (LAST["seed"], LAST["step"]))
        )
        spans[f"round {round}"] = first, last
    for name in set(streams.ANSWERS) - {"step"}:
        spans[name] = streams.answers(name), streams.answers(name, LAST["seed"])
    ordered = sorted(spans.values())
    assert all(last < first for (_, last), (first, _) in itertools.pairwise(ordered))
    assert ordered[-1][1] < 1 << 63


@given(one_of("seed"), one_of("step"), one_of("round"))
def test_seed_step_and_round_can_be_read_back_from_the_seed_of_the_answers(seed, step, round):
    number = streams.answers("step", seed, step, round)
    assert (number >> 50, *divmod(number & (1 << 50) - 1, 1_000_003)) == (round, seed, step)


def test_the_seeds_of_earlier_releases():
    """Recorded runs can be repeated."""
    assert streams.answers("step", 2, 5, 3) == 2 * 1_000_003 + 5 + (3 << 50)
    assert streams.answers("evaluation", 7) == 7 + (1 << 40)
    assert streams.answers("check", 7) == 7 + (1 << 41)
    assert streams.answers("generation", 7) == 7 * 1_000_003 + (1 << 43)
    assert streams.eval_block(0, 0, 0) == 4577662860535709657
    assert streams.generator("example order", seed=3, epoch=1).random() == np.random.default_rng((3, 2, 1)).random()
    assert streams.generator("problems", seed=3, epoch=1).random() == np.random.default_rng((3, 1)).random()
    assert streams.text("knights", 1, 2, "train", 3).random() == random.Random("knights/1/2/train/3").random()


@given(st.integers(0, 2**62), st.integers(0, 1_000_000), st.integers(0, 1008))
def test_an_endpoint_gets_another_seed_for_each_sample_and_problem(seed, problem, sample):
    place = (streams.endpoint(seed, problem, sample) - streams.endpoint(seed)) % streams.ENDPOINT_SEEDS
    assert divmod(place, 1009) == (problem, sample)


# --- keys of NumPy ------------------------------------------------------------------------------


def words(name: str) -> list[range]:
    """The values of each of the four words of a key."""
    parts = [streams.RANGES[p] if isinstance(p, str) else range(p, p + 1) for p in streams.KEYS[name]]
    if parts[0].start >= 1 << 32:  # a constant of two words
        low, high = parts[0].start % (1 << 32), parts[0].start >> 32
        parts = [range(low, low + 1), range(high, high + 1), *parts[1:]]
    return [*parts, *[range(1)] * (4 - len(parts))]


def test_keys_of_streams_that_are_used_together_differ_in_a_word():
    assert sorted(itertools.chain(*streams.STAGES)) == sorted(streams.KEYS)
    for stage in streams.STAGES:
        for one, other in itertools.combinations(stage, 2):
            apart = [a.stop <= b.start or b.stop <= a.start for a, b in zip(words(one), words(other), strict=True)]
            assert any(apart), (one, other)


def test_numpy_pads_keys_with_zeros_to_four_words():
    """The reason why the words of a key are compared with the zeros behind it."""
    same, other = (
        [np.random.default_rng(key).random() for key in keys] for keys in (((7, 2), (7, 2, 0)), ((7, 2, 0, 1),))
    )
    assert same[0] == same[1] != other[0]


@given(st.data())
def test_two_places_of_a_stage_never_share_a_generator(data):
    names = data.draw(st.sampled_from([stage for stage in streams.STAGES if len(stage) > 1]))
    states = {}
    for _ in range(6):
        name = data.draw(st.sampled_from(names))
        fields = {
            p: data.draw(st.integers(streams.RANGES[p][0], min(LAST[p], 9)))
            for p in streams.KEYS[name]
            if isinstance(p, str)
        }
        place = (name, *fields.items())
        state = streams.generator(name, **fields).bit_generator.state["state"]["state"]
        assert states.setdefault(state, place) == place


# --- seeds of PyTorch ---------------------------------------------------------------------------


def test_pytorch_seeds_a_cpu_generator_with_32_bits():
    """The reason why the streams of TORCH are within 32 bits."""
    draws = [torch.rand(4, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5 + (1 << 40))]
    assert torch.equal(*draws)


@given(one_of("seed"), one_of("reset"), one_of("update"), one_of("rank"))
def test_weights_adapters_and_dropout_have_intervals_of_their_own(seed, reset, update, rank):
    assert 0 <= streams.weights(seed) < 1 << 30 <= streams.adapter(seed, reset) < 1 << 31
    assert 1 << 31 <= streams.dropout(seed, update, rank) < 1 << 32
    assert divmod(streams.adapter(seed, reset) - (1 << 30), 1 << 20) == (reset, seed)
    place = streams.dropout(seed, 0, 0) ^ streams.dropout(seed, update, rank)  # one-to-one for each seed
    assert divmod(place, 1 << 21) == (rank, update)


# --- texts --------------------------------------------------------------------------------------


def test_texts_start_with_a_name_that_no_other_stream_has():
    names = list(streams.TEXT)
    assert not any("/" in name for name in names)
    assert (
        streams.text("hasty", 3, "knights-train-0001").random() == random.Random("hasty/3/knights-train-0001").random()
    )
    with pytest.raises(ValueError, match="a slash"):
        streams.text("knights", "1/2", "train")
    with pytest.raises(ValueError, match="'sums': not in"):
        streams.text("sums", 0, "train")
    styles = {style for kind in TASKS.values() for style in getattr(kind.task, "trace_styles", ())}
    assert not styles & set(TASKS)


# --- errors, and the only home ------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: streams.answers("step", 1 << 20),
        lambda: streams.answers("step", 0, 1_000_003),
        lambda: streams.answers("step", 0, 0, 512),
        lambda: streams.answers("evaluation", -1),
        lambda: streams.generator("refill", seed=0, step=0, refill=0),
        lambda: streams.generator("kept answer", seed=0, problem=1 << 32),
        lambda: streams.adapter(0, 1024),
        lambda: streams.dropout(0, 1 << 21, 0),
        lambda: streams.trace(1 << 20, 0),
    ],
)
def test_out_of_range(call):
    with pytest.raises(UserError, match=r"random streams are kept apart for \w+s from \d+ to"):
        call()


def test_every_generator_of_the_package_is_made_in_one_module():
    """`manual_seed` of PyTorch takes a seed from there; planning measures time and memory with seed 0."""
    wrong = []
    for file in sorted(HONE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            made = name.endswith(("default_rng", "RandomState", "SeedSequence")) or name in ("random.Random", "Random")
            if made and file.name != "streams.py":
                wrong.append(f"{file.relative_to(HONE)}:{node.lineno} {name}")
    assert not wrong
