"""Real rows through the reader and the grader: every recorded answer in every form, and another row's answer.

    .venv/bin/python benchmarks/real_rows.py FOLDER...      # of GSM8K, MATH-500 or other rows; nothing is written

For each folder: how its columns were recognised; for each form, how many recorded answers are graded correct; how many
answers of other rows (the next one that is written differently) are graded wrong; and every exception to that.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable

from hone.tasks.rows.task import SPLITS, DatasetConfig, DatasetTask
from hone.types import Problem

FORMS: dict[str, Callable[[str], str]] = {
    "plain": lambda answer: answer,
    "boxed": lambda answer: f"Let us see.\n\\boxed{{{answer}}}",
    "last line": lambda answer: f"First 1, then 2.\n\nAnswer: \\boxed{{{answer}}}",
    "label": lambda answer: f"First 1, then 2.\nAnswer: ${answer}$",
    "hashes": lambda answer: f"First 1 and then 2.\n#### {answer}",
    "sentence": lambda answer: f"First 1, then 2. Therefore the answer is ${answer}$.",
    "bare sentence": lambda answer: f"Therefore the answer is {answer}.",
    "formula": lambda answer: f"From 3 and 4 we get ${answer}$.",
    "tags": lambda answer: f"<think>It may be \\boxed{{0}}.</think>\n<answer>{answer}</answer>",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--shown", type=int, default=20, help="most exceptions to list of each kind")
    arguments = parser.parse_args()
    for folder in arguments.folders:
        examine(folder, arguments.shown)


def examine(folder: str, shown: int) -> None:
    task = DatasetTask(DatasetConfig(source=folder))
    problems = [problem for split in SPLITS for problem in task.problems(split)]
    if problems[0].task != "dataset":
        print(f"{folder}: {len(problems)} rows of the task {problems[0].task}")
        return
    print(f"{folder}: {len(problems)} problems")
    for name, form in FORMS.items():
        report(task, name, [(p, form(written(p))) for p in problems], "correct", shown)
    others = [(p, FORMS["boxed"](written(next_other(problems, i)))) for i, p in enumerate(problems)]
    report(task, "another row's", others, "wrong", shown)


def written(problem: Problem) -> str:
    """Currency is written as in LaTeX, so that a lone dollar is none of its delimiters."""
    return str(problem.answer)


def next_other(problems: list[Problem], i: int) -> Problem:
    n = len(problems)
    return next(p for k in range(1, n) if (p := problems[(i + k) % n]).answer != problems[i].answer)


def report(task: DatasetTask, name: str, items: list[tuple[Problem, str]], wanted: str, shown: int) -> None:
    start = time.perf_counter()
    grades = task.grade_all(items)
    seconds = time.perf_counter() - start
    verdicts = dict(Counter(grade.verdict for grade in grades))
    print(f"  {name:14} {verdicts.get(wanted, 0)} of {len(items)} {wanted}, {seconds:.2f} s, {verdicts}")
    odd = [(p, g) for (p, _), g in zip(items, grades) if g.verdict != wanted]
    for problem, grade in odd[:shown]:
        print(f"      recorded {problem.answer!r}, read {grade.extracted!r}: {grade.verdict}")


if __name__ == "__main__":
    main()
