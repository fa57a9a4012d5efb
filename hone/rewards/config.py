"""Settings of the reward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field, FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hone.base import places
from hone.base.settings import Section
from hone.grade.targets import functions_in
from hone.rewards.judge.config import JudgeConfig


class CountdownReward(Section):
    """Scores of `countdown`; without an answer it is 0."""

    correct: FiniteFloat = 1.0
    wrong: FiniteFloat = 0.1  # an answer that is not correct, whatever it holds


class LinearAlgebraReward(Section):
    """Settings of `linear_algebra`: the most that long thinking adds, and the characters of thinking that earn it."""

    thinking: float = Field(default=0.0, ge=0, le=0.25)
    thinking_chars: PositiveInt = 1000


class OverlongReward(Section):
    """Lengths of `overlong`, in completion tokens: no penalty up to `max_tokens - buffer`, -1 from `max_tokens`."""

    max_tokens: PositiveInt | None = None  # usually that of sampling
    buffer: PositiveInt = 64


class FunctionsConfig(Section):
    """How the user's functions are called; see hone.rewards.functions."""

    isolate: bool = False  # in their own processes, with a deadline; one sample per call
    workers: PositiveInt = 2  # processes per function, if isolated
    deadline: PositiveFloat = 10.0  # seconds per call; without `isolate` only an async function can be stopped
    memory_mb: PositiveInt = 2048  # per call, if isolated
    completions: Literal["auto", "text", "messages"] = "auto"  # what TRL functions receive; auto: see their code


class PerplexityReward(Section):
    """Settings of `perplexity`: how much the policy's text helps a frozen answerer; see hone.rewards.perplexity."""

    answerer: str = "policy"  # the policy as it was at the start of the stage; or a folder, a hub id, or http://.../v1
    served_model: str | None = None  # the model's name at the server, if the answerer is one
    kind: Literal["hybrid", "relative", "absolute", "vr_cli"] = "hybrid"
    alpha: float = Field(default=0.5, ge=0.0, le=1.0)  # share of `relative` in hybrid
    context: Literal["text", "thinking", "before_answer"] = "text"  # the text that the answerer reads
    cue: str = "The final answer is: "  # before the gold answer, with and without a context
    leak: Literal["flag", "zero"] = "flag"  # a context that holds the gold answer: only logged, or scored 0

    @model_validator(mode="after")
    def _named(self) -> PerplexityReward:
        if self.is_server and not self.served_model:
            raise ValueError("served_model: missing; give the name under which the server knows the model")
        return self

    @property
    def is_server(self) -> bool:
        return self.answerer.startswith(("http://", "https://"))


class SmallPartsReward(Section):
    """Scores of `small_parts`."""

    correct: FiniteFloat = 2.0
    integer: FiniteFloat = 0.5  # the answer block holds a whole number
    strict_format: FiniteFloat = 0.5
    soft_format: FiniteFloat = 0.5
    tag: FiniteFloat = 0.125  # for each of the four tags that occurs exactly once
    trailing: NonNegativeFloat = 0.001  # subtracted for every character after the last </answer>


class ThinkingReward(Section):
    """Penalties of `thinking`, each subtracted at most once per answer."""

    dummy: NonNegativeFloat = 1.0  # no thinking, or thinking without content
    foreign: NonNegativeFloat = 1.0  # letters of a script that the problem does not use
    unmentioned: NonNegativeFloat = 1.0  # a person of the puzzle is missing from the thinking
    length_limit: NonNegativeFloat = 1.0  # cut off by the limit on tokens
    min_words: NonNegativeInt = 5  # thinking with fewer distinct words, fillers aside, is a dummy


def part_label(name: str, names: Iterable[str]) -> str:
    """The name of a part in metrics and rollouts, where `names` are all of `reward.parts`.

    A function's name without its file, unless another part has the same name:

    >>> part_label("my/reward.py:right", ["my/reward.py:right", "overlong"])
    'right'
    """
    short = name.rpartition(":")[2]
    others = [*(other.rpartition(":")[2] for other in names if other != name), "outcome", "well_formed"]
    return name if ":" in name and short in others else short


class RewardConfig(Section):
    """The reward is the weighted sum of `parts`: names from `hone.rewards.REWARDS`, of installed packages, or functions
    (`file.py:function`), with their weights."""

    parts: dict[str, FiniteFloat] = {"outcome": 1.0}
    functions: FunctionsConfig = FunctionsConfig()
    judge: JudgeConfig = JudgeConfig()
    countdown: CountdownReward = CountdownReward()
    linear_algebra: LinearAlgebraReward = LinearAlgebraReward()
    overlong: OverlongReward = OverlongReward()
    perplexity: PerplexityReward = PerplexityReward()
    small_parts: SmallPartsReward = SmallPartsReward()
    thinking: ThinkingReward = ThinkingReward()

    @classmethod
    def hint(cls, key: str) -> str | None:
        from hone.rewards import REWARDS, registered  # not at the top: that module imports this one

        if ":" in key or key in REWARDS or key in registered():
            return f"rewards are entries of parts: write reward: {{parts: {{{key}: 1.0}}}}"
        return None

    def passes(self) -> list[str]:
        """Descriptions of the forward passes that the reward adds."""
        if "perplexity" not in self.parts:
            return []
        config, where = self.perplexity, "of a frozen model"
        if config.answerer == "policy":
            where = "of a frozen second copy of the model"
        where = "on a server" if config.is_server else where
        return [f"perplexity of the gold answers: one more forward pass, {where}"]

    @model_validator(mode="after")
    def _known(self) -> RewardConfig:
        from hone.rewards import REWARDS, registered  # not at the top: that module imports this one

        allowed = ", ".join(sorted(REWARDS))
        if not self.parts:
            raise ValueError(f"parts: give at least one of {allowed}")
        for name in self.parts:
            if name not in REWARDS and ":" not in name and name not in registered():
                more = ", ".join(sorted(registered()))
                raise ValueError(
                    f"parts: no reward {name!r}; there are {allowed}"
                    + (f"; of installed packages {more}" if more else "")
                    + f"; a function of yours is {_with_function(name)}"
                )
        if "judge" in self.parts and self.judge.url is None:
            raise ValueError("judge.url: missing; give the judge's endpoint, as in https://api.openai.com/v1")
        if "overlong" in self.parts:
            longest = self.overlong.max_tokens
            if longest is None or longest < self.overlong.buffer:
                raise ValueError(
                    f"overlong.max_tokens: {longest}: set it to the most completion tokens, "
                    f"at least overlong.buffer ({self.overlong.buffer})"
                )
        return self


def _with_function(name: str) -> str:
    """`reward.py:right` for `reward.py`, if that file has one function; else the form of such a name."""
    if not name.endswith(".py"):
        return "path/file.py:function"
    try:
        names = functions_in(places.locate(name).read_bytes())
    except (OSError, SyntaxError, ValueError):  # only an example is lost: the name is refused anyway
        names = []
    return " or ".join(f"{name}:{function}" for function in names[:3]) or f"{name}:FUNCTION"
