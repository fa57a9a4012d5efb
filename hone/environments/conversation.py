"""The exact tokens of a conversation: sampled tokens stay as they are, and only the text after them is tokenised.

    conversation = Conversation(renderer, problem.messages, tools)
    turn = ...                                        # sampled from conversation.ids
    conversation.append(turn, message, replies)       # conversation.ids is the next prompt

The *bridge* is the text that the chat template puts after a turn: the end of the turn, the replies, the next generation
prompt. Its tokens follow the sampled ones. A template that rewrites earlier messages (Qwen3 removes earlier thinking)
cannot be continued: the conversation *branches*, and the next prompt is the template's own rendering.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np

from hone.rollout.prompts import Renderer
from hone.types import IntArray, Turn

Message = Mapping[str, Any]

_THINK_TAGS = re.compile(r"</?think>")


class Conversation:
    """One episode's messages, and the token ids of its next prompt."""

    def __init__(
        self, renderer: Renderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.renderer, self.tools = renderer, list(tools)
        self.messages: list[Message] = [dict(message) for message in messages]
        self.branches = 0
        self._prompt = "" if renderer.is_raw else self._text(self.messages, add_generation_prompt=True)
        #: Token ids [Lp] of the next prompt.
        self.ids: IntArray = renderer.messages_ids(self.messages) if renderer.is_raw else renderer.encode(self._prompt)

    def append(self, turn: Turn, message: Message, replies: Sequence[Message]) -> None:
        """Add a sampled turn, its parsed message, and the replies to it."""
        history = [*self.messages, dict(message)]
        self.messages = [*history, *map(dict, replies)]
        tokens = np.concatenate([turn.prompt_ids, turn.completion_ids])
        if self.renderer.is_raw:
            self.ids = np.concatenate([tokens, self.renderer.encode(self.renderer.reply_text(replies))])
            return
        before, self._prompt = self._prompt, self._text(self.messages, add_generation_prompt=True)
        bridge = self._bridge(turn, message, before, self._text(history))
        if bridge is not None:
            self.ids = np.concatenate([tokens, bridge])
            return
        self.ids = self.renderer.encode(self._prompt)
        self.branches += not np.array_equal(self.ids[: len(tokens)], tokens)

    def _bridge(self, turn: Turn, message: Message, before: str, after: str) -> IntArray | None:
        """Token ids of the bridge; None if the template rewrites earlier messages.

        The template's renderings: `before` of the prompt of the turn, `after` of all messages up to this one, and
        `self._prompt` with the replies to it.
        """
        end, start = len(self._body(after)), len(before.rstrip())
        if not (self._prompt.startswith(after[:end]) and self._prompt.startswith(before[:start])):
            return None
        if any(part not in self._prompt[start:] for part in _parts(message)):
            return None
        return self._after_stop(turn, self._prompt[end:])

    def _after_stop(self, turn: Turn, tail: str) -> IntArray | None:
        """The ids of `tail`, which begins with the template's end of the turn, without the token that ended the turn.

        None if the turn was ended by another special token than the template's.
        """
        last = int(turn.completion_ids[-1])
        if last not in self._special:  # ended by a stop string: the template's end is still missing
            return self.renderer.encode(tail)
        stop = self._special[last]
        if not tail.lstrip().startswith(stop):
            return None
        ids = self.renderer.encode(tail.lstrip())  # with the token: some take the blanks that follow them
        return ids[1:] if ids[0] == last else None

    def _text(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        return self.renderer.conversation_text(messages, self.tools, add_generation_prompt=add_generation_prompt)

    @cached_property
    def _special(self) -> dict[int, str]:
        return self.renderer.special_tokens

    def _body(self, text: str) -> str:
        """The text without the special tokens and blanks at its end, which depend on what follows."""
        ends = tuple(self._special.values())
        while (shorter := text.rstrip()) and shorter.endswith(ends):
            text = shorter.removesuffix(next(end for end in ends if shorter.endswith(end)))
        return text.rstrip()


class Histories:
    """The conversations of a program, which sends every prompt as a whole: which one continues which."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._answered: list[tuple[Conversation, Turn, Message]] = []

    def answered(self, conversation: Conversation, turn: Turn, message: Message) -> None:
        """Remember a turn, and the message as which the program was given it."""
        self._answered.append((conversation, turn, message))

    def next(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Conversation:
        """The conversation with these messages: the longest earlier one that they extend, or a new one.

        Raises UserError where the chat template refuses the messages.
        """
        longest: tuple[Conversation, Turn, Message] | None = None
        for conversation, turn, message in self._answered:
            known = [*conversation.messages, message]
            is_longer = longest is None or len(known) > len(longest[0].messages)
            if is_longer and conversation.tools == list(tools) and extends(messages, known):
                longest = conversation, turn, message
        if longest is None:
            return Conversation(self._renderer, messages, tools)
        conversation, turn, message = longest
        result = copy(conversation)
        result.append(turn, message, messages[len(conversation.messages) + 1 :])
        return result


def extends(messages: Sequence[Message], known: Sequence[Message]) -> bool:
    """Whether the messages begin with the known ones, and go on. Blanks around texts do not count."""
    return len(messages) > len(known) and all(_same(a, b) for a, b in zip(messages, known))


def _same(a: Message, b: Message) -> bool:
    calls = [[call.get("function") for call in message.get("tool_calls") or ()] for message in (a, b)]
    texts = [str(message.get("content") or "").strip() for message in (a, b)]
    return a["role"] == b["role"] and texts[0] == texts[1] and calls[0] == calls[1]


def _parts(message: Message) -> list[str]:
    """The texts that a rendering of the message must contain: thinking and answer."""
    texts = [message.get(key) for key in ("content", "reasoning_content", "reasoning", "thinking")]
    return [part.strip() for text in texts if isinstance(text, str) for part in _THINK_TAGS.split(text) if part.strip()]
