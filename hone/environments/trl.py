"""Classes written for TRL's `environment_factory`, unchanged: `reset(**row)`, public methods are tools, `get_reward`.

TRL's rules (its documentation of GRPOTrainer): a text that `reset` returns is appended to the last user message; every
public method but `reset` and `get_reward` is a tool; `get_reward`, if there is one, scores the finished episode; reward
functions may take the instances as `environments`.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hone.base.settings import UserError
from hone.environments.base import Message
from hone.environments.tools import Tool, ToolEnvironment
from hone.rewards.functions import columns_of
from hone.types import Problem

#: The column of a row that names its environment, where there are several.
COLUMN = "environment"
_NOT_TOOLS = ("reset", "get_reward")


class TRLEnvironment(ToolEnvironment):
    """One instance of such a class, or of one of several, chosen by the row's column `environment`."""

    def __init__(self, classes: Mapping[str | None, Callable[[], Any]], functions: Sequence[Tool] = ()) -> None:
        self._classes, self._extra = classes, list(functions)
        self.instance: Any = None
        super().__init__(functions)

    def reset(self, problem: Problem, seed: int) -> Sequence[Message] | None:
        row = {**columns_of(problem), "prompt": [dict(message) for message in problem.messages]}
        several = None not in self._classes
        name = row.pop(COLUMN, None) if several else None
        if name not in self._classes:
            known = ", ".join(str(one) for one in self._classes)
            raise UserError(f"{problem.id}: its column {COLUMN} is {name!r}; environment.name has {known}")
        self.instance = self._classes[name]()
        methods = [Tool(getattr(self.instance, method)) for method in tool_methods(type(self.instance))]
        self.functions = [*self._extra, *methods]
        self.__post_init__()
        added = _seeded(seed, lambda: self.instance.reset(**_accepted(self.instance.reset, row)))
        if added is None:
            return None
        last = problem.messages[-1]
        return [*problem.messages[:-1], {**last, "content": f"{last['content']}{added}"}]

    def reward(self) -> float | None:
        if not hasattr(self.instance, "get_reward"):
            return None
        value = self.instance.get_reward()
        value = asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value
        return None if value is None else float(value)


#: Held while a `reset` draws from Python's global generator.
_drawing = threading.Lock()
_PATIENCE = 10.0  # seconds


def _seeded(seed: int, reset: Callable[[], Any]) -> Any:
    """The result of `reset`, during which Python's and NumPy's global generators begin with `seed`.

    Such classes draw their task from them; so the samples of a group get the same task, and a resumed run too.
    """
    if not _drawing.acquire(timeout=_PATIENCE):
        raise TimeoutError(f"another reset has taken more than {_PATIENCE:g} s")
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        return reset()
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        _drawing.release()


async def _awaited(value: Any) -> Any:
    return await value


def tool_methods(kind: type) -> list[str]:
    """The names of the methods that are tools, in alphabetical order, as TRL lists them."""
    names = [name for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction)]
    return [name for name in names if not name.startswith("_") and name not in _NOT_TOOLS]


def _accepted(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that a function takes: hone's rows have more than those that it was written for."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(row)
    return {name: value for name, value in row.items() if name in parameters}
