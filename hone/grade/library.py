"""Equivalence by `math-verify` (github.com/huggingface/Math-Verify): what runs in a killable worker.

Its own limits of time are alarms, which stop nothing that holds the interpreter; they are off, and the worker
is killed.
"""

from __future__ import annotations

import logging

import math_verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # that its limits of time are off


def equivalent(gold: str, answer: str) -> bool:
    """Whether the library takes the answer for the recorded one. Raises ValueError if it cannot read that one."""
    wanted = math_verify.parse(_as_math(gold), parsing_timeout=None, raise_on_error=True)
    if not wanted:
        raise ValueError(f"math-verify cannot read the recorded answer {gold!r}")
    parsed = math_verify.parse(_as_math(answer), parsing_timeout=None)
    return bool(parsed) and bool(math_verify.verify(wanted, parsed, timeout_seconds=None, raise_on_error=True))


def _as_math(text: str) -> str:
    return text if "$" in text.replace("\\$", "") else f"${text}$"


# The first comparison loads grammars and tables: here, before the time of a call begins to count.
equivalent("1", "\\tan x")
