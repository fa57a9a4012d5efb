"""The reward: 1 for an expression of all the numbers that makes the target, else 0."""

from collections import Counter

from hone.tasks.countdown import arithmetic


def countdown(completions, nums, target, **columns):
    return [score(*row) for row in zip(completions, nums, target, strict=True)]


def score(text, nums, target):
    _, tag, rest = text.rpartition("<answer>")
    try:
        terms = arithmetic.parse(rest.partition("</answer>")[0] if tag else "")  # never eval: a model wrote it
        right = Counter(arithmetic.numbers(terms)) == Counter(nums) and arithmetic.compute(terms) == target
    except (ValueError, ZeroDivisionError):
        return 0.0
    return float(right)
