"""Equivalence by `math-verify` (github.com/huggingface/Math-Verify), run in a killable worker.

The library's own timeouts are alarms, which cannot stop code that holds the interpreter lock; they are off, and the
worker is killed instead.
"""

from __future__ import annotations

import logging

import math_verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # silences warnings that its timeouts are off


def equivalent(gold: str, answer: str) -> bool:
    """Whether the library finds both answers equal. Raises ValueError if it cannot read the recorded one."""
    wanted = math_verify.parse(_as_math(gold), parsing_timeout=None, raise_on_error=True)
    if not wanted:
        raise ValueError(f"math-verify cannot read the recorded answer {gold!r}")
    parsed = math_verify.parse(_as_math(answer), parsing_timeout=None)
    return bool(parsed) and bool(math_verify.verify(wanted, parsed, timeout_seconds=None, raise_on_error=True))


def _as_math(text: str) -> str:
    return text if "$" in text.replace("\\$", "") else f"${text}$"


# The first comparison loads grammars and tables: do that here, before the deadline of a call starts.
equivalent("1", "\\tan x")
