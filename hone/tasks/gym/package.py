"""The only module that imports `reasoning_gym`; it runs in separate processes, never in the trainer's.

`python -m hone.tasks.gym.package < request.json > reply.pickle` makes problems (see `request`), with a fixed hash seed:
several of the package's generators iterate over sets, so that without it one seed gives different problems in each
process. The grading workers (`hone.tasks.gym.worker`) call `score`.

Four of the package's scorers `eval` the model's text, and five pass it to sympy's `parse_expr`, which evaluates it too.
Here the four get `ast.literal_eval` under that name, and the five only get text that matches `READABLE`: numbers,
operators, a few functions. Scorers of later versions that can evaluate text and are not in these tables are refused.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
import math
import pickle
import random
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from types import CodeType, ModuleType
from typing import Any

from hone.base import streams
from hone.base.extras import needed
from hone.tasks.splits import split_of
from hone.types import Split

Entry = dict[str, Any]  # question, answer (may be None), metadata

#: Consecutive draws without a new problem after which a level counts as exhausted.
MAX_TRIES = 1_000
CHUNK = 100

_INTEGERS = re.compile(r"[\d\s+\-/()]*(?:\*(?!\s*\*)[\d\s+\-/()]*)*")  # + - * / and parentheses, no power
_FUNCTIONS = "sin|cos|tan|sec|csc|cot|asin|acos|atan|sinh|cosh|tanh|exp|log|ln|sqrt|Abs|pi"
_SYMBOLIC = re.compile(
    rf"(?:{_FUNCTIONS}|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])|(?<!\d)\d{{1,12}}(?:\.\d{{1,12}})?|[\s+\-*/^(),])*"
)

#: What the whole answer must match before the scorer sees it; other answers are malformed.
READABLE = {
    "countdown": _INTEGERS,
    "puzzle24": _INTEGERS,
    "simple_integration": _SYMBOLIC,
    "intermediate_integration": _SYMBOLIC,
    "polynomial_multiplication": _SYMBOLIC,
}
#: Scorers that `eval` an answer; they get `ast.literal_eval` instead.
LITERAL = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
#: Scorers that evaluate only text that the package itself wrote.
OWN_TEXT = ("basic_arithmetic", "bitwise_arithmetic", "codeio", "number_sorting")
EVALUATORS = {"eval", "exec", "__import__", "sympify", "parse_expr", "parse_latex", "parse_mathematica"}
#: Metadata keys of a known solution, for tasks whose `answer` is None.
EXAMPLES = ("example_answer", "example_correct_answer", "possible_answer")

REFUSED = {
    "coin_flip": "its scorer gives full marks to every prefix of the right number, such as 0",
    "composite": "it is a mixture of other tasks; name one of them",
    "game_of_life_halting": "its scorer gives full marks to any text",
}


class Unusable(Exception):
    """An invalid name, level or setting; the message is for the user."""


# --- making problems -------------------------------------------------------------------------------------------------


def request(
    name: str, config: dict[str, Any], levels: Sequence[int], split: Split, counts: Sequence[int], seed: str
) -> list[list[Entry]]:
    """`counts[k]` distinct problems of `levels[k]` (no levels: the package's defaults) whose form is in that split.

    Each entry gets `gold`: an answer with full marks from its scorer, or None. Raises Unusable.
    """
    return [list(_level(name, config, level, split, n, seed)) for level, n in zip(levels or (None,), counts)]


def _level(
    name: str, config: dict[str, Any], level: int | None, split: Split, count: int, seed: str
) -> Iterator[Entry]:
    settings = json.dumps(settings_of(name, config, level), sort_keys=True)
    seen: set[str] = set()
    tries = 0
    for entry in _stream(name, settings, f"{name}/{seed}/{level}") if count else ():
        form = canonical_form(entry["question"])
        tries += 1
        if tries > MAX_TRIES:
            of_level = f" of level {level}" if level is not None else ""
            raise Unusable(
                f"found {len(seen)} distinct problems{of_level} for the {split} split, {count} were asked for; ask for "
                "fewer, or change config"
            )
        if form in seen or split_of(f"{name} {form}") != split:
            continue
        gold = gold_of(name, settings, entry)
        if gold is None and entry["answer"] is not None:
            continue  # the package's answer is empty, or does not satisfy its own scorer
        seen.add(form)
        tries = 0
        yield {**entry, "gold": gold, "settings": settings}
        if len(seen) == count:
            return


def _stream(name: str, settings: str, source: str) -> Iterator[Entry]:
    """Endless entries. The package's datasets have a size, and some make everything when they are built."""
    rng = streams.text("reasoning_gym", source)
    while True:
        start = rng.getrandbits(31)
        random.seed(start)  # some generators use the global RNG
        problems = dataset(name, settings, start, CHUNK)
        yield from (problems[index] for index in range(CHUNK))


def canonical_form(question: str) -> str:
    """Problems have the same form if their questions differ only in white space and case."""
    return " ".join(question.casefold().split())


def gold_of(name: str, settings: str, entry: Entry) -> str | None:
    """A non-empty answer that gets full marks from the task's own scorer, or None."""
    metadata = entry["metadata"]
    answer = entry["answer"]
    if answer is None:
        answer = next((metadata[key] for key in EXAMPLES if metadata.get(key) is not None), None)
    if answer is None:
        return None
    gold = (answer if isinstance(answer, str) else json.dumps(answer)).strip()  # as parsed answers are
    full = score(name, settings, entry, gold) if gold else None
    return gold if full is not None and full >= FULL_MARKS else None


#: Scores are from 0 to 1; an answer is correct from this score on.
FULL_MARKS = 1.0 - 1e-9


def settings_of(name: str, config: dict[str, Any], level: int | None) -> dict[str, Any]:
    """Arguments for the package's config class: those of the curriculum's level and the user's."""
    package = reasoning_gym_package()
    if name in REFUSED:
        raise Unusable(f"it cannot be used: {REFUSED[name]}")
    if name not in package.factory.DATASETS:
        known = sorted(set(package.factory.DATASETS) - set(REFUSED))
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        meant = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
        raise Unusable(f"the package has no task {name!r}; {meant}")
    refuse_evaluators(name)
    _, config_class = package.factory.DATASETS[name]
    fields = [field.name for field in dataclasses.fields(config_class) if field.name not in ("seed", "size")]
    for key in config:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(fields) or 'none'}"
            why = "hone sets it" if key in ("seed", "size") else meant
            raise Unusable(f"config.{key}: no setting of {name}; {why}")
    if level is None:
        return config
    own = _curriculum(name, level)
    for key in config:
        if key in own:
            raise Unusable(f"config.{key}: the level sets it to {own[key]!r}; remove it, or give no levels")
    return {**own, **config}


def _curriculum(name: str, level: int) -> dict[str, Any]:
    """The settings of one level of the package's curriculum."""
    package = reasoning_gym_package()
    if not package.factory.has_curriculum(name):
        raise Unusable(f"levels: the package has no curriculum for {name}; remove them and use config")
    curriculum = package.factory.create_curriculum(name)
    highest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if level > highest:
        raise Unusable(f"levels: {level}: the levels of {name} go from 0 to {highest}")
    curriculum.set_global_level(level)
    base = package.factory.DATASETS[name][1]()
    made = curriculum.generate_configuration()
    own = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    set_here = {
        key
        for attribute in curriculum.attributes.values()
        for key in (getattr(attribute, field, None) for field in ("field_name", "lower_field_name", "upper_field_name"))
        if key
    }
    return {k: v for k, v in own.items() if k not in ("seed", "size") and (k in set_here or v != getattr(base, k))}


# --- grading ---------------------------------------------------------------------------------------------------------


def score(name: str, settings: str, entry: Entry, answer: str) -> float | None:
    """The package's score of an answer, from 0 to 1; None if its scorer cannot read it."""
    if name in READABLE and READABLE[name].fullmatch(answer) is None:
        return None
    try:
        value = float(scorer_of(name, settings).score_answer(answer, entry))
        return min(1.0, max(0.0, value)) if math.isfinite(value) else None
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, SyntaxError):
        return None  # several scorers raise on unexpected text


@cache
def scorer_of(name: str, settings: str) -> Any:
    return dataset(name, settings, 0, 1)


def dataset(name: str, settings: str, seed: int, size: int) -> Any:
    """A dataset of the package, with a scorer that evaluates no text. Raises Unusable for invalid settings."""
    package = reasoning_gym_package()
    refuse_evaluators(name)
    config = {key: _tuples(value) for key, value in json.loads(settings).items()}
    try:
        made = package.create_dataset(name, seed=seed, size=size, **config)
    except (AssertionError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise Unusable(f"config: the package refuses {settings}: {error!r}") from error
    if name in LITERAL:
        sys.modules[type(made).__module__].eval = ast.literal_eval  # type: ignore[attr-defined]
    return made


def _tuples(value: Any) -> Any:
    """Lists (from JSON) as tuples, like most of the package's defaults."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def refuse_evaluators(name: str) -> None:
    """Raises Unusable if the task's code can evaluate text and is not known to be safe."""
    if name in LITERAL or name in OWN_TEXT or name in READABLE:
        return
    cls = reasoning_gym_package().factory.DATASETS[name][0]
    source = inspect.getsource(sys.modules[cls.__module__])
    defined = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    evaluators = (names_used(compile(source, cls.__module__, "exec")) & EVALUATORS) - defined
    if evaluators:
        raise Unusable(
            f"it cannot be used: its code calls {', '.join(sorted(evaluators))}, in this version "
            f"({package_version()}) perhaps on what the model wrote; hone knows no safe way"
        )


def names_used(code: CodeType) -> set[str]:
    """Every global name and attribute in code, including nested functions."""
    inner = (names_used(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def package_version() -> str:
    from importlib.metadata import version

    return version("reasoning-gym")


@cache
def reasoning_gym_package() -> ModuleType:
    """The package, imported on first use."""
    try:
        import reasoning_gym
        import reasoning_gym.factory
    except ImportError as error:
        raise Unusable(f"the package is not installed ({error}); run: {needed('gym')}") from error
    module: ModuleType = reasoning_gym
    return module


def main() -> None:
    """Read a request from stdin; write the reply, or an error message as text, to stdout."""
    reply = sys.stdout.buffer
    sys.stdout = sys.stderr  # output of the package must not mix with the reply
    try:
        result: Any = request(**json.load(sys.stdin))
    except Unusable as error:
        result = str(error)
    reply.write(pickle.dumps(result))
    reply.flush()


if __name__ == "__main__":
    main()
