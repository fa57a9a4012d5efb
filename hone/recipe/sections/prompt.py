"""Settings of prompt rendering."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from hone.base.settings import Section

#: Arguments of `apply_chat_template` that are not variables of a template, or that hone sets.
TAKEN = frozenset(
    (
        *("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs", "strftime_now"),
    )
)


class PromptConfig(Section):
    """How messages become tokens. `auto`: the tokenizer's chat template if it has one, else `template`."""

    style: Literal["auto", "chat", "raw"] = "auto"
    system: str | None = None  # None: the task's own; "": none
    template: str = "{system}\n\nUser: {user}\nAssistant: "  # for raw prompts
    reply_template: str = "\n\nUser: {user}\nAssistant: "  # for raw prompts, after each turn of an environment
    open_think: bool = False  # put the opening <think> at the end of the prompt
    template_args: dict[str, Any] = {}  # for the chat template, as in {enable_thinking: false}

    def system_prompt(self, task: str) -> str:
        """The configured system prompt, or if there is none the task's own, `task`."""
        return task if self.system is None else self.system

    @model_validator(mode="after")
    def _arguments(self) -> PromptConfig:
        if taken := sorted(set(self.template_args) & TAKEN):
            raise ValueError(f"template_args: {', '.join(taken)} is set by hone itself; remove it")
        return self

    @model_validator(mode="after")
    def _fills(self) -> PromptConfig:
        for name, values in (("template", {"system": "", "user": "\0"}), ("reply_template", {"user": "\0"})):
            template, keys = getattr(self, name), " and ".join(f"{{{key}}}" for key in values)
            try:
                filled = template.format(**values)
            except (KeyError, IndexError, ValueError) as error:
                raise ValueError(
                    f"{name}: {template!r} cannot be filled in ({error}); it may contain {keys}, and literal braces "
                    "are doubled"
                ) from error
            if "\0" not in filled:
                lost = "every problem would have the same prompt" if name == "template" else "no reply would be shown"
                raise ValueError(f"{name}: {template!r} has no {{user}}: {lost}")
        return self
