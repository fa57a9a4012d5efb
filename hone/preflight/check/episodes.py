"""Plays an episode of the recipe's environment before the run: with right, useless and malformed messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hone.base.settings import UserError
from hone.environments.make import make_episodes
from hone.environments.play import Episodes
from hone.environments.sandbox import missing_protections
from hone.preflight.check.findings import Finding
from hone.recipe.recipe import RLStage, TrainedStage
from hone.rewards.gold import gold_text
from hone.rewards.rules import earned
from hone.rollout.prompts import Renderer
from hone.tasks.base import Task, TracedTask
from hone.types import ENVIRONMENT_FAILURES, Problem, Rollout, Turn

if TYPE_CHECKING:
    from hone.learn.policy import Policy

NAME = "environment"


class ScriptedEngine:
    """An `Engine` that returns the given texts, one in each turn; the last one is repeated."""

    context = None

    def __init__(self, renderer: Renderer, texts: Sequence[str]) -> None:
        self._renderer, self._texts = renderer, list(texts)
        self._said = 0

    def generate(self, prompts: Sequence[Any], sampling: Any, **_: Any) -> list[list[Turn]]:
        """One turn for each prompt, whatever the settings."""
        text = self._texts[min(self._said, len(self._texts) - 1)]
        self._said += 1
        end = [self._renderer.tokenizer.eos_token_id]
        ids = np.concatenate([self._renderer.encode(text), np.asarray(end, np.int64)])
        return [[Turn(prompt, ids, np.zeros(len(ids), np.float32), "stop", 0)] for prompt in prompts]

    def sync(self, policy: Policy, version: int) -> None:
        """Does nothing: there are no weights."""


def played(stage: TrainedStage, task: Task, renderer: Renderer) -> Iterator[Finding]:
    """Plays episodes of the first training problem. An environment that cannot be made is a failure."""
    if not stage.has_turns:
        return
    try:
        episodes = make_episodes(stage, renderer)
    except UserError as error:
        yield Finding("fail", NAME, str(error))
        return
    if "python" in stage.tools:
        missing = missing_protections()
        yield from (Finding("warn", "sandbox", f"the tool python is not kept from {line}") for line in missing)
        if not missing:
            yield Finding("pass", "sandbox", "the tool python has no access to files and the network (bubblewrap)")
    if stage.environment.is_program and stage.environment.runtime == "process":
        line = "the program and what it runs for the model can do what you can; environment.runtime: bwrap contains it"
        yield Finding("warn", "sandbox", line)
    problem = next(iter(task.problems("train")), None)
    if problem is None:
        return
    pays = isinstance(stage, RLStage) and NAME in stage.reward.parts
    rewards: dict[str, float | None] = {}
    for name, texts in _scripts(task, problem).items():
        rollout = _play(episodes, stage, problem, texts)
        rewards[name] = earned(rollout.episode)
        ended = f"{len(rollout.turns)} turns, ended by {rollout.episode.end}"
        if pays:
            ended += f", reward {rewards[name]:g}" if rewards[name] is not None else ", no reward"
        if rollout.episode.end in ENVIRONMENT_FAILURES:
            begun = (
                stage.environment.is_program and rollout.num_tokens > 0
            )  # what fails later may be the answer's fault
            level = "fail" if name == "right" and not begun else "warn"
            why = f"{ended}: {rollout.episode.note}; such samples are left out"
            yield Finding(level, NAME, f"{problem.id}, {name} messages: {why}", name)  # type: ignore[arg-type]
        else:
            yield Finding("pass", NAME, f"{problem.id}, {name} messages: {ended}", name)
    if pays and (rewards["right"] or 0.0) <= (rewards["useless"] or 0.0):
        line = "the gold answer alone earns no more than nonsense here: whether a right answer is paid was not seen"
        yield Finding("warn", NAME, f"{line}; watch `reward` in the first steps", "paid")
    if not stage.environment.is_program:
        yield from _shown(episodes, problem)


def _scripts(task: Task, problem: Problem) -> dict[str, list[str]]:
    """The scripts to play: the worked answer, nonsense, and broken tool calls of several formats."""
    right = [gold_text(problem)]
    if isinstance(task, TracedTask):
        example = task.trace(problem, task.trace_styles[0], seed=0)
        right = [*example.turns, example.text]
    broken = ['<tool_call>{"name": ', "[TOOL_CALLS][{", "```tool\n(", '{"name": "no_such_tool", "parameters": {}}']
    return {"right": right, "useless": ["", "?", "Ask. " * 20], "malformed": broken}


def _play(episodes: Episodes, stage: TrainedStage, problem: Problem, texts: Sequence[str]) -> Rollout:
    engine = ScriptedEngine(episodes.renderer, texts)
    ((rollout,),) = episodes.sample([problem], engine, stage.sampling, samples=1, seed=0)
    return rollout


def _shown(episodes: Episodes, problem: Problem) -> Iterator[Finding]:
    """Whether the prompt tells the model about its tools."""
    environment = episodes.make()
    try:
        try:
            environment.reset(problem, 0)
            tools = environment.tools
        finally:
            environment.close()
    except Exception:  # the user's code; the episodes above have reported it
        return
    renderer = episodes.renderer
    if tools and (renderer.is_raw or "tools" not in str(renderer.tokenizer.chat_template)):
        what = "a raw prompt" if renderer.is_raw else "the model's chat template"
        message = f"{what} does not tell the model about its tools; describe them in prompt.system"
        yield Finding("warn", NAME, message, "tools")
