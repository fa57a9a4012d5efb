"""The only place that applies templates: messages to token ids, token ids to text.

Training, validation, evaluation and serving all use it.
"""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from hone.base.settings import UserError
from hone.model import tiny
from hone.recipe.recipe import StageSettings
from hone.recipe.sections.prompt import PromptConfig
from hone.rollout import dates
from hone.rollout.text import Decode, decoder, special_tokens
from hone.tasks import make_task, once
from hone.tasks.base import TracedTask
from hone.types import IntArray, Messages, Problem, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

OPEN_THINK = "<think>"

#: A system prompt that no template contains, to test whether a template includes system prompts.
_PROBE = "system-prompt-0f8d"


@dataclass(frozen=True)
class Renderer:
    """Renders the messages of one task for one tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    config: PromptConfig
    system: str  # the task's system prompt, used unless the config has one
    date: datetime.date = field(default_factory=dates.now)  # today's date for templates

    @cached_property
    def prefix(self) -> str:
        """The beginning of the answer that every prompt already contains; graded text begins with it.

        It comes from `open_think` or from the chat template.
        """
        return OPEN_THINK if self._ends_open(self._templated(({"role": "user", "content": "?"},))) else ""

    def prompt_text(self, problem: Problem) -> str:
        """The prompt as a string.

        Raises UserError for style `chat` with a tokenizer that has no chat template.
        """
        return self.messages_text(problem.messages)

    def shown_prompt(self, problem: Problem, rollout: Rollout) -> str:
        """The prompt that a rollout began with, as text: of several turns, with the tools and the environment's opening
        messages."""
        if len(rollout.turns) == 1:
            return self.prompt_text(problem)
        return str(self.tokenizer.decode(rollout.turns[0].prompt_ids.tolist(), skip_special_tokens=False))

    def messages_text(self, messages: Messages) -> str:
        """As `prompt_text`, for any messages that end with a user's."""
        text = self._templated(messages)
        return text + OPEN_THINK if self.config.open_think and not text.rstrip().endswith(OPEN_THINK) else text

    def prompt_ids(self, problem: Problem) -> IntArray:
        """Token ids [Lp]. Special tokens written by a chat template are recognised, and none are added.

        A raw prompt begins with the beginning-of-text token if the tokenizer adds one to texts.
        """
        return self.messages_ids(problem.messages)

    def messages_ids(self, messages: Messages) -> IntArray:
        """As `prompt_ids`, for any messages that end with a user's."""
        text = self.messages_text(messages)
        return self.text_ids(text) if self.is_raw else self.encode(text)

    def conversation_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """A conversation of several turns as the chat template renders it; `tools` are JSON schemas."""
        whole = with_system(messages, self.config.system_prompt(self.system))
        text = self.apply_template(whole, add_generation_prompt, tools)
        ends = add_generation_prompt and self.config.open_think and not text.rstrip().endswith(OPEN_THINK)
        return text + OPEN_THINK if ends else text

    def reply_text(self, replies: Sequence[Mapping[str, Any]]) -> str:
        """What follows a turn of a raw conversation: `prompt.reply_template`."""
        text = self.config.reply_template.format(user="\n".join(str(reply["content"]) for reply in replies))
        return text + OPEN_THINK if self.config.open_think else text

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """Token id -> text, of all special tokens."""
        return special_tokens(self.tokenizer)

    def text_ids(self, text: str) -> IntArray:
        """Token ids [Lp] of a plain text, without a template."""
        return np.concatenate([np.asarray(self._begin, dtype=np.int64), self.encode(text)])

    def encode(self, text: str) -> IntArray:
        """Token ids of a text as it is."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)

    @property
    def begin_ids(self) -> list[int]:
        """The ids before the text of every prompt: the beginning-of-text token of raw prompts, if any."""
        return self._begin if self.is_raw else []

    @property
    def is_raw(self) -> bool:
        """Whether prompts are plain text with one user message each, not conversations."""
        return self.config.style == "raw" or not getattr(self.tokenizer, "chat_template", None)

    @cached_property
    def _begin(self) -> list[int]:
        begin = self.tokenizer.bos_token_id
        return [begin] if begin is not None and self.tokenizer.encode("?")[:1] == [begin] else []

    def completion_ids(self, text: str) -> IntArray:
        """Token ids [Lc] of an answer for supervised training, with the end-of-text token.

        Raises ValueError if the answer does not begin with `prefix`.
        """
        if not text.startswith(self.prefix):
            raise ValueError(f"the answer must begin with {self.prefix!r}, which the prompt holds; it is {text[:40]!r}")
        ids = self.tokenizer.encode(text[len(self.prefix) :], add_special_tokens=False)
        return np.asarray([*ids, self.tokenizer.eos_token_id], dtype=np.int64)

    def text(self, completion_ids: IntArray) -> str:
        """The model's answer: `prefix`, then the decoded completion."""
        return self.prefix + self._decode(completion_ids.tolist())

    @cached_property
    def _decode(self) -> Decode:
        return decoder(self.tokenizer)

    def piece(self, token_id: int) -> str:
        """One token as text."""
        return str(self.tokenizer.decode([token_id]))

    def _ends_open(self, text: str) -> bool:
        return self.config.open_think or text.rstrip().endswith(OPEN_THINK)

    def _templated(self, messages: Messages) -> str:
        messages = with_system(messages, self.config.system_prompt(self.system))
        if self.config.style == "chat" and self.is_raw:
            raise UserError("prompt.style is chat but the tokenizer has no chat template; use prompt.style: raw")
        if self.is_raw:
            self._check_raw()
            by_role = {m["role"]: m["content"] for m in messages}
            return self.config.template.format(system=by_role.get("system", ""), user=by_role["user"])
        return self.apply_template(messages)

    def apply_template(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The tokenizer's chat template, with `prompt.template_args`, the date of the run, and `tools` (JSON schemas).

        A system prompt is folded into the first user turn if the template does not support one. Raises UserError if
        the template refuses the conversation, or does not use one of the arguments.
        """
        folded = _fold_system(messages) if self._folds_system else messages
        return self._filled(folded, add_generation_prompt, tools)

    @cached_property
    def _folds_system(self) -> bool:
        """Whether the template refuses a system message (Gemma) or omits it."""
        try:
            return _PROBE not in self._filled(({"role": "system", "content": _PROBE}, {"role": "user", "content": "?"}))
        except UserError:
            return True

    def _filled(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        plain = [dict(m) for m in messages]
        schemas: list[Any] | None = [dict(tool) for tool in tools] or None
        try:
            dated = "strftime_now" in str(self.tokenizer.chat_template)
            with dates.templates_dated(self.date) if dated else nullcontext():
                text = self.tokenizer.apply_chat_template(
                    plain,
                    tools=schemas,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **self._template_args,
                )
        except TemplateError as error:
            if type(error) is TemplateError:  # raised by the template itself: it does not take such a conversation
                roles = ", ".join(m["role"] for m in messages)
                raise UserError(
                    f"the tokenizer's chat template refuses a conversation of {roles}: {error}; give prompt.style: "
                    "raw, or a tokenizer with another template"
                ) from error
            raise self._failed(error) from error
        except Exception as error:  # a template is a program by the model's author, which may raise anything
            raise self._failed(error) from error
        return str(text)

    @staticmethod
    def _failed(error: Exception) -> UserError:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return UserError(f"the model's chat template fails ({reason}); see prompt.style: raw")

    @cached_property
    def _template_args(self) -> dict[str, Any]:
        source = str(self.tokenizer.chat_template)
        if unknown := [name for name in self.config.template_args if name not in source]:
            raise UserError(
                f"prompt.template_args: the tokenizer's chat template does not use {', '.join(unknown)}; remove it"
            )
        return self.config.template_args

    def _check_raw(self) -> None:
        if self.config.template_args:
            raise UserError("prompt.template_args: the tokenizer has no chat template that could use them; remove them")


def with_system(messages: Sequence[Mapping[str, Any]], system: str) -> list[dict[str, Any]]:
    """Put the system prompt before the messages, unless it is empty or they have one."""
    copies = [dict(m) for m in messages]
    if not system or any(m["role"] == "system" for m in copies):
        return copies
    return [{"role": "system", "content": system}, *copies]


def _fold_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move the system message, if any, to the beginning of the first user message."""
    rest = [dict(m) for m in messages if m["role"] != "system"]
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    first = next((m for m in rest if m["role"] == "user"), None)
    if system and first is not None:
        first["content"] = f"{system}\n\n{first['content']}"
    return rest


# --- the tokenizer of a model from scratch ---------------------------------------------------

#: Most texts for training the tokenizer of `tiny`.
TOKENIZER_TEXTS = 4000


def made_tokenizer(recipe: StageSettings) -> PreTrainedTokenizerFast:
    """The tokenizer of a model initialised from scratch."""
    size = recipe.model.tiny

    def make() -> PreTrainedTokenizerFast:
        return tiny.train_tokenizer(tokenizer_texts(recipe), size.vocab_size, size.phrases)

    about = (recipe.task.model_dump_json(), recipe.seed, recipe.prompt.model_dump_json(), size.model_dump_json())
    return copy.deepcopy(once(("tokenizer", *about), make))


def tokenizer_texts(recipe: StageSettings) -> Iterator[str]:
    """Prompts and worked answers of the training problems, in every style."""
    task = make_task(recipe.task, recipe.seed)
    problems = task.problems("train")  # before asking for traces: rows may have none
    teacher = task if isinstance(task, TracedTask) else None
    styles = teacher.trace_styles if teacher else ()
    template = recipe.prompt.template
    system = recipe.prompt.system_prompt(task.system)
    for i, problem in enumerate(islice(problems, TOKENIZER_TEXTS // (1 + len(styles)))):
        yield template.format(system=system, user=problem.messages[-1]["content"])
        for style in styles:
            assert teacher is not None
            example = teacher.trace(problem, style, seed=i)
            yield from (*example.turns, example.text)
