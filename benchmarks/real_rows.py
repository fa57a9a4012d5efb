"""Real rows through the reader and the grader: every recorded answer in every form, and another row's answer.

    .venv/bin/python benchmarks/real_rows.py FOLDER...      # of GSM8K, MATH-500 or other rows; nothing is written

For each folder: how its columns were recognised; for each form, how many recorded answers are graded correct; how many
answers of other rows (the next one that is written differently) are graded wrong in the same form; and every exception
to that. The last forms are for answers that are numbers only.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence

from hone.rewards.gold import number
from hone.tasks.rows.task import SPLITS, DatasetConfig, DatasetTask
from hone.types import Problem

Form = Callable[[str], str]

FORMS: dict[str, Form] = {
    "plain": lambda answer: answer,
    "boxed": lambda answer: f"Let us see.\n\\boxed{{{answer}}}",
    "last line": lambda answer: f"First 1, then 2.\n\nAnswer: \\boxed{{{answer}}}",
    "label": lambda answer: f"First 1, then 2.\nAnswer: ${answer}$",
    "hashes": lambda answer: f"First 1 and then 2.\n#### {answer}",
    "sentence": lambda answer: f"First 1, then 2. Therefore the answer is ${answer}$.",
    "bare sentence": lambda answer: f"Therefore the answer is {answer}.",
    "formula": lambda answer: f"From 3 and 4 we get ${answer}$.",
    "tags": lambda answer: f"<think>It may be \\boxed{{0}}.</think>\n<answer>{answer}</answer>",
    "minerva": lambda answer: f"From 1 + 2.\nFinal Answer: The final answer is ${answer}$. I hope it is correct.",
    "llama": lambda answer: f"## Step 1: Add 1 and 2.\n\nThe final answer is: $\\boxed{{{answer}}}$",
    "deepseek": lambda answer: f"<think>\nPerhaps 3.\n</think>\n\nAdd 1.\n\n**Final Answer**\n\\boxed{{{answer}}}",
    "heading": lambda answer: f"Add 1 and 2.\n\n### Final Answer\n\n$$\n{answer}\n$$",
    "bold label": lambda answer: f"Add 1 and 2.\n\n**Answer:** \\( {answer} \\)",
    "said by label": lambda answer: f"Add 1 and 2.\nAnswer: In the end the result is ${answer}$. I hope this helps.",
    "label, reason": lambda answer: f"Answer: We get ${answer}$ because 1 and 2 were added.",
    "checked": lambda answer: f"\\boxed{{{answer}}}\n\nWe may check our answer: $1 + 2 = 3$.",
    "boxed twice": lambda answer: f"So it is $\\boxed{{{answer}}}$.\n\n**Final answer:** $\\boxed{{{answer}}}$",
    "echo": lambda answer: f"I put the answer in \\boxed{{}}. Add 1.\nThe final answer is ${answer}$.",
    "said in tags": lambda answer: f"<think>1 + 2</think> <answer>In all it is ${answer}$.</answer>",
    "display": lambda answer: f"Add 1 and 2. Hence\n\\[\n{answer}\n\\]",
}
NUMBERS: dict[str, Form] = {
    "apples": lambda answer: f"Answer: There are {answer} apples.",
    "of apples": lambda answer: f"Add 1 and 2. So there are {answer} apples in total.",
    "money": lambda answer: f"Add $1 and $2. She pays ${answer}.",
    "assigned": lambda answer: f"\\boxed{{x = {answer}}}",
    "unit in box": lambda answer: f"\\boxed{{{answer} \\text{{ apples}}}}",
    "bold number": lambda answer: f"**Answer:** She has **{answer}** apples.",
    "in words": lambda answer: f"The final answer is {answer}, not 0.5, because 1 was added.",
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
    numbers = [i for i, problem in enumerate(problems) if number(written(problem)) is not None]
    for forms, chosen in ((FORMS, range(len(problems))), (NUMBERS, numbers)):
        for name, form in forms.items():
            report(task, name, [(problems[i], form(written(problems[i]))) for i in chosen], "correct", shown)
            others = [(problems[i], form(written(problems[other(problems, chosen, n)]))) for n, i in enumerate(chosen)]
            report(task, f"{name}, another", others, "wrong", shown)


def written(problem: Problem) -> str:
    """Currency is written as in LaTeX, so that a lone dollar is none of its delimiters."""
    return str(problem.answer)


def other(problems: Sequence[Problem], chosen: Sequence[int], n: int) -> int:
    """The next row after the n-th chosen one whose answer is written differently."""
    rest = (chosen[(n + k) % len(chosen)] for k in range(1, len(chosen)))
    return next(i for i in rest if problems[i].answer != problems[chosen[n]].answer)


def report(task: DatasetTask, name: str, items: list[tuple[Problem, str]], wanted: str, shown: int) -> None:
    start = time.perf_counter()
    grades = task.grade_all(items)
    seconds = time.perf_counter() - start
    verdicts = dict(Counter(grade.verdict for grade in grades))
    print(f"  {name:22} {verdicts.get(wanted, 0)} of {len(items)} {wanted}, {seconds:.2f} s, {verdicts}")
    odd = [(p, g) for (p, _), g in zip(items, grades) if g.verdict != wanted]
    for problem, grade in odd[:shown]:
        print(f"      recorded {problem.answer!r}, read {grade.extracted!r}: {grade.verdict}")


if __name__ == "__main__":
    main()
