"""Knights and knaves in words: statements, quizzes and answers, and the reader of answers."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from hone.tasks.knights.logic import LEAVES, Puzzle, Statement, holds

#: Common given names; the first k are used when a recipe asks for k names.
# fmt: off
NAMES: tuple[str, ...] = (
    "Zoey", "Oliver", "Emma", "Liam", "Ava", "Noah", "Mia", "Ethan", "Grace", "Henry", "Lily", "Owen", "Sofia",
    "Jack", "Ella", "Lucas", "Chloe", "Mason", "Aria", "Logan", "Emily", "David", "Harper", "James", "Amelia",
    "Samuel", "Evelyn", "Jacob", "Abigail", "Daniel", "Scarlett", "Michael", "Victoria", "Aiden", "Isabella",
    "Jackson", "Charlotte", "William", "Penelope", "Joseph", "Riley", "Benjamin", "Aurora", "Matthew", "Avery",
    "Luke", "Sophia", "Alexander", "Elizabeth", "Sebastian", "Olivia",
)
# fmt: on

ISLAND = (
    "A very special island is inhabited only by knights and knaves. "
    "Knights always tell the truth, and knaves always lie."
)
QUESTION = "So who is a knight and who is a knave?"

#: Ways of saying; {S} is the statement as the start of a sentence, {s} as its middle.
SAYINGS = (
    '{name} said, "{S}."',
    "{name} said that {s}.",
    "{name} told you that {s}.",
    "{name} expressed that {s}.",
    '{name} stated, "{S}".',
    '{name} noted, "{S}".',
    '{name} remarked, "{S}".',
    '{name} commented, "{S}".',
    '{name} asserted: "{S}".',
    '{name} was heard saying, "{S}".',
    'According to {name}, "{S}".',
    'As {name} put it, "{S}".',
    'In {name}\'s words: "{S}".',
    'In a statement by {name}: "{S}".',
    '"{S}," {name} declared.',
    '"{S}," {name} claimed.',
    '"{S}," {name} mentioned.',
    '"{S}" - {name}.',
)

BRIEF_SAYING = "{name} says: {s}."

MAX_ANSWER = 10_000  # characters; longer answers are not searched

ROLES = ("knave", "knight")
_ROLE_WORD = re.compile(r"\b(?:knight|knave)\b", re.IGNORECASE)
_OTHER_WORD = {"knight": "knave", "knave": "knight", "Knight": "Knave", "Knave": "Knight"}
_WORDS = re.compile(rf"\b({'|'.join(_OTHER_WORD)})(?=s?\b)")


def in_words(tree: Statement, names: Sequence[str], roles: Sequence[bool] | None = None) -> str:
    """A statement in English; with `roles`, each claim in it is posed as a question and answered.

    Oliver is a knave? Oliver knight, no, or Zoey is a knight? Zoey knight, yes
    """
    return _phrase(tree, names, roles, nested=False)


def _phrase(tree: Statement, names: Sequence[str], roles: Sequence[bool] | None, nested: bool) -> str:
    op = tree[0]
    simple, negated = (tree[1], "not ") if op == "not" else (tree, "")
    if simple[0] in LEAVES:
        name, role = names[simple[1]], ROLES[simple[0] == "telling-truth"]
        if roles is None:
            return f"{name} is {negated}a {role}"
        actual, true = ROLES[roles[simple[1]]], holds(tree, roles)
        return f"{name} is {negated}a {role}? {name} {actual}, {'yes' if true else 'no'}"
    pause = "" if roles is None else ","
    parts = [_phrase(arg, names, roles, nested=True) for arg in tree[1:]]
    if op == "not":
        text = f"it is not the case that {parts[0]}"
    elif op == "->":
        text = f"if {parts[0]}{pause} then {parts[1]}"
    else:
        text = (pause + {"and": " and ", "or": " or ", "<=>": " if and only if "}[op]).join(parts)
    return f"({text})" if nested else text


def swapped(text: str) -> str:
    """`text` with the words knight and knave swapped."""
    return _WORDS.sub(lambda match: _OTHER_WORD[match[0]], text)


def telling(saying: str, puzzle: Puzzle, person: int) -> str:
    """One person's statement, worded by a template of SAYINGS."""
    name, words = puzzle.names[person], in_words(puzzle.statements[person], puzzle.names)
    start = words[0].upper() + words[1:] if words.startswith(("if ", "it ")) else words
    told = saying.format(name=name, s=words, S=start)
    return swapped(told) if puzzle.flipped else told


def full_quiz(puzzle: Puzzle, rng: random.Random) -> str:
    """The public wording, with templates drawn from SAYINGS."""
    names = puzzle.names
    sayings = [telling(rng.choice(SAYINGS), puzzle, person) for person in range(len(names))]
    meet = f"You meet {len(names)} inhabitants: {_listed(names)}."
    island = swapped(ISLAND) if puzzle.flipped else ISLAND
    return " ".join([island, meet, *sayings, swapped(QUESTION) if puzzle.flipped else QUESTION])


def brief_quiz(puzzle: Puzzle) -> str:
    """One sentence per person, one phrasing: `Zoey says: Oliver is a knave.`

    No name begins a line, here or in the worked answers: a byte-level tokenizer has other tokens for a
    word at the start of a line, and a small model would have to learn that both are the same person.
    """
    return " ".join(telling(BRIEF_SAYING, puzzle, person) for person in range(len(puzzle.names)))


def hidden_quiz(puzzle: Puzzle) -> str:
    """The people, without what they say."""
    *others, last = puzzle.names
    return f"People: {', '.join(others)} and {last}."


def question(name: str) -> str:
    """What a model says to hear a person's statement."""
    return f"Ask {name}."


def is_brief(quiz: str, puzzle: Puzzle) -> bool:
    """Whether a quiz has the brief wording, with its sentences in any order."""
    told = [telling(BRIEF_SAYING, puzzle, person) for person in range(len(puzzle.names))]
    return len(quiz) == len(" ".join(told)) and all(sentence in quiz for sentence in told)


def _listed(items: Sequence[str]) -> str:
    """`a, and b`; `a, b, and c`: the public rows use the comma for two items as well."""
    return f"{', '.join(items[:-1])}, and {items[-1]}"


def answer_text(names: Sequence[str], roles: Sequence[bool]) -> str:
    """`(1) Zoey is a knight\\n(2) Oliver is a knave`."""
    return "\n".join(f"({i}) {name} is a {ROLES[role]}" for i, (name, role) in enumerate(zip(names, roles), start=1))


def solution_sentence(names: Sequence[str], roles: Sequence[bool]) -> str:
    """`Zoey is a knight, and Oliver is a knave.`, as in the public rows."""
    return _listed([f"{name} is a {ROLES[role]}" for name, role in zip(names, roles)]) + "."


def read_roles(answer: str, names: Sequence[str]) -> tuple[bool, ...] | None:
    """The roles that an answer states, or None unless it states exactly one for each person.

    The number of role words must equal the number of people, and every name must be followed
    by `is a knight` or `is a knave` exactly once, in any case and with any white space between
    the words (Logic-RL, arXiv:2502.14768). So two roles for one person, an extra, missing or
    repeated person, or more than MAX_ANSWER characters give None.
    """
    if len(answer) > MAX_ANSWER or len(_ROLE_WORD.findall(answer)) != len(names):
        return None
    # Longest first, so that a name does not match inside a longer one ("Ann" in "Mary Ann").
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    roles: dict[str, bool] = {}
    for name, role in re.findall(rf"(?<!\w)({pattern})\s+is\s+a\s+(knight|knave)\b", answer, re.IGNORECASE):
        person, role = name.casefold(), role.casefold()
        if role not in ROLES:  # a dotless i matches case-insensitively, but is another letter
            return None
        roles[person] = role == "knight"
    keys = [name.casefold() for name in names]  # as many as role words: if all are there, none occurs twice
    return tuple(roles[key] for key in keys) if roles.keys() == set(keys) else None
