"""The one place that knows templates."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError
from tokenizers.processors import TemplateProcessing

from hone.base.settings import UserError
from hone.model.tiny import train_tokenizer
from hone.recipe.sections.prompt import PromptConfig
from hone.rollout.prompts import Renderer
from hone.types import Problem

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROBLEM = Problem("p", "t", ({"role": "user", "content": "2 + 2?"},), 4)


def renderer(config: PromptConfig | None = None, template: str | None = None, system: str = "Think.") -> Renderer:
    tokenizer = train_tokenizer(["<think>2 + 2</think><answer>4</answer>"], 300)
    tokenizer.chat_template = template
    return Renderer(tokenizer, config or PromptConfig(), system)


def test_raw_prompt_word_for_word() -> None:
    r = renderer(PromptConfig(template="{system}|{user}>"))
    assert r.prompt_text(PROBLEM) == "Think.|2 + 2?>"
    assert r.prefix == ""


def test_chat_template_is_used_when_there_is_one() -> None:
    assert renderer(template=CHAT).prompt_text(PROBLEM) == "<|system|>Think.\n<|user|>2 + 2?\n<|assistant|>"


def test_raw_can_be_asked_of_a_chat_tokenizer_and_chat_of_none_is_an_error() -> None:
    raw = renderer(PromptConfig(style="raw", template="{user}"), template=CHAT)
    assert raw.prompt_text(PROBLEM) == "2 + 2?"
    with pytest.raises(UserError, match="no chat template"):
        renderer(PromptConfig(style="chat")).prompt_text(PROBLEM)


def test_system_prompt_own_other_none_and_the_problems() -> None:
    assert "Think." in renderer().prompt_text(PROBLEM)
    assert "Be brief." in renderer(PromptConfig(system="Be brief.")).prompt_text(PROBLEM)
    assert "system" not in renderer(PromptConfig(system=""), template=CHAT).prompt_text(PROBLEM)
    own = Problem("p", "t", ({"role": "system", "content": "Mine."}, *PROBLEM.messages), 4)
    assert renderer(template=CHAT).prompt_text(own) == "<|system|>Mine.\n<|user|>2 + 2?\n<|assistant|>"


@pytest.mark.parametrize("opened_by", ["config", "template"])
def test_a_prompt_that_opens_the_thinking(opened_by: str) -> None:
    """The opening tag is in the prompt once, and graded text begins with it, whoever put it there."""
    if opened_by == "config":
        r = renderer(PromptConfig(open_think=True, template="{user}"))
    else:
        r = renderer(template=CHAT.replace("<|assistant|>", "<|assistant|><think>\n"))
    assert r.prompt_text(PROBLEM).count("<think>") == 1
    answer = "<think>easy</think><answer>4</answer>"
    ids = r.completion_ids(answer)
    assert ids[-1] == r.tokenizer.eos_token_id
    assert r.text(ids) == answer
    assert not r.tokenizer.decode(ids).startswith("<think>")
    with pytest.raises(ValueError, match="must begin with '<think>'"):
        r.completion_ids("easy</think>")


def test_both_opening_is_still_one_tag() -> None:
    r = renderer(PromptConfig(open_think=True), template=CHAT.replace("<|assistant|>", "<|assistant|><think>\n"))
    assert r.prompt_text(PROBLEM).count("<think>") == 1


def test_completion_ids_decode_to_the_text_and_stop() -> None:
    r = renderer(PromptConfig(template="{user}"))
    ids = r.completion_ids("<answer>4</answer>")
    assert r.text(ids) == "<answer>4</answer>"
    assert r.prompt_ids(PROBLEM).dtype == np.int64
    assert (r.prompt_ids(PROBLEM) != r.tokenizer.eos_token_id).all()


def test_a_raw_prompt_begins_as_the_tokenizer_begins_every_text() -> None:
    r = renderer(PromptConfig(template="{user}"))
    plain = r.prompt_ids(PROBLEM).tolist()
    tokenizer = train_tokenizer(["<think>2 + 2</think><answer>4</answer>"], 300)
    tokenizer.bos_token = "<|endoftext|>"
    begin = tokenizer.bos_token_id
    silent = Renderer(tokenizer, PromptConfig(template="{user}"), "Think.")
    assert silent.prompt_ids(PROBLEM)[0] != begin  # it has such a token and does not use it
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", begin)]
    )
    begun = Renderer(tokenizer, PromptConfig(template="{user}"), "Think.")
    assert begun.prompt_ids(PROBLEM).tolist() == [begin, *plain]
    assert begin not in begun.completion_ids("4")[:-1]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{question}", "cannot be filled in"),
        ("{user", "cannot be filled in"),
        ("{}{user}", "cannot be filled in"),
        ("{system}", "every problem would have the same prompt"),
        ("{{user}}", "every problem would have the same prompt"),
    ],
)
def test_a_template_that_loses_the_problem_is_refused(template: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PromptConfig(template=template)
