"""Checks that text survives the tokenizer and its chat template: a loss there would be silent in training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from hone.grade.parse import TAGS, completion
from hone.preflight.check.findings import Finding
from hone.rollout.prompts import OPEN_THINK, Renderer
from hone.rollout.text import decoder
from hone.types import Problem

THOUGHT, ANSWER = "I add 2 and 2.", "4"


def check_template(
    renderer: Renderer, problems: Sequence[Problem], max_tokens: int, solutions: Sequence[str], longest: int | None
) -> Iterator[Finding]:
    """Run the checks. `solutions`: completions that a model should be able to produce; `longest`: the model's
    positions, if known."""
    yield from _prompts(renderer, problems, max_tokens, longest)
    yield from _completions(renderer, solutions, max_tokens)
    yield _opening(renderer)
    if renderer.begin_ids == [] and getattr(renderer.tokenizer, "chat_template", None):
        yield from _chat(renderer)
    yield _stop(renderer)


def check_absence(model: str, has_messages: bool) -> Iterator[Finding]:
    """Warns of a tokenizer without a chat template where one is to be expected."""
    tuned = re.search(r"[-_](instruct|chat|it)\b", model.rstrip("/").rpartition("/")[2], re.IGNORECASE)
    if not (tuned or has_messages):
        return
    why = f"the model's name says {tuned[1]}" if tuned else "the rows hold messages"
    yield Finding(
        "warn",
        "template",
        f"{why}, and its tokenizer has no chat template: prompts are written with prompt.template. Put the "
        "chat_template.jinja of the model that it was trained from into its folder, or set prompt.style: raw if this "
        "is wanted",
    )


def _prompts(
    renderer: Renderer, problems: Sequence[Problem], max_tokens: int, longest: int | None
) -> Iterator[Finding]:
    ids = [renderer.prompt_ids(p) for p in problems]
    for problem, tokens in zip(problems, ids, strict=True):
        text = renderer.prompt_text(problem)
        back = str(renderer.tokenizer.decode(tokens[len(renderer.begin_ids) :], clean_up_tokenization_spaces=False))
        if back != text:
            at = next((i for i, (a, b) in enumerate(zip(text, back)) if a != b), min(len(text), len(back)))
            yield Finding(
                "fail",
                "prompt",
                f"{problem.id}: the prompt does not survive the tokenizer: {text[at : at + 30]!r} became "
                f"{back[at : at + 30]!r}; the model would read another question. Choose a tokenizer that can write it",
            )
            break
    else:
        yield Finding("pass", "prompt", f"{len(problems)} prompts survive tokenizing and decoding unchanged")
    most = max(len(tokens) for tokens in ids)
    if longest is not None and most + max_tokens > longest:
        yield Finding(
            "fail",
            "length",
            f"prompts of up to {most} tokens and answers of {max_tokens} (sampling.max_tokens) are more than the "
            f"{longest} positions of the model; lower sampling.max_tokens to {max(1, longest - most)}",
        )
    else:
        room = "" if longest is None else f" of {longest} positions"
        yield Finding("pass", "length", f"prompts of up to {most} tokens, answers of up to {max_tokens}{room}")


def _completions(renderer: Renderer, solutions: Sequence[str], max_tokens: int) -> Iterator[Finding]:
    """Decoding drops special tokens: a tag that is a special token would vanish before grading."""
    encode = renderer.tokenizer.encode
    lost = [tag for tag in TAGS if tag not in _decoded(renderer, encode(tag, add_special_tokens=False))]
    if lost:
        yield Finding(
            "fail",
            "tags",
            f"{', '.join(lost)} vanish when an answer is decoded, since they are special tokens: no answer would be "
            "well-formed. Register them as ordinary added tokens",
        )
    changed = [s for s in solutions if _decoded(renderer, encode(s, add_special_tokens=False)) != s]
    if changed and not lost:
        yield Finding(
            "warn", "tags", f"a worked answer changes when it is tokenized and decoded: {changed[0][:60]!r}..."
        )
    if not changed and not lost:
        yield Finding("pass", "tags", "tags and worked answers survive the tokenizer unchanged")
    lengths = sorted(len(encode(s, add_special_tokens=False)) + 1 for s in solutions)
    over = sum(n > max_tokens for n in lengths)
    if over:
        yield Finding(
            "warn",
            "room",
            f"{over} of {len(lengths)} worked answers are longer than sampling.max_tokens {max_tokens} (up to "
            f"{lengths[-1]} tokens): such answers would be cut off; raise it",
        )


def _decoded(renderer: Renderer, ids: Any) -> str:
    return decoder(renderer.tokenizer)(ids)


def _opening(renderer: Renderer) -> Finding:
    if renderer.prefix:
        return Finding("pass", "opening", f"every prompt ends in {OPEN_THINK}, and graded text begins with it")
    return Finding("pass", "opening", f"prompts do not open {OPEN_THINK}: the model has to write it")


def _chat(renderer: Renderer) -> Iterator[Finding]:
    """Checks the template's generation prompt, and that it keeps the thinking of an assistant's turn."""
    question = [{"role": "user", "content": "What is 2 + 2?"}]
    bare, open_ = (renderer.apply_template(question, add_generation_prompt=flag) for flag in (False, True))
    answer = completion(THOUGHT, ANSWER)
    whole = renderer.apply_template([*question, {"role": "assistant", "content": answer}], add_generation_prompt=False)
    if open_ == bare and whole.startswith(bare) and whole[len(bare) :].lstrip().startswith(answer):
        last = bare[bare.rindex(question[0]["content"]) + len(question[0]["content"]) :]
        yield Finding("pass", "generation", f"no generation prompt is needed: an answer follows {last!r} directly")
    elif open_ == bare or not open_.startswith(bare):
        yield Finding(
            "warn",
            "generation",
            "the chat template adds no generation prompt: the model would have to write the header of its turn itself. "
            "Set prompt.style: raw, or a tokenizer with another template",
        )
    else:
        yield Finding("pass", "generation", f"the generation prompt is {open_[len(bare) :]!r}")
    if THOUGHT not in whole:
        yield Finding(
            "warn",
            "thinking",
            "the chat template drops the thinking of an assistant's turn. hone writes answers itself and keeps it, but "
            "another program that trains on these messages would not",
        )
    else:
        yield Finding("pass", "thinking", "the chat template keeps the thinking of an assistant's turn")
    if ANSWER in whole:
        end = whole[whole.rindex("</answer>") + len("</answer>") :] if "</answer>" in whole else ""
        ids = renderer.tokenizer.encode(end.strip(), add_special_tokens=False)[:1] if end.strip() else []
        if ids and ids[0] != renderer.tokenizer.eos_token_id:
            yield Finding(
                "warn",
                "turn",
                f"the chat template ends a turn with {renderer.piece(ids[0])!r}, the tokenizer with "
                f"{renderer.tokenizer.eos_token!r}: supervised training teaches the second, and an answer that ends "
                "in neither is cut off. Set eos_token to the first, unless generation_config lists both",
            )


def _stop(renderer: Renderer) -> Finding:
    """Checks that a supervised answer ends in the token that stops the sampler."""
    ids = renderer.completion_ids(renderer.prefix + THOUGHT)
    token = renderer.tokenizer.eos_token
    if ids[-1] != renderer.tokenizer.eos_token_id:
        return Finding("fail", "stop", f"a supervised answer does not end in {token!r}: stopping would not be learned")
    return Finding("pass", "stop", f"answers end in {token!r}, which is trained and stops generation")
