"""Perturbed puzzles: solved again by brute force, words as they were, flipped roles all the way to the grade."""

import itertools
import json
import random
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from hone.cli.app import app
from hone.measure.stats.memorization import memorization
from hone.tasks.knights.logic import Puzzle, holds, parse_statements
from hone.tasks.knights.perturb import PERTURBATIONS, UNCOMMON_NAMES, perturb, perturbed_rows, sentences
from hone.tasks.knights.rows import check_rows
from hone.tasks.knights.task import KnightsConfig, KnightsTask, puzzle_of_problem
from hone.tasks.knights.text import NAMES, in_words, swapped
from hone.tasks.rows.files import read_rows, write_rows

TASK = KnightsTask(KnightsConfig(people=(3, 5), train=30, test=10))
PUZZLES = [(puzzle_of_problem(p), p.messages[-1]["content"]) for p in TASK.problems("train")]


def solutions(puzzle):
    """By brute force: each person is a knight iff their statement is true."""
    return [
        roles
        for roles in itertools.product((True, False), repeat=len(puzzle.names))
        if all(holds(tree, roles) is role for tree, role in zip(puzzle.statements, roles, strict=True))
    ]


def having(kind):
    """Puzzles that have such a neighbour: all but a few."""
    pairs = [(puzzle, quiz) for puzzle, quiz in PUZZLES if perturb(puzzle, quiz, kind, random.Random(0))]
    assert len(pairs) >= (20 if kind == "leaf" else 30)
    return pairs


@pytest.mark.parametrize("kind", PERTURBATIONS)
def test_every_perturbed_puzzle_has_the_one_solution_it_claims(kind):
    for puzzle, quiz in having(kind):
        made = perturb(puzzle, quiz, kind, random.Random(quiz))
        assert made == perturb(puzzle, quiz, kind, random.Random(quiz))  # the same seed
        assert solutions(made.puzzle) == [made.puzzle.solution]
        assert made.quiz != quiz
        assert sentences(made.quiz, made.puzzle) is not None  # the words say what the logic does


@pytest.mark.parametrize("kind", ["statement", "leaf"])
def test_another_logic_changes_one_sentence_and_the_answer(kind):
    for puzzle, quiz in having(kind):
        made = perturb(puzzle, quiz, kind, random.Random(0))
        changed = [i for i, (a, b) in enumerate(zip(puzzle.statements, made.puzzle.statements)) if a != b]
        assert len(changed) == 1
        assert made.puzzle.solution != puzzle.solution
        before, after = sentences(quiz, puzzle)[changed[0]], sentences(made.quiz, made.puzzle)[changed[0]]
        assert quiz.replace(before, after) == made.quiz
        if kind == "leaf":
            old, new = (leaves(p.statements[changed[0]]) for p in (puzzle, made.puzzle))
            assert sum(x != y for x, y in zip(old, new, strict=True)) == 1


def leaves(tree):
    return [tree] if tree[0] in ("telling-truth", "lying") else [leaf for arg in tree[1:] for leaf in leaves(arg)]


def test_the_other_kinds_keep_the_logic():
    puzzle, quiz = PUZZLES[1]
    named = perturb(puzzle, quiz, "names", random.Random(0))
    assert named.puzzle.statements == puzzle.statements
    assert set(named.puzzle.names) <= set(UNCOMMON_NAMES)
    assert not set(UNCOMMON_NAMES) & set(NAMES)
    assert not any(name in named.quiz for name in puzzle.names)
    back = dict(zip(named.puzzle.names, puzzle.names))
    restored = named.quiz
    for new, old in back.items():
        restored = restored.replace(new, old)
    assert restored == quiz
    ordered = perturb(puzzle, quiz, "order", random.Random(0))
    assert ordered.puzzle == puzzle
    assert sorted(ordered.quiz) == sorted(quiz)
    assert sorted(sentences(quiz, puzzle)) == sorted(sentences(ordered.quiz, puzzle))
    assert "Knights always tell the truth" in quiz
    flipped = perturb(puzzle, quiz, "roles", random.Random(0))
    assert "Knaves always tell the truth, and knights always lie." in flipped.quiz
    assert perturb(flipped.puzzle, flipped.quiz, "roles", random.Random(0)) == (puzzle, quiz)


def test_swapped():
    text = "Knights and a knave: knights, Knave, knighthood"
    assert swapped(text) == "Knaves and a knight: knaves, Knight, knighthood"


def test_none_is_said_where_there_is_no_neighbour():
    """Against all replacements of one leaf, tried one by one, except `I am a knave`."""

    def replaced(tree, speaker):
        if tree[0] in ("telling-truth", "lying"):
            yield from ((op, i) for op in ("telling-truth", "lying") for i in (0, 1) if (op, i) != ("lying", speaker))
        for place, part in enumerate(tree[1:] if isinstance(tree[1], tuple) else ()):
            yield from ((*tree[: place + 1], new, *tree[place + 2 :]) for new in replaced(part, speaker))

    two = KnightsTask(KnightsConfig(people=(2,), train=40)).problems("train")
    missing = 0
    for puzzle in map(puzzle_of_problem, two):
        first, second = puzzle.statements
        near = [(new, second) for new in replaced(first, 0)] + [(first, new) for new in replaced(second, 1)]
        answers = [solutions(replace(puzzle, statements=statements)) for statements in near]
        possible = any(len(answer) == 1 and answer[0] != puzzle.solution for answer in answers)
        made = perturb(puzzle, "?", "leaf", random.Random(0))
        assert (made is not None) == possible
        missing += made is None
    assert 0 < missing < 20
    with pytest.raises(ValueError, match="perturbation 'leafs': there are statement, leaf"):
        perturb(puzzle, "?", "leafs", random.Random(0))


@pytest.mark.parametrize("quiz", ["full", "brief"])
@pytest.mark.parametrize("kind", [None, *PERTURBATIONS])
def test_rows_come_back_with_the_right_answer(tmp_path, kind, quiz):
    source = KnightsTask(KnightsConfig(train=6, quiz=quiz))
    puzzles = [(puzzle_of_problem(p), p.messages[-1]["content"]) for p in source.problems("train")]
    rows = perturbed_rows(puzzles, kind, 0)
    assert check_rows(rows) == []
    write_rows(path := tmp_path / "rows.jsonl", rows)
    back = KnightsTask(KnightsConfig(test_file=str(path), quiz=quiz))
    for row, problem in zip(rows, back.problems("test"), strict=True):
        assert problem.messages[-1]["content"] == row["quiz"]
        assert back.grade(problem, f"<answer>{row['solution_text_format']}</answer>").verdict == "correct"
        assert back.grade(problem, f"<answer>{swapped(row['solution_text_format'])}</answer>").verdict == "wrong"
        assert back.grade(problem, back.trace(problem, "careful", 0).text).verdict == "correct"
        assert puzzle_of_problem(problem) == Puzzle(
            tuple(row["names"]), parse_statements(row["statements"]), tuple(row["solution"]), kind == "roles"
        )
        if kind == "roles":  # read from the texts alone: the truthful are called knaves
            assert problem.messages[0]["content"].count("knaves, who always tell the truth") == 1
            assert list(problem.answer["solution"]) == [not truthful for truthful in row["solution"]]
            words = in_words(parse_statements(row["statements"])[0], row["names"])
            assert swapped(words) in row["quiz"] or swapped(words[0].upper() + words[1:]) in row["quiz"]


def test_the_command(tmp_path):
    def run(*arguments):
        return CliRunner().invoke(app, ["data", "perturb", *arguments], catch_exceptions=False)

    plain, leaf = tmp_path / "plain.jsonl", tmp_path / "leaf.jsonl"
    sizes = ["task.test=8", "task.people=[4]"]
    assert run("knights", *sizes, "--out", str(plain)).output == f"{plain}: 8 rows\n"
    assert run(str(plain), "--kind", "statement", "--out", str(leaf)).exit_code == 0
    before, after = read_rows(plain), read_rows(leaf)
    assert [row["index"] for row in after] == [row["index"] for row in before] == list(range(8))
    assert all(a["solution"] != b["solution"] for a, b in zip(before, after))
    assert json.loads(leaf.read_text().splitlines()[0])["names"] == before[0]["names"]
    with pytest.raises(Exception, match="its task is countdown, but only puzzles of the task knights"):
        run("countdown", "--out", str(leaf))


def test_memorization_by_hand():
    result = memorization([1, 1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 1, 0, 0, 0])
    assert (result.accuracy.value, result.perturbed.value) == (0.5, 0.25)
    assert (result.consistency.value, result.consistency.n) == (0.25, 4)
    assert result.score.value == 0.5 * (1 - 0.25)  # Acc * (1 - CR)
    assert 0 < result.score.low < 0.375 < result.score.high < 1
    assert memorization([1, 1], [1, 1]).score.value == 0.0  # knows
    assert memorization([1, 1], [0, 0]).score.value == 1.0  # recites
    nothing = memorization([0, 0], [1, 0])
    assert (nothing.score.value, nothing.consistency) == (0.0, None)
    for wrong in (([], []), ([1], [1, 0]), ([0.5], [1])):
        with pytest.raises(ValueError, match="memorization"):
            memorization(*wrong)
