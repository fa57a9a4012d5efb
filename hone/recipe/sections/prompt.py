"""Settings of prompt rendering."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from hone.base.settings import Section


class PromptConfig(Section):
    """How messages become tokens. `auto`: the tokenizer's chat template if it has one, else `template`."""

    style: Literal["auto", "chat", "raw"] = "auto"
    system: str | None = None  # None: the task's own; "": none
    template: str = "{system}\n\nUser: {user}\nAssistant: "  # for raw prompts
    open_think: bool = False  # put the opening <think> at the end of the prompt

    @model_validator(mode="after")
    def _fills(self) -> PromptConfig:
        try:
            filled = self.template.format(system="", user="\0")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"template: {self.template!r} cannot be filled in ({error}); it may hold {{system}} and {{user}}, "
                "and a brace that means itself is written twice"
            ) from error
        if "\0" not in filled:
            raise ValueError(f"template: {self.template!r} has no {{user}}: every problem would have the same prompt")
        return self
