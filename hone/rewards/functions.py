"""Rewards that users write: a part named `path/file.py:function` or `package.module:function`.

    reward:
      parts: {outcome: 1.0, my/rewards.py:brief: 0.2}

Functions written for other programs work unchanged, `async` ones too; the names of their parameters tell which program
(`SIGNATURES`). Arguments are passed by name: a function gets those that it names, or all if it takes `**kwargs`.
It returns None for a sample that it does not apply to: the other parts are summed without it, as in TRL; only a sample
for which no part has a value is left out of its group. A sample whose call raises is left out too, counted and shown.
A value that is not a finite number of ordinary size, or a list of the wrong length, is a fault of the function and
stops the run.

In the trainer's process a function gets a whole group at once (verl's a sample). With `reward.functions.isolate` it
runs in `hone.grade.workers`, where it may hang or crash, and gets one sample per call (`problem, rollouts`: a group).
"""

from __future__ import annotations

import contextlib
import numbers
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from hone.base.places import locate_target
from hone.base.settings import UserError
from hone.grade.child import describe, finished, load_target, looks_of
from hone.grade.targets import read_target
from hone.grade.workers import Failure, Workers
from hone.rewards.base import LARGEST, POSSIBLE, Judged, Part, Score
from hone.rewards.config import RewardConfig
from hone.types import VERIFIER_FAILURES, Problem, Reward, Rollout

#: What identifies a signature: its required parameters, and how its program calls it.
SIGNATURES: dict[str, tuple[tuple[str, ...], str]] = {
    "trl": (("completions",), "f(prompts, completions, **columns) -> list, as in TRL"),
    "verl": (("solution_str", "ground_truth"), "f(data_source, solution_str, ground_truth, extra_info), as in verl"),
    "openrlhf": (("queries", "prompts"), "f(queries, prompts, labels) -> list or dict, as in OpenRLHF"),
    "hone": (("problem", "rollouts"), "f(problem, rollouts) -> list"),
}
#: Most calls of an `async` function in flight at the same time.
CONCURRENT = 64

Item = tuple[Problem, Rollout]


class _Logged(NamedTuple):
    """What a function returned, and what it logged."""

    returned: Any
    details: Mapping[str, Sequence[float]]


class Exited(UserError):
    """A user's function called `os._exit` in this process."""


@contextlib.contextmanager
def no_exit(target: str) -> Iterator[None]:
    """Makes `os._exit` raise in this process: with code 0 an unfinished run would pass as finished.

    A parent process that watches for this would have to forward signals, the terminal and standard input, also to a
    debugger; and an untrusted function belongs in `reward.functions.isolate` anyway, where it cannot end the run.
    Processes that the function forks, as multiprocessing does, exit as usual.
    """
    leave, me = os._exit, os.getpid()

    def refuse(code: int = 0) -> NoReturn:
        if os.getpid() != me:
            leave(code)
        raise Exited(
            f"reward {target}: called os._exit({code}), which would end the run here; raise an exception to leave a "
            "sample out, or set reward.functions.isolate: true"
        )

    os._exit = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave


class UserFunction(Part):
    """One of the user's functions. `label` is its name in metrics; `target` says where it is."""

    def __init__(self, config: RewardConfig, target: str, label: str) -> None:
        super().__init__(config)
        self.target, self.label, self.settings = target, label, config.functions
        source = read_target(target)
        self.function: Callable[..., Any] | None = None
        self.workers: Workers | None = None
        self.warned = False  # that a call takes too long
        if self.settings.isolate:
            limits = self.settings
            self.workers = Workers(target, count=limits.workers, deadline=limits.deadline, memory_mb=limits.memory_mb)
            looks = self.workers.looks()
        else:
            try:
                self.function = load_target(locate_target(target), source)
            except (Exception, SystemExit) as error:  # whatever importing the user's file raises
                raise UserError(f"{target}: cannot be imported: {describe(error)}") from error
            looks = looks_of(self.function)
        self.parameters = [(name, required) for name, kind, required, _ in looks["parameters"] if "VAR" not in kind]
        self.takes_all = any(kind == "VAR_KEYWORD" for _, kind, _, _ in looks["parameters"])
        self.signature = recognise(target, looks)
        self.as_messages = self._as_messages(looks)
        names = [name for name, _ in self.parameters]
        self.reads_tokens = "completion_ids" in names or (self.takes_all and "completion_ids" in looks["source"])

    def _as_messages(self, looks: Mapping[str, Any]) -> bool:
        """TRL passes completions as text or as messages, depending on the data set; infer which from the code."""
        if self.settings.completions != "auto":
            return self.settings.completions == "messages"
        hints = {name: hint for name, _, _, hint in looks["parameters"]}
        if hint := hints.get("completions", ""):
            return "dict" in hint.lower()
        return any(f"{opened}content{closed}" in looks["source"] for opened, closed in (('["', '"]'), ("['", "']")))

    def check(self, problems: Sequence[Problem]) -> None:
        """Raises UserError if the function requires an argument that no problem has."""
        missing = [name for name, required in self.parameters if required]
        offered: dict[str, Any] = {}
        for problem in problems:
            offered |= self._offered([(problem, Rollout(problem.id, 0, (), ""))])
            missing = [name for name in missing if name not in offered]
            if not missing:
                return
        if problems and missing:
            raise UserError(
                f"reward {self.target}: asks for {', '.join(missing)}, which problems of {problems[0].task} do not "
                f"have; there are {', '.join(sorted(offered))}. Give the parameter a default, or the problems "
                "that column"
            )

    def __call__(self, problem: Problem, group: Sequence[Judged]) -> list[Score]:
        return self.score_all([(problem, group)])[0]

    def score_all(self, groups: Sequence[tuple[Problem, Sequence[Judged]]]) -> list[list[Score]]:
        items = [[(problem, one.rollout) for one in group] for problem, group in groups]
        single = self.signature == "verl" or (self.workers is not None and self.signature != "hone")
        calls = [[item] for group in items for item in group] if single else [group for group in items if group]
        results = self._call(calls)
        flat = iter([score for call, one in zip(calls, results, strict=True) for score in self._scores(one, len(call))])
        return [[next(flat) for _ in group] for group in items]

    # --- calling ---

    def _call(self, calls: Sequence[Sequence[Item]]) -> list[Any]:
        """The function's result for each call; a `Failure` where it raised or took too long."""
        if self.workers is not None:
            return self.workers.map([()] * len(calls), [self._arguments(call) for call in calls])
        assert self.function is not None
        results: list[Any] = []
        for call in calls:
            details: dict[str, list[float]] = {}
            arguments = self._arguments(call, details)
            watch = threading.Timer(self.settings.deadline, self._warn_of_hang)
            watch.daemon = True
            watch.start()
            try:
                with no_exit(self.target):
                    returned = self.function(**arguments)
            except Exited:
                raise
            except (Exception, SystemExit) as error:  # user code: only this call is without a score
                returned = Failure("verifier_error", describe(error))
            finally:
                watch.cancel()
            results.append(_Logged(returned, details))
        waiting = [i for i, result in enumerate(results) if hasattr(result.returned, "__await__")]
        if waiting:  # only if needed: a plain function may start its own event loop
            with no_exit(self.target):
                answers = finished(self._await([results[i].returned for i in waiting]))
            for i, returned in zip(waiting, answers, strict=True):
                results[i] = results[i]._replace(returned=returned)
        return results

    def _warn_of_hang(self) -> None:
        """Report once what the run is waiting for: a plain function in this process cannot be stopped."""
        if not self.warned:
            self.warned = True
            print(
                f"reward {self.target}: no result after {self.settings.deadline:g} s (reward.functions.deadline), and "
                "still waiting. With reward.functions.isolate: true such a call is stopped, and its sample left out",
                file=sys.stderr,
                flush=True,
            )

    async def _await(self, coroutines: Sequence[Awaitable[Any]]) -> list[Any]:
        import asyncio  # not at the top: most recipes have no function, and every recipe is validated

        limit = asyncio.Semaphore(CONCURRENT)

        async def one(coroutine: Awaitable[Any]) -> Any:
            async with limit:
                try:
                    return await asyncio.wait_for(coroutine, self.settings.deadline)
                except (asyncio.TimeoutError, TimeoutError):
                    return Failure("verifier_timeout", f"no result within {self.settings.deadline:g} s")
                except Exited:
                    raise
                except (Exception, SystemExit) as error:  # user code, as above
                    return Failure("verifier_error", describe(error))

        return list(await asyncio.gather(*map(one, coroutines)))

    def _arguments(self, call: Sequence[Item], details: dict[str, list[float]] | None = None) -> dict[str, Any]:
        offered = self._offered(call)
        if details is not None and self.signature == "trl":  # logged values become details of the score
            offered["log_metric"] = lambda name, value: _keep_numbers(details, name, value, len(call))
            offered["log_extra"] = lambda name, values: _keep_numbers(details, name, values, len(call))
        if self.signature == "trl":  # columns that only other rows have; `check` made sure of that
            offered |= {
                name: [None] * len(call) for name, required in self.parameters if required and name not in offered
            }
        if self.takes_all:
            return offered
        return {name: offered[name] for name, _ in self.parameters if name in offered}

    def _offered(self, call: Sequence[Item]) -> dict[str, Any]:
        texts = [rollout.text for _, rollout in call]
        prompts = ["\n\n".join(message["content"] for message in problem.messages) for problem, _ in call]
        columns = [columns_of(problem) for problem, _ in call]
        problem, rollout = call[0]
        if self.signature == "hone":
            return {"problem": problem, "rollouts": [r for _, r in call]}
        if self.signature == "verl":
            return {
                "data_source": columns[0].get("data_source", problem.task),
                "solution_str": rollout.text,
                "ground_truth": problem.answer,
                "extra_info": {**columns[0], **_mapping(columns[0].get("extra_info"))},
            }
        if self.signature == "openrlhf":
            return {
                "queries": [prompt + text for prompt, text in zip(prompts, texts, strict=True)],
                "prompts": prompts,
                "labels": [problem.answer for problem, _ in call],
            }
        names = dict.fromkeys(name for row in columns for name in row)
        ids = [[int(i) for turn in r.turns for i in turn.completion_ids] for _, r in call]
        return {
            **{name: [row.get(name) for row in columns] for name in names},
            "prompts": [[dict(m) for m in p.messages] for p, _ in call] if self.as_messages else prompts,
            "completions": [_messages(r) for _, r in call] if self.as_messages else texts,
            "completion_ids": ids,
            "environments": [r.episode.environment for _, r in call],
        }

    # --- reading ---

    def _scores(self, result: Any, count: int) -> list[Score]:
        """`count` scores from the result of one call. Raises UserError for a result that cannot be a reward."""
        logged: Mapping[str, Sequence[float]] = {}
        if isinstance(result, _Logged):
            result, logged = result
        if isinstance(result, Failure):
            return [Score(0.0, failure=result.kind, note=result.message)] * count
        values: Any = [result] if self.signature == "verl" else result
        if self.signature == "openrlhf" and isinstance(result, Mapping):
            if "rewards" not in result:
                raise self._wrong(f"gave a mapping without 'rewards': {', '.join(map(str, result))}")
            values = result["rewards"]
            extra_logs: dict[str, list[float]] = {}
            for name, column in _mapping(result.get("extra_logs")).items():
                _keep_numbers(extra_logs, name, column, count)
            logged = extra_logs
        values = values.tolist() if hasattr(values, "tolist") else values  # an array or a tensor
        if not isinstance(values, (list, tuple)):
            raise self._wrong(f"gave {type(values).__name__}, not a list of {count} numbers")
        if len(values) != count:
            raise self._wrong(f"gave {len(values)} rewards for {count} completions; return one for each, in order")
        details = [{f"{self.label}/{name}": column[i] for name, column in logged.items()} for i in range(count)]
        return [self._score(value, more) for value, more in zip(values, details, strict=True)]

    def _score(self, value: Any, details: dict[str, float]) -> Score:
        if isinstance(value, Reward):
            more = {f"{self.label}/{name}": part for name, part in value.parts.items()}
            failure = value.verdict if value.verdict in VERIFIER_FAILURES else None
            return Score(self._number(value.total), {**more, **details}, failure, value.note)
        if self.signature == "verl" and isinstance(value, Mapping):
            if "score" not in value:
                raise self._wrong(f"gave a mapping without 'score': {', '.join(map(str, value))}")
            numeric = {n: float(v) for n, v in value.items() if n != "score" and _is_number(v)}
            details, value = {f"{self.label}/{n}": v for n, v in numeric.items()}, value["score"]
        if value is None:
            return Score(None, details)
        return Score(self._number(value), details)

    def _number(self, value: Any) -> float:
        value = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
        if not isinstance(value, numbers.Real):
            raise self._wrong(f"gave {type(value).__name__} {_shown(value)}; a reward is a number, or None")
        # An integer beyond the range of floats can be compared, but not converted.
        if not bool(-LARGEST <= value <= LARGEST):  # type: ignore[operator]
            raise self._wrong(f"gave {_shown(value)}; {POSSIBLE}, or None where the function does not apply")
        return float(value)

    def _wrong(self, what: str) -> UserError:
        return UserError(f"reward {self.target}: {what}")


def recognise(target: str, looks: Mapping[str, Any]) -> str:
    """The key of `SIGNATURES` that fits a function. Raises UserError unless exactly one does."""
    names = [name for name, kind, _, _ in looks["parameters"] if "VAR" not in kind]
    if "completion_ids" in names:
        names.append("completions")  # TRL's own rewards take either
    fits = [key for key, (needed, _) in SIGNATURES.items() if set(needed) <= set(names)]
    if len(fits) == 1:
        return fits[0]
    kinds = "\n".join(f"  {shown}" for _, shown in SIGNATURES.values())
    which = f"fits {len(fits)} signatures" if fits else "fits no signature"
    parameters = ", ".join(dict.fromkeys(names))
    raise UserError(f"reward {target}: f({parameters}) {which}; name the parameters as in one of\n{kinds}")


def _messages(rollout: Rollout) -> list[dict[str, Any]]:
    """What the model said and was answered, after the prompt."""
    steps = rollout.episode.steps
    if not steps:
        return [{"role": "assistant", "content": rollout.text}]
    return [dict(message) for step in steps for message in (step.message, *step.replies)]


def columns_of(problem: Problem) -> dict[str, Any]:
    """Arguments that a function can name: the fields of every problem, overridden by the row's own columns."""
    known = {
        "answer": problem.answer,
        "ground_truth": problem.answer,
        "problem_id": problem.id,
        "task": problem.task,
        "level": problem.level,
        "domain": problem.domain,
    }
    solution = {} if problem.reference is None else {"solution": problem.reference}
    return {**known, **solution, **problem.extra}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and bool(abs(value) <= sys.float_info.max)  # type: ignore[operator]


def _shown(value: Any) -> str:
    """A value as shown in messages, in at most 60 characters."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST:  # may be too long to print
        return f"a whole number of {value.bit_length()} bits"
    return f"{value!r:.60}"


def _keep_numbers(kept: dict[str, list[float]], name: str, values: Any, count: int) -> None:
    """Keep a logged column if it holds one number per sample; logged text is dropped."""
    values = values.tolist() if hasattr(values, "tolist") else values
    values = [values] * count if _is_number(values) else values
    if isinstance(values, (list, tuple)) and len(values) == count and all(map(_is_number, values)):
        kept[str(name)] = [float(value) for value in values]
