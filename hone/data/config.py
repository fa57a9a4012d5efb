"""Settings of prompt rendering."""

from __future__ import annotations

from typing import Literal

from hone.config import Section


class PromptConfig(Section):
    """How messages become tokens. `auto`: the tokenizer's chat template if it has one, else `template`."""

    style: Literal["auto", "chat", "raw"] = "auto"
    system: str | None = None  # None: the task's own; "": none
    template: str = "{system}\n\nUser: {user}\nAssistant: "  # for raw prompts
    open_think: bool = False  # put the opening <think> at the end of the prompt
