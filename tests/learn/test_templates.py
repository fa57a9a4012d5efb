"""Chat templates: arguments, system prompts without a place, the date of the run, and markers that stay in the text."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from pydantic import ValidationError
from transformers import AddedToken, PreTrainedTokenizerFast

from hone.base.settings import UserError
from hone.model.tiny import train_tokenizer
from hone.preflight.check.template import _chat
from hone.recipe.sections.prompt import PromptConfig
from hone.rollout import dates
from hone.rollout.prompts import Renderer

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
GENERATE = "{% if add_generation_prompt %}<assistant>{% endif %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
DATED = "Today: {{ strftime_now('%d %b %Y') }}\n"
THINKING = "{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}"
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def tokenizer(template: str, *special: str) -> PreTrainedTokenizerFast:
    made = train_tokenizer(["2 + 2 is 4."], 300)
    made.add_tokens([AddedToken(text, special=True) for text in special], special_tokens=True)
    made.chat_template = template
    return made


def rendered(template: str, system: str = "", **config: object) -> str:
    renderer = Renderer(tokenizer(template), PromptConfig.model_validate(config), system)
    return renderer.messages_text(({"role": "user", "content": "hi"},))


@pytest.mark.parametrize("template", [NO_SYSTEM + TURNS, DROPS_SYSTEM])
def test_a_system_prompt_without_a_place_stands_before_the_first_question(template: str) -> None:
    assert rendered(template, "Be brief.") == "<user>Be brief.\n\nhi\n"
    assert rendered(template) == "<user>hi\n"


def test_a_template_with_a_system_role_gets_it() -> None:
    assert rendered(TURNS, "Be brief.") == "<system>Be brief.\n<user>hi\n"


def test_what_else_a_template_refuses_is_one_line() -> None:
    with pytest.raises(UserError, match="chat template refuses a conversation of user: no users"):
        rendered("{{ raise_exception('no users') }}")


def test_arguments_reach_the_template_and_unknown_ones_are_errors() -> None:
    assert rendered(TURNS + THINKING, template_args={"enable_thinking": False}) == "<user>hi\n<no>"
    assert rendered(TURNS + THINKING, template_args={"enable_thinking": True}) == "<user>hi\n"
    with pytest.raises(UserError, match="the tokenizer's chat template does not use enable_thinking"):
        rendered(TURNS, template_args={"enable_thinking": False})
    with pytest.raises(ValidationError, match="add_generation_prompt is set by hone itself"):
        PromptConfig(template_args={"add_generation_prompt": False})


def test_the_date_of_a_run_is_that_of_its_start_also_when_it_goes_on_later(tmp_path: Path) -> None:
    assert rendered(DATED + TURNS).startswith(f"Today: {datetime.date.today():%d %b %Y}\n")
    (tmp_path / dates.FILE).write_text("2026-03-05\n")
    dates.pin(tmp_path)  # a resumed run keeps its date
    with dates.prompt_date(dates.date_of(tmp_path / "stage")):
        assert rendered(DATED + TURNS).startswith("Today: 05 Mar 2026\n")
    dates.pin(tmp_path.parent)
    assert dates.date_of(tmp_path.parent) == datetime.date.today()


@pytest.mark.parametrize("damage", ["", "2026-", "2026-03-06\n", None])
def test_a_date_that_was_lost_or_changed_is_an_error_that_names_its_file(tmp_path: Path, damage: str | None) -> None:
    dates.pin(tmp_path)
    if damage is None:
        (tmp_path / dates.FILE).unlink()
    else:
        (tmp_path / dates.FILE).write_text(damage)
    for call in (dates.pin, dates.date_of):
        with pytest.raises(UserError, match=r"prompt_date\.txt is damaged"):
            call(tmp_path)
    (tmp_path / "seal.json").unlink()  # of an older version
    if damage in ("", "2026-"):
        with pytest.raises(UserError, match=r"prompt_date\.txt is damaged .* such as 2026-01-31"):
            dates.date_of(tmp_path)


def test_markers_that_divide_an_answer_stay_and_others_go() -> None:
    special = ("[THINK]", "[/THINK]", "<|channel|>", "<|start|>", "<|image_pad|>")
    made = tokenizer(TURNS, *special)
    renderer = Renderer(made, PromptConfig(), "")
    text = "[THINK]2 + 2[/THINK]<|channel|>final<|image_pad|> is 4.<|endoftext|>"
    ids = renderer.completion_ids(text.removesuffix("<|endoftext|>"))
    assert renderer.text(ids) == "[THINK]2 + 2[/THINK]<|channel|>final is 4."


def test_a_template_whose_user_turn_ends_with_a_mark_needs_no_generation_prompt() -> None:
    """Mistral's: check used to advise against the template."""
    findings = {f.name: f for f in _chat(Renderer(tokenizer(MISTRAL), PromptConfig(), ""))}
    assert findings["generation"].level == "pass"
    assert "' [/INST]' directly" in findings["generation"].message
    plain = {f.name: f for f in _chat(Renderer(tokenizer(TURNS), PromptConfig(), ""))}
    assert plain["generation"].level == "warn"
