"""Tasks of the reasoning-gym package: problems, levels, errors, and that no answer is ever executed."""

import inspect
import sys

import numpy as np
import pytest

from hone.base.settings import UserError
from hone.grade.parse import completion
from hone.recipe.load import load_for_task
from hone.rewards import make_reward
from hone.rewards.config import RewardConfig
from hone.tasks import make_task
from hone.tasks.gym import package as gym_package
from hone.tasks.gym.task import MAX_ANSWER, GymConfig, GymTask
from hone.types import Problem, Rollout, Turn

package = pytest.importorskip("reasoning_gym")


def task(name, **config):
    return GymTask(GymConfig(name=f"reasoning_gym:{name}", **{"train": 8, "validation": 4, "test": 4, **config}))


def bare(name, gold, settings="{}", **metadata):
    """A problem without the process that would make it."""
    entry = {"question": "?", "answer": gold, "metadata": metadata}
    return Problem("p", f"reasoning_gym:{name}", (), gold, extra={"settings": settings, "entry": entry})


@pytest.fixture(scope="module")
def sums():
    made = task("chain_sum", levels=(0, 2), config={"allow_negation": True})
    yield made
    made._workers.close()


def test_problems_levels_and_grades(sums):
    problems = sums.problems("train")
    assert [p.level for p in problems] == ["0", "2"] * 4
    assert all(p.task == "reasoning_gym:chain_sum" for p in problems)
    assert max(p.extra["entry"]["metadata"]["num_terms"] for p in problems if p.level == "0") <= 3
    answers = [completion("hm", p.answer) for p in problems]
    assert [g.verdict for g in sums.grade_all(list(zip(problems, answers, strict=True)))] == ["correct"] * 8
    first, gold = problems[0], problems[0].answer
    texts = [f"{gold}1", "", gold, "<answer></answer>", completion("", "x" * (MAX_ANSWER + 1))]
    grades = sums.grade_all([(first, completion("", texts[0])), *((first, text) for text in texts[1:])])
    assert [g.verdict for g in grades] == ["wrong", *["malformed"] * 4]
    assert sums.grade(first, completion("", gold)).score == 1.0


def test_the_same_problems_in_every_process():
    """`isomorphic_strings` walks over a set: in processes with other hash seeds the same seed gives others."""
    one, other = (task("isomorphic_strings", train=20) for _ in range(2))
    assert [p.id for p in one.problems("train")] == [p.id for p in other.problems("train")]


def test_splits_are_disjoint_whatever_the_seed():
    def forms(split, count, seed):
        (entries,) = gym_package.request("chain_sum", {"max_digits": 2, "max_terms": 2}, (), split, [count], seed)
        distinct = {gym_package.canonical_form(entry["question"]) for entry in entries}
        assert len(distinct) == count
        return distinct

    train = forms("train", 400, "0/0") | forms("train", 400, "3/7")
    assert not train & (forms("validation", 60, "0") | forms("test", 300, "0") | forms("test", 300, "1"))


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("chainsum", {}, r"no task 'chainsum'; did you mean chain_sum"),
        ("zzzzzz", {}, r"no task 'zzzzzz'; there are ab, acre, "),
        ("composite", {}, r"cannot be used: it is a mixture"),
        ("coin_flip", {}, r"cannot be used: its scorer gives full marks to every prefix"),
        ("game_of_life_halting", {}, r"cannot be used: its scorer gives full marks to any text"),
        ("acre", {"levels": (1,)}, r"levels: the package has no curriculum for acre; remove them"),
        ("chain_sum", {"levels": (99,)}, r"levels: 99: the levels of chain_sum go from 0 to 10"),
        (
            "chain_sum",
            {"config": {"min_term": 3}},
            r"config.min_term: no setting of chain_sum; did you mean min_terms",
        ),
        ("chain_sum", {"config": {"seed": 3}}, r"config.seed: no setting of chain_sum; hone sets it"),
        ("chain_sum", {"config": {"min_terms": 3, "max_terms": 2}}, r"max_terms must be >= min_terms"),
        (
            "chain_sum",
            {"levels": (1,), "config": {"min_terms": 3}},
            r"config.min_terms: the level sets it to 2",
        ),
    ],
)
def test_what_cannot_be_is_said(name, config, words):
    """The message of the process that makes problems; that it arrives is tested below."""
    settings = GymConfig(name=f"reasoning_gym:{name}", **config)
    with pytest.raises(gym_package.Unusable, match=words):
        gym_package.request(
            name, dict(settings.config), settings.levels, "train", [1] * max(1, len(settings.levels)), "0"
        )


def test_errors_reach_the_user(monkeypatch):
    with pytest.raises(UserError, match=r"^task: reasoning_gym:chainsum: the package has no task"):
        task("chainsum").problems("train")
    with pytest.raises(UserError, match=r"task.name: 'reasoning_gym' names no task of the package; write"):
        load_for_task("reasoning_gym")
    with pytest.raises(ValueError, match="a level is named twice"):
        GymConfig(name="reasoning_gym:ab", levels=(1, 1))
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    gym_package.reasoning_gym_package.cache_clear()
    with pytest.raises(gym_package.Unusable, match=r"not installed .*; run: pip install 'reasoning-gym"):
        gym_package.settings_of("chain_sum", {}, None)
    gym_package.reasoning_gym_package.cache_clear()


def test_too_many_are_refused_with_the_number_found():
    with pytest.raises(gym_package.Unusable, match=r"found \d+ distinct problems for the train split, 500 were"):
        gym_package.request("count_bits", {"min_n": 1, "max_n": 60}, (), "train", [500], "0")


def test_a_recipe_selects_it_by_name():
    recipe = load_for_task("reasoning_gym:chain_sum", ["task.train=5", "task.levels=[1, 2]"])
    assert (recipe.task.name, recipe.task.levels, recipe.task.train) == ("reasoning_gym:chain_sum", (1, 2), 5)
    assert isinstance(make_task(recipe.task), GymTask)
    with pytest.raises(UserError, match=r"task.people: unknown key; valid here: name, levels, config"):
        load_for_task("reasoning_gym:chain_sum", ["task.people=[2]"])


# --- model text is not executed --------------------------------------------------------------------------------------

EVALUATING = {
    "binary_matrix": {},
    "n_queens": {"valid_answers": []},
    "spiral_matrix": {},
    "string_insertion": {},
    "countdown": {"numbers": [1, 2], "target": 3},
    "puzzle24": {},
    "simple_integration": {"variable": "x", "integrand": "2*x"},
    "intermediate_integration": {"variable": "x", "integrand": "2*x"},
    "polynomial_multiplication": {},
}


@pytest.mark.parametrize("name", EVALUATING)
def test_no_answer_is_executed(name, tmp_path):
    mark = tmp_path / "executed"
    problem = bare(name, "x", **EVALUATING[name])
    call = f"open({str(mark)!r}, 'w')"
    for code in (call, f"[{call}]", f"().__class__ or {call}", f"x + {call}"):
        gym_package.score(name, "{}", problem.extra["entry"], code)
        assert not mark.exists()


def test_the_tasks_that_evaluate_are_all_known():
    """A version of the package with another scorer that evaluates text fails here, and is refused when used."""
    used = {}
    for name in sorted(package.factory.DATASETS):
        module = sys.modules[package.factory.DATASETS[name][0].__module__]
        source = inspect.getsource(module)
        evaluators = gym_package.names_used(compile(source, name, "exec")) & {"eval", "exec", "sympify"}
        if evaluators or ("sympy" in source and "parse_expr" in source):
            used[name] = evaluators
    assert used.keys() == {*gym_package.READABLE, *gym_package.LITERAL, *gym_package.OWN_TEXT}
    assert used.keys() >= EVALUATING.keys()


def test_an_unknown_task_that_evaluates_is_refused(monkeypatch):
    monkeypatch.setattr(gym_package, "LITERAL", ())
    with pytest.raises(gym_package.Unusable, match=r"its code calls eval, in this version \(.*hone knows no safe way"):
        gym_package.settings_of("n_queens", {}, None)


def test_answers_that_cannot_be_given_are_no_gold():
    def entry(answer):
        return bare("ab", answer).extra["entry"]

    assert gym_package.gold_of("ab", "{}", entry("A# #B")) == "A# #B"
    assert gym_package.gold_of("ab", "{}", entry("A# #B ")) is None  # an answer is stripped before it is graded
    assert gym_package.gold_of("ab", "{}", entry("")) is None
    written = entry("-Integral(x**2*cos(x), x) + C") | {"metadata": {"variable": "x", "integrand": "-x**2*cos(x)"}}
    assert gym_package.gold_of("intermediate_integration", "{}", written) is None


def test_guarded_scorers_still_score():
    def score(name, gold, answer, **metadata):
        return gym_package.score(name, "{}", bare(name, gold, **metadata).extra["entry"], answer)

    assert score("string_insertion", "ABC", "ABC") == 1.0
    assert score("string_insertion", "ABC", "['A', 'B', 'C']") == 0.1  # a list of characters has part of the marks
    assert score("spiral_matrix", "1 2", "[1, 2]") == 0.1
    assert score("simple_integration", "x**2 + C", "x**2 + 7", variable="x", integrand="2*x") == 1.0
    assert score("simple_integration", "x**2 + C", "x**3", variable="x", integrand="2*x") == 0.0
    assert (
        score("intermediate_integration", "", "exp(2*x)/2 + log(x) + C", variable="x", integrand="exp(2*x) + 1/x") == 1
    )
    assert score("polynomial_multiplication", "x**2 - 1", "x**2 - 1") == 1.0
    assert score("countdown", "1 + 2", "1 + 2", numbers=[1, 2], target=3) == 1.0
    assert score("countdown", "1 + 2", "2 ** 1 + 1", numbers=[1, 2], target=3) is None
    assert score("puzzle24", "", "(1 + 2 + 3) * 4") == 1.0


def test_a_scorer_that_hangs_is_killed_and_counts_for_nothing(monkeypatch):
    monkeypatch.setattr(gym_package, "REFUSED", {})
    slow = GymTask(GymConfig(name="reasoning_gym:complex_arithmetic", deadline=1.0))
    slow._own = "coin_flip"  # Fraction("1e999999999") computes a number of a billion digits
    problem = bare("coin_flip", "0.5")
    grades = slow.grade_all([(problem, completion("", answer)) for answer in ("1e9999999999", "0.5", "x" * 50)])
    assert [g.verdict for g in grades] == ["verifier_timeout", "correct", "wrong"]
    config = RewardConfig(parts={"task_score": 1.0})
    (reward,) = make_reward(config, slow)(problem, [rollout("<answer>1e9999999999</answer>")])
    assert (reward.verdict, dict(reward.parts)) == ("verifier_timeout", {})
    slow._workers.close()


def rollout(text):
    ids = np.zeros(3, dtype=np.int64)
    return Rollout("p", 0, (Turn(ids, ids, np.zeros(3, dtype=np.float32), "stop", 0),), text)


def test_part_of_the_marks_is_a_reward(sums):
    n_queens = task("n_queens")
    board = [["_", "Q"], ["Q", "_"]]
    problem = bare("n_queens", "_ Q\nQ _", valid_answers=["_ Q\nQ _"])
    texts = [completion("hm", answer) for answer in ("_ Q\nQ _", str(board), "no", f"open('{board}')")]
    reward = make_reward(RewardConfig(parts={"task_score": 1.0}), n_queens)
    assert [r.total for r in reward(problem, list(map(rollout, texts)))] == [1.0, 0.5, 0.0, 0.0]
    n_queens._workers.close()


@pytest.mark.slow
def test_a_spread_of_tasks():
    for name in (
        "ab",
        "bf",
        "sudoku",
        "codeio",
        "rubiks_cube",
        "graph_color",
        "zebra_puzzles",
        "arc_1d",
        "figlet_font",
    ):
        made = task(name, train=4)
        problems = made.problems("train")
        items = [(p, completion("", p.answer)) for p in problems if p.answer is not None]
        assert [g.verdict for g in made.grade_all(items)] == ["correct"] * 4
        assert made.grade(problems[0], completion("", "zzz")).verdict in ("wrong", "malformed")
        made._workers.close()
