"""Divides rows into splits: removes duplicates, cuts held-out splits, keeps test problems out of train. All by
canonical form.

places, report = divide("gsm8k", {"train": ranks, "test": others})      # numpy arrays, one rank a problem
places["validation"]           # (split of the source, index in it) of each problem: cut from train, never from test
print("\\n".join(report))      # what was counted

A rank is a hash of the canonical form: problems with equal ranks are the same, and ranks decide which are held out.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Mapping

import numpy as np

from hone.types import Problem, Split

#: By default this share of a split is held out, but at most MOST problems.
SHARE, MOST = 0.1, 500

#: Brackets and factorials too: without them 2 * (3 + 4) would be 2 * 3 + 4.
_PIECE = re.compile(r"\w+|[-+*/^=<>%|&~≤≥≠√∞∪∩()\[\]{}]|(?<=[\w)])!(?=\s*[-+*/^=)])")
_WORD = re.compile(r"\w|[-+*/^=<>%|&~≤≥≠√∞∪∩]")

#: The first 16 bytes of `rank`, as two numbers that sort like it.
RANK = np.dtype([("high", np.uint64), ("low", np.uint64)])


def canonical_text(text: str) -> str:
    """The words, numbers, operators and brackets of a text, in lower case, without blanks, punctuation and dollar
    signs."""
    return " ".join(_PIECE.findall(unicodedata.normalize("NFKC", text).casefold()))


def words(text: str) -> list[str]:
    """The words of the canonical form, without brackets."""
    return [piece for piece in canonical_text(text).split() if _WORD.match(piece)]


def ngrams(text: str, n: int) -> set[tuple[str, ...]]:
    """Runs of n words; a shorter text has none."""
    all_words = words(text)
    return {tuple(all_words[i : i + n]) for i in range(len(all_words) - n + 1)}


def question_of(problem: Problem) -> str:
    """The question: everything that the user says."""
    return "\n".join(m["content"] for m in problem.messages if m["role"] == "user")


def rank(form: str) -> bytes:
    """A sort key that is independent of the order of the rows and the same in every run."""
    return hashlib.sha256(f"held out/{form}".encode()).digest()


def divide(
    name: str,
    ranks: Mapping[str, np.ndarray],  # split of the source (`all`: none is named) -> [rows] of RANK
    *,
    train: int | None = None,
    validation: int | None = None,
    test: int | None = None,
) -> tuple[dict[Split, np.ndarray], tuple[str, ...]]:
    """Splits that are disjoint by canonical form: indices into all rows (the rows of one split follow those of the
    split before), and a report, one line per fact.

    train, validation, test: how many to use. A split of the source is reduced to that number, a missing one is cut from
    train: by default a tenth, at most 500. Train problems that are also held out are left out, and counted.
    """
    lines: list[str] = []
    every = np.concatenate([np.empty(0, RANK), *ranks.values()])
    starts = np.cumsum([0, *map(len, ranks.values())])
    own = {split: start + _distinct(name, split, ranks[split], lines) for split, start in zip(ranks, starts)}
    none = np.empty(0, np.int64)
    pool = np.concatenate([own.get("train", none), own.get("all", none)])
    held: dict[Split, np.ndarray] = {}
    wanted: dict[Split, int | None] = {"test": test, "validation": validation}
    for split, most in wanted.items():
        if split in own:
            source = _without(every, own[split], held, f"{name}: {split}", lines)
            held[split] = source if most is None else _lowest(every, source, most)
    pool = _without(every, pool, {**held, **{s: own[s] for s in wanted if s in own}}, f"{name}: train", lines)
    for split, most in wanted.items():
        if split not in own and len(pool):
            share = min(MOST, int(len(pool) * SHARE)) if most is None else min(most, len(pool))
            held[split] = _lowest(every, pool, share)
            pool = pool[~among(every[pool], every[held[split]])]
            if len(held[split]):
                lines.append(f"{name}: {split}: {len(held[split])} problems cut from train")
    pool = pool if train is None else _lowest(every, pool, train)
    splits: dict[Split, np.ndarray] = {
        "train": pool, "validation": held.get("validation", none), "test": held.get("test", none)
    }  # fmt: skip
    sizes = ", ".join(f"{split} {len(places)}" for split, places in splits.items())
    return splits, (*lines, f"{name}: {sizes}")


def _order(ranks: np.ndarray) -> np.ndarray:
    """Indices sorted by rank; equal ranks keep their order."""
    return np.lexsort((ranks["low"], ranks["high"]))


def _numbers(ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(indices sorted by rank, for each of them a number that is equal for equal ranks)."""
    order = _order(ranks)
    ordered = ranks[order]
    return order, np.cumsum(np.concatenate([[0], ordered[1:] != ordered[:-1]])[: len(order)])


def among(ranks: np.ndarray, others: np.ndarray) -> np.ndarray:
    """[ranks] bool: which are also in `others`."""
    result = np.zeros(len(ranks), bool)
    if not len(others):
        return result
    high = np.sort(others["high"])  # after comparing first halves, few are left to compare in full
    near = np.minimum(np.searchsorted(high, ranks["high"]), len(high) - 1)
    near = np.flatnonzero(high[near] == ranks["high"])
    order, numbers = _numbers(np.concatenate([ranks[near], others]))
    known = np.zeros(len(order), bool)
    known[numbers[order >= len(near)]] = True
    same = np.empty(len(order), bool)
    same[order] = known[numbers]
    result[near] = same[: len(near)]
    return result


def _distinct(name: str, split: str, ranks: np.ndarray, lines: list[str]) -> np.ndarray:
    """Indices of the first problem of each canonical form."""
    order = _order(ranks)
    ordered = ranks[order]
    first = np.sort(order[np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(order)]])
    if len(first) < len(ranks):
        more = len(ranks) - len(first)
        lines.append(f"{name}: {split}: {more} of {len(ranks)} problems left out as duplicates")
    return first


def _without(
    every: np.ndarray, places: np.ndarray, others: Mapping[Split, np.ndarray], label: str, lines: list[str]
) -> np.ndarray:
    remaining = places
    for split, theirs in others.items():
        kept = remaining[~among(every[remaining], every[theirs])]
        if len(kept) < len(remaining):
            lines.append(
                f"{label}: {len(remaining) - len(kept)} of {len(remaining)} problems left out, since they are in "
                f"{split}"
            )
        remaining = kept
    return remaining


def _lowest(every: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    """The `count` problems with the lowest ranks, in their own order."""
    if count >= len(places):
        return places
    chosen = _order(every[places])[:count]
    return places[among(every[places], every[places[chosen]])]
