"""The tool `calculator`: exact arithmetic, parsed and never evaluated as code."""

from __future__ import annotations

from hone.tasks.countdown.arithmetic import compute, parse


def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly.

    Args:
        expression: Integers, + - * / and parentheses, such as (1 + 2) / 3.
    """
    try:
        return str(compute(parse(expression)))
    except (ValueError, ZeroDivisionError) as error:
        return f"Error: {error}"
