"""Random and mutated completions through every parser and every reward: nothing raises, nothing is slow.

    .venv/bin/python benchmarks/fuzz.py                    # 100 000 completions
    .venv/bin/python benchmarks/fuzz.py --count 1000000 --seed 7
    .venv/bin/python benchmarks/fuzz.py --countdown 2000   # also: countdown against an exhaustive solver

Half of the completions are mutated from right ones, half built from fragments that parsers look for; one in fifty is
100 000 characters long, mostly by repetition. A limit that was passed is tried again: only what is slow three times
counts.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial

import numpy as np

from hone.base.settings import UserError
from hone.grade.answers import equivalent
from hone.grade.extract import MAX_ANSWER, extract
from hone.grade.parse import completion, parse
from hone.grade.restated import is_restated
from hone.rewards import REWARDS, make_reward
from hone.rewards.config import RewardConfig
from hone.rewards.gold import number, written_numbers
from hone.rewards.numeric import after_hashes, boxed, last_number
from hone.rewards.perplexity import leaks
from hone.tasks.base import Task
from hone.tasks.countdown import arithmetic
from hone.tasks.countdown.task import CountdownConfig, CountdownTask
from hone.tasks.knights.task import KnightsConfig, KnightsTask
from hone.tasks.knights.text import read_roles
from hone.tasks.linear_algebra.matrices import parse_matrix
from hone.tasks.linear_algebra.task import LinearAlgebraConfig, LinearAlgebraTask
from hone.types import Grade, Problem, Rollout, Turn

LIMIT = 0.05  # seconds
LONG = 100_000  # characters

FRAGMENTS = (
    *(
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "<answer",
        "answer>",
        "\\boxed{",
        "\\box{",
        "\\boxed {",
        "{",
        "}",
    ),
    *(
        "####",
        "#### 12",
        "####$1,2",
        "Zoey",
        "Oliver",
        " is a knight",
        " is a knave",
        "knight",
        "(1) ",
        "\n",
        " ",
        "\t",
    ),
    *("1", "12", "1,234.5", "-7", "9" * 30, "1/2", "(", ")", "+", "-", "*", "/", "**", "=", ".", ",", "$", "%", "e9"),
    *("\u0301", "\u200b", "\u4e2d", "\u0438", "\U0001d7d9", "\uff11", "\u2212", "\ufdfa", "\x00", "\u2028"),
    # Letters that match [a-z] where case is ignored, and where words are read in any case.
    *(
        "\u0130",
        "\u0131",
        "\u017f",
        "\u212a",
        " Sep 5",
        "\u017fep ",
        " 1:03 PM",
        "x + ",
        "thirty-\u017fix",
        " m\u0131les",
    ),
    *("Assistant:", "<|im_end|>", "\\frac{1}{2}", "\\text{", "'", '"', "\\", "&", "\r\n", "this is thinking process"),
)


#: Recorded answers that given ones are compared with.
GOLD = ("1234.5", "\\frac{1}{2}", "(1, 2]", "x^2 + 1", "Zoey")


class Number:
    """The smallest task whose answer is a number."""

    name, system = "number", ""
    problem = Problem(
        "n", "number", ({"role": "user", "content": "How many? 12"},), "1234.5", reference="so #### 1234.5"
    )

    def problems(self, split: str) -> list[Problem]:
        return [self.problem]

    def grade(self, problem: Problem, text: str) -> Grade:
        value = last_number(text)
        return Grade("malformed") if value is None else Grade("correct" if value == number("1234.5") else "wrong")


class Answerer:
    """Says the same of every context."""

    def logprobs_all(self, asked, cue):  # type: ignore[no-untyped-def]
        return [[np.full(3, -0.5 - 0.1 * bool(context), np.float32) for context in one.contexts] for one in asked]


def tasks() -> list[Task]:
    return [
        KnightsTask(KnightsConfig(people=(2, 3, 5), train=30, validation=0, test=0)),
        CountdownTask(CountdownConfig(train=30, validation=0, test=0)),
        LinearAlgebraTask(LinearAlgebraConfig(train=30, validation=0, test=0)),
        Number(),  # type: ignore[list-item]
    ]


def rewards(task: Task) -> dict[str, Callable[[Problem, Rollout], object]]:
    """Every reward that fits the task, by name."""
    found = {}
    for name in REWARDS:
        if name == "judge":  # it parses nothing of ours: a server answers
            continue
        more = {"overlong": {"max_tokens": 100}} if name == "overlong" else {}
        try:
            reward = make_reward(RewardConfig(parts={name: 1.0}, **more), task, Answerer())
        except UserError:  # it does not fit
            continue
        found[name] = lambda problem, rollout, reward=reward: reward(problem, [rollout])
    return found


def parsers(problem: Problem) -> dict[str, Callable[[str], object]]:
    def expression(text: str) -> object:
        try:
            return arithmetic.compute(arithmetic.parse(text))
        except (ValueError, ZeroDivisionError):  # what it says of anything that is no arithmetic
            return None

    def matrix(text: str) -> object:
        try:
            return parse_matrix(text)
        except ValueError:  # what it says of anything that is no matrix
            return None

    return {
        "parse": parse,
        "boxed": boxed,
        "after_hashes": after_hashes,
        "last_number": last_number,
        "written_numbers": written_numbers,
        "number": number,
        "leaks": lambda text: leaks(text, "1234.5") or leaks(text, "Zoey is a knight"),
        "arithmetic": expression,
        "matrix": matrix,
        "roles": lambda text: read_roles(text, ("Zoey", "Oliver")),
        "extract": extract,
        "extract strictly": partial(extract, strict=True),
        "restated": lambda text: [is_restated(text, gold, text[:MAX_ANSWER]) for gold in GOLD],
        "equivalent": lambda text: [equivalent(gold, text[:MAX_ANSWER]) for gold in GOLD],
    }


def completions(rng: random.Random, seeds: list[str]) -> Iterator[str]:
    """Without end."""
    while True:
        text = (
            mutated(rng, rng.choice(seeds))
            if rng.random() < 0.5
            else "".join(rng.choices(FRAGMENTS, k=rng.randint(0, 30)))
        )
        if rng.random() < 0.02 and text:
            text = varied(rng) if rng.random() < 0.2 else (text * (LONG // len(text) + 1))[:LONG]
        yield text


def varied(rng: random.Random) -> str:
    """A long text in which little occurs twice: numbers one after the other, or the characters of a script."""
    if rng.random() < 0.5:
        first = rng.randrange(10**5)
        return rng.choice((" ", ", ", "\n#### ", "+", " \u2212")).join(map(str, range(first, first + LONG // 6)))[:LONG]
    first = rng.randrange(0x80, 0xD000)
    return "".join(chr(rng.randrange(first, min(first + 3000, 0xD800))) for _ in range(LONG))


def mutated(rng: random.Random, text: str) -> str:
    """A few cuts, copies, swaps, insertions."""
    for _ in range(rng.randint(1, 6)):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        c = rng.randrange(len(text) + 1)
        piece = text[a:b]
        kind = rng.randrange(5)
        if kind == 0:
            text = text[:a] + text[b:]
        elif kind == 1:
            text = text[:c] + piece + text[c:]
        elif kind == 2:
            text = text[:c] + rng.choice(FRAGMENTS) + text[c:]
        elif kind == 3:
            text = text[:a] + piece[::-1] + text[b:]
        else:
            text = text[:c] + chr(rng.choice((rng.randrange(32, 127), rng.randrange(0x20, 0xD800)))) + text[c + 1 :]
    return text[:LONG]


def fuzz(count: int, seed: int, limit: float = LIMIT) -> tuple[dict[str, float], list[str]]:
    """The longest time of each parser and reward in seconds, and what went wrong: errors, and calls beyond `limit`."""
    rng = random.Random(seed)
    chosen = [(task, rewards(task)) for task in tasks()]
    slowest: dict[str, float] = {}
    faults: list[str] = []
    texts = [
        completions(rng, [str(p.reference) for p in t.problems("train")] + [completion("hm", "12")]) for t, _ in chosen
    ]
    for n in range(count):
        which = n % len(chosen)
        task, named = chosen[which]
        problem = task.problems("train")[n % len(task.problems("train"))]
        text = next(texts[which])
        rollout = rollout_of(problem, text, rng)
        calls = {f"reward {name}": partial(f, problem, rollout) for name, f in named.items()}
        calls |= {f"parser {name}": partial(f, text) for name, f in parsers(problem).items()}
        for name, call in calls.items():
            try:
                took = seconds(call)
            except Exception as error:  # any is a fault: that is what this looks for
                faults.append(f"{name}: {error!r} on {text[:200]!r}, {len(text)} characters")
                continue
            slowest[name] = max(slowest.get(name, 0.0), took)
            if took > limit:
                faults.append(f"{name}: {took * 1000:.0f} ms on {text[:200]!r}, {len(text)} characters")
    return slowest, faults


def seconds(call: Callable[[], object]) -> float:
    """Processor time of a call; the best of three if it was long, so that a busy machine is not to blame."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
        if best <= LIMIT:
            break
    return best


def rollout_of(problem: Problem, text: str, rng: random.Random) -> Rollout:
    ids = np.zeros(rng.randrange(1, 200), np.int64)
    turn = Turn(ids, ids, np.zeros(len(ids), np.float32), rng.choice(("stop", "length", "abort")), 0)
    return Rollout(problem.id, 0, (turn,), text)


# --- countdown against an exhaustive solver ------------------------------------------------------


def expressions(nums: tuple[int, ...]) -> Iterator[tuple[str, Fraction | None]]:
    """Every way to write all numbers, in every order and bracketing, with its exact value (None: division by 0)."""
    for order in set(itertools.permutations(nums)):
        yield from _bracketings(order)


def _bracketings(order: tuple[int, ...]) -> Iterator[tuple[str, Fraction | None]]:
    if len(order) == 1:
        yield str(order[0]), Fraction(order[0])
        return
    for cut in range(1, len(order)):
        for left, a in _bracketings(order[:cut]):
            for right, b in _bracketings(order[cut:]):
                for operator in "+-*/":
                    yield f"({left} {operator} {right})", value_of(operator, a, b)


def value_of(operator: str, a: Fraction | None, b: Fraction | None) -> Fraction | None:
    if a is None or b is None or (operator == "/" and b == 0):
        return None
    return {"+": a.__add__, "-": a.__sub__, "*": a.__mul__, "/": a.__truediv__}[operator](b)


def countdown(problems: int, seed: int, most: int = 4) -> tuple[int, list[str]]:
    """Grade every expression of random problems; returns how many were graded, and those that were graded wrongly.

    `most` numbers at most. Expressions of fewer or other numbers are always wrong, whatever their value.
    """
    rng = random.Random(seed)
    task = CountdownTask(CountdownConfig(train=1, validation=0, test=0))
    graded, faults = 0, []
    for _ in range(problems):
        nums = tuple(rng.randint(0, 12) for _ in range(rng.randint(2, most)))
        ways = list(expressions(nums))
        if len(ways) > 3000:
            ways = rng.sample(ways, 3000)
        values = [v for _, v in ways if v is not None and v.denominator == 1]
        target = int(rng.choice(values)) if values and rng.random() < 0.9 else rng.randint(-20, 200)
        problem = Problem("p", "countdown", (), {"nums": list(nums), "target": target})
        others = [
            (text, None)
            for text, _ in expressions((nums[0], *nums[:-1]))
            if sorted((nums[0], *nums[:-1])) != sorted(nums)
        ]
        for text, value in [*ways, *others[:200]]:
            graded += 1
            right = value is not None and value == target
            verdict = task.grade(problem, f"<answer>{written(rng, text)}</answer>").verdict
            if (verdict == "correct") != right:
                faults.append(f"{text} of {nums} for {target}: graded {verdict}, is {value}")
    return graded, faults


def written(rng: random.Random, text: str) -> str:
    """The same expression with other blanks, without its outermost brackets, or with what it is said to equal."""
    shape = rng.randrange(4)
    if shape == 0:
        return text.replace(" ", "")
    if shape == 1 and text.startswith("("):
        return text[1:-1]
    if shape == 2:
        return f" {text} = {rng.randint(0, 99)}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--countdown", type=int, default=500, help="problems against the exhaustive solver")
    arguments = parser.parse_args()
    slowest, faults = fuzz(arguments.count, arguments.seed)
    for name in sorted(slowest):
        print(f"{name:24} at most {slowest[name] * 1000:6.2f} ms")
    graded, wrong = countdown(arguments.countdown, arguments.seed)
    print(f"{arguments.count} completions, {len(faults)} faults; {graded} expressions, {len(wrong)} graded wrongly")
    for fault in [*faults, *wrong][:50]:
        print(fault)
    sys.exit(bool(faults or wrong))


if __name__ == "__main__":
    main()
