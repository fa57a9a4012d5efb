"""Problems made from rows: duplicates out, held-out splits cut, train without what is in test. All by canonical form.

corpus = build("gsm8k", {"train": [...], "test": [...]}, canonical_form)
corpus.splits["validation"]       # cut from train, never from test
print("\\n".join(corpus.report))   # what was counted
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hone.types import Problem, Split

#: What is held out if nobody says how many: this share of what it is cut from, and at most so many.
SHARE, MOST = 0.1, 500

#: Brackets and factorials too: without them 2 * (3 + 4) would be 2 * 3 + 4.
_PIECE = re.compile(r"\w+|[-+*/^=<>%|&~≤≥≠√∞∪∩()\[\]{}]|(?<=[\w)])!(?=\s*[-+*/^=)])")
_WORD = re.compile(r"\w|[-+*/^=<>%|&~≤≥≠√∞∪∩]")

Form = Callable[[Problem], str]


@dataclass(frozen=True)
class Corpus:
    splits: Mapping[Split, list[Problem]]
    report: tuple[str, ...]  # one line per fact


def canonical_text(text: str) -> str:
    """The words, numbers, operators and brackets of a text, in one case; not blanks, punctuation, dollars."""
    return " ".join(_PIECE.findall(unicodedata.normalize("NFKC", text).casefold()))


def words(text: str) -> list[str]:
    """The words of the canonical form, without brackets."""
    return [piece for piece in canonical_text(text).split() if _WORD.match(piece)]


def ngrams(text: str, n: int) -> set[tuple[str, ...]]:
    """Runs of n words; a shorter text has none."""
    found = words(text)
    return {tuple(found[i : i + n]) for i in range(len(found) - n + 1)}


def question_of(problem: Problem) -> str:
    """What is asked: all that the user says."""
    return "\n".join(m["content"] for m in problem.messages if m["role"] == "user")


def rank(form: str) -> bytes:
    """A place that has nothing to do with the order of the rows, the same in every run."""
    return hashlib.sha256(f"held out/{form}".encode()).digest()


def build(
    name: str,
    rows: Mapping[str, Sequence[Problem]],
    form: Form,
    *,
    train: int | None = None,
    validation: int | None = None,
    test: int | None = None,
) -> Corpus:
    """Splits that are disjoint by canonical form, from problems by split (`all`: of none).

    train, validation, test: how many to use; a source's own split is cut down to it, a missing one is cut from train:
    by default a tenth, at most 500. Train problems that are also held out are left out, and counted.
    """
    lines: list[str] = []
    form = _remembered(form)
    own = {split: _distinct(name, split, rows[split], form, lines) for split in rows}
    pool = [*own.get("train", ()), *own.get("all", ())]
    held: dict[Split, list[Problem]] = {}
    wanted: dict[Split, int | None] = {"test": test, "validation": validation}
    for split, most in wanted.items():
        if split in own:
            source = _without(own[split], held, form, f"{name}: {split}", lines)
            held[split] = source if most is None else _lowest(source, most, form)
    pool = _without(pool, {**held, **{s: own[s] for s in wanted if s in own}}, form, f"{name}: train", lines)
    for split, most in wanted.items():
        if split not in own and pool:
            share = min(MOST, int(len(pool) * SHARE)) if most is None else min(most, len(pool))
            held[split] = _lowest(pool, share, form)
            gone = {problem.id for problem in held[split]}
            pool = [problem for problem in pool if problem.id not in gone]
            if held[split]:
                lines.append(f"{name}: {split}: {len(held[split])} problems cut from train")
    pool = pool if train is None else _lowest(pool, train, form)
    splits: dict[Split, list[Problem]] = {
        "train": pool, "validation": held.get("validation", []), "test": held.get("test", [])
    }  # fmt: skip
    sizes = ", ".join(f"{split} {len(problems)}" for split, problems in splits.items())
    return Corpus(splits, (*lines, f"{name}: {sizes}"))


def _remembered(form: Form) -> Form:
    """Forms of puzzles take milliseconds, and are asked for often."""
    forms: dict[str, str] = {}

    def of(problem: Problem) -> str:
        if problem.id not in forms:
            forms[problem.id] = form(problem)
        return forms[problem.id]

    return of


def _distinct(name: str, split: str, problems: Sequence[Problem], form: Form, lines: list[str]) -> list[Problem]:
    """The first of each canonical form."""
    seen: dict[str, Problem] = {}
    for problem in problems:
        seen.setdefault(form(problem), problem)
    if len(seen) < len(problems):
        more = len(problems) - len(seen)
        lines.append(f"{name}: {split}: {more} of {len(problems)} problems left out, there are others like them")
    return list(seen.values())


def _without(
    problems: Sequence[Problem], others: Mapping[Split, Sequence[Problem]], form: Form, label: str, lines: list[str]
) -> list[Problem]:
    left = list(problems)
    for split, theirs in others.items():
        forms = {form(problem) for problem in theirs}
        kept = [problem for problem in left if form(problem) not in forms]
        if len(kept) < len(left):
            lines.append(f"{label}: {len(left) - len(kept)} of {len(left)} problems left out, they are in {split}")
        left = kept
    return left


def _lowest(problems: Sequence[Problem], count: int, form: Form) -> list[Problem]:
    """`count` problems, chosen by the hash of their form, in their own order."""
    chosen = {p.id for p in sorted(problems, key=lambda p: rank(form(p)))[:count]}
    return [problem for problem in problems if problem.id in chosen]
