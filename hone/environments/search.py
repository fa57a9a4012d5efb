"""The tool `search`: the passages of a local folder that fit a query best, by BM25.

    tools: ["search:notes/"]                    # .txt and .md files, split at blank lines; or rows of a .jsonl file

Score of a passage: sum over the query's words of idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * length / mean length)),
with idf = ln(1 + (N - n + 0.5) / (n + 0.5)) (Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hone.base import places
from hone.base.settings import UserError
from hone.tasks.rows.files import read_rows

K1, B = 1.2, 0.75
HITS = 3  # passages in an answer
LONGEST = 1500  # characters of a passage that are shown
PREFIX = "search:"

_WORD = re.compile(r"\w+")


class Index:
    """Passages with the counts of their words."""

    def __init__(self, passages: Sequence[tuple[str, str]]) -> None:
        """`passages`: (where it comes from, its text)."""
        self.passages = list(passages)
        counts = [Counter(words(text)) for _, text in self.passages]
        self._lengths = [sum(count.values()) for count in counts]
        self._mean = max(1.0, sum(self._lengths) / max(1, len(counts)))
        self._places: dict[str, list[tuple[int, int]]] = defaultdict(list)  # word -> (passage, how often)
        for number, count in enumerate(counts):
            for word, times in count.items():
                self._places[word].append((number, times))

    def best(self, query: str, most: int = HITS) -> list[tuple[float, int]]:
        """(score, passage) of the best passages, best first; of equal ones, in their order."""
        scores: dict[int, float] = defaultdict(float)
        for word in dict.fromkeys(words(query)):
            postings = self._places.get(word, ())
            idf = math.log(1 + (len(self.passages) - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, times in postings:
                norm = K1 * (1 - B + B * self._lengths[number] / self._mean)
                scores[number] += idf * times * (K1 + 1) / (times + norm)
        return sorted(((score, number) for number, score in scores.items()), key=lambda hit: (-hit[0], hit[1]))[:most]


def words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def search_tool(target: str) -> Callable[[str], str]:
    """The function of `search:FOLDER` or `search:FILE.jsonl`. Raises UserError if there is nothing to search."""
    place = places.locate(target.removeprefix(PREFIX))
    index = Index(list(_passages(place)))
    if not index.passages:
        raise UserError(f"tool {target}: {place} has no .txt or .md files, and is no .jsonl file with rows of text")

    def search(query: str) -> str:
        """Search the documents; returns the passages that fit best.

        Args:
            query: Words to look for.
        """
        hits = index.best(query)
        shown = (f"[{index.passages[n][0]}] {index.passages[n][1][:LONGEST]}" for _, n in hits)
        return "\n\n".join(shown) or "Nothing found."

    return search


def _passages(place: Path) -> Iterator[tuple[str, str]]:
    if place.is_file():
        rows = read_rows(str(place))
        yield from ((f"{place.name}:{n}", " ".join(_texts(row))) for n, row in enumerate(rows, 1) if any(_texts(row)))
        return
    for file in sorted(file for file in place.rglob("*") if file.suffix in (".txt", ".md") and file.is_file()):
        for part in re.split(r"\n\s*\n", file.read_text(encoding="utf-8", errors="replace")):
            if part.strip():
                yield str(file.relative_to(place)), part.strip()


def _texts(row: Mapping[str, object]) -> list[str]:
    return [value for value in row.values() if isinstance(value, str)]
