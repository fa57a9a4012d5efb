"""What is trained is what was sampled, in every chat template: random conversations against the template's own text."""

import random

import numpy as np
import pytest

from hone.environments.conversation import Conversation
from hone.learn.samples import by_rollout, by_sample, chains, to_samples, with_advantages
from hone.recipe.sections.prompt import PromptConfig
from hone.rollout.prompts import Renderer
from hone.types import Group, Problem, Reward, Rollout, Turn
from tests.environments.templates import FAMILIES, Family, tokenizer_of

pytest.importorskip("trl", reason="ships most of the templates")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "description": "A number."}},
                "required": ["a"],
            },
        },
    }
]
WORDS = ("yes", "no,", "Zoey", "é", "3 + 4", "\n", "{}", "ß?", " ")


def renderer_of(family: Family) -> Renderer:
    return Renderer(tokenizer_of(family.name), PromptConfig(template_args=family.arguments), "")


def words(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 6))) + "."


def turn_of(prompt: np.ndarray, text: str, stop: str, tokenizer, number: int) -> Turn:
    ids = np.asarray(tokenizer.encode(text + stop, add_special_tokens=False), np.int64)
    return Turn(prompt, ids, np.arange(len(ids), dtype=np.float32) - 100 * number, "stop", number)


def talk(family: Family, seed: int) -> tuple[Conversation, list[Turn], list[str]]:
    """A random conversation: its turns, and the replies to each but the last."""
    rng, tokenizer = random.Random(f"{family.name}/{seed}"), tokenizer_of(family.name)
    tools = TOOLS if family.call and rng.random() < 0.5 else []
    conversation = Conversation(renderer_of(family), [{"role": "user", "content": words(rng)}], tools)
    turns, replies = [], []
    for number in range(rng.randint(2, 5)):
        thought = f"<think>\n{words(rng)}\n</think>\n\n" if rng.random() < 0.5 else ""
        said, opened = thought + words(rng), conversation.renderer.prefix
        message = {"role": "assistant", "content": opened + said}
        text, stop = said, family.stop
        reply = {"role": "user", "content": f"reply {number}: {words(rng)}"}
        if tools and rng.random() < 0.6:
            arguments = {"a": rng.randint(0, 99)}
            identity = f"call{number:05d}"
            whole = str(arguments) if family.call == "deepseek" else arguments
            call = {"type": "function", "id": identity, "function": {"name": "add", "arguments": whole}}
            message["tool_calls"] = [call]
            text, stop = text + f"<call>add({arguments['a']})</call>", family.calls_stop or stop
            reply = {"role": "tool", "name": "add", "tool_call_id": identity, "content": f"reply {number}: 12"}
        turns.append(turn_of(conversation.ids, text, stop, tokenizer, number))
        conversation.append(turns[-1], message, [reply])
        replies.append(reply["content"])
    return conversation, turns, replies


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_trained_is_what_was_sampled(family, seed):
    conversation, turns, replies = talk(family, seed)
    tokenizer = tokenizer_of(family.name)
    rollout = Rollout("p", 0, tuple(turns), "")
    samples = to_samples(Group(Problem("p", "t", (), None), (rollout,), (Reward(0.0, {}, "wrong"),)))
    sampled = np.concatenate([turn.completion_ids for turn in turns])
    assert np.concatenate([s.token_ids[s.trained] for s in samples]).tolist() == sampled.tolist()
    logprobs = np.concatenate([turn.logprobs for turn in turns])
    assert np.concatenate([s.logprobs[s.trained] for s in samples]).tolist() == logprobs.tolist()
    end = len(turns[-1].prompt_ids) + len(turns[-1].completion_ids)
    goes_on = conversation.ids[:end].tolist() == [*turns[-1].prompt_ids.tolist(), *turns[-1].completion_ids.tolist()]
    assert conversation.branches == len(samples) - 1 + (not goes_on)  # no turn follows the last reply
    prompts = [*(turn.prompt_ids for turn in turns[1:]), conversation.ids]
    for prompt, reply in zip(prompts, replies, strict=True):  # the model has read every reply
        assert reply.strip() in tokenizer.decode(prompt.tolist())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_bridge_is_what_the_template_writes(family):
    """A conversation in the template's own form: the ids are those of the template's rendering of the whole."""
    renderer, tokenizer = renderer_of(family), tokenizer_of(family.name)
    conversation = Conversation(renderer, [{"role": "user", "content": "Who lies?"}])
    said = "</think>Zoey does." if renderer.prefix else "Zoey does."
    turn = turn_of(conversation.ids, said, family.stop, tokenizer, 0)
    message = {"role": "assistant", "content": renderer.prefix + said}
    conversation.append(turn, message, [{"role": "user", "content": "Why?"}])
    whole = renderer.encode(renderer.conversation_text(conversation.messages)).tolist()
    if conversation.branches:
        assert conversation.ids.tolist() == whole
    else:
        squeezed = ["".join(tokenizer.decode(ids).split()) for ids in (conversation.ids.tolist(), whole)]
        assert squeezed[0] == squeezed[1].replace("<|assistant|><think></think>Zoey", "<|assistant|>Zoey")  # GLM


@pytest.mark.parametrize(
    "name, thought, branches",
    [
        ("Qwen2.5", "", 0),
        ("Qwen3", "<think>\nhmm\n</think>\n\n", 1),  # drops earlier thinking
        ("DeepSeek-R1 distill", "<think>\nhmm\n</think>\n\n", 1),
        ("SmolLM3", "<think>\nhmm\n</think>\n", 0),
        ("Mistral", "", 0),
    ],
)
def test_a_template_that_rewrites_what_was_said_branches(name, thought, branches):
    family = next(one for one in FAMILIES if one.name == name)
    conversation = Conversation(renderer_of(family), [{"role": "user", "content": "Who lies?"}])
    turn = turn_of(conversation.ids, f"{thought}Zoey.", family.stop, tokenizer_of(name), 0)
    conversation.append(turn, {"role": "assistant", "content": f"{thought}Zoey."}, [{"role": "user", "content": "?"}])
    assert conversation.branches == branches


def test_a_turn_that_a_stop_string_ended_gets_the_template_s_end():
    family = next(one for one in FAMILIES if one.name == "Qwen2.5")
    conversation = Conversation(renderer_of(family), [{"role": "user", "content": "Who lies?"}])
    turn = turn_of(conversation.ids, "Zoey.", "", tokenizer_of("Qwen2.5"), 0)
    conversation.append(turn, {"role": "assistant", "content": "Zoey."}, [{"role": "user", "content": "Why?"}])
    assert "Zoey.<|im_end|>\n<|im_start|>user\nWhy?" in tokenizer_of("Qwen2.5").decode(conversation.ids.tolist())


def rollout_of(*turns: tuple[list[int], list[int]]) -> Rollout:
    return Rollout(
        "p",
        0,
        tuple(
            Turn(np.asarray(prompt), np.asarray(said), np.full(len(said), -0.5, np.float32), "stop", 3 - k)
            for k, (prompt, said) in enumerate(turns)
        ),
        "",
    )


def test_chains_by_hand():
    one = rollout_of(([5, 6], [7, 2]), ([5, 6, 7, 2, 9, 6], [8, 2]))
    branched = rollout_of(([5, 6], [7, 2]), ([5, 6, 7, 9, 6], [8, 2]), ([5, 6, 7, 9, 6, 8, 2, 4], [3]))
    assert [len(chain) for chain in chains(one)] == [2]
    assert [len(chain) for chain in chains(branched)] == [1, 2]
    group = Group(Problem("p", "t", (), None), (one, branched), (Reward(1.0, {}, "correct"), Reward(0.0, {}, "wrong")))
    first, second, third = to_samples(group)
    assert first.token_ids.tolist() == [5, 6, 7, 2, 9, 6, 8, 2]
    assert first.trained.tolist() == [False, False, True, True, False, False, True, True]
    assert (first.prompt_len, first.policy_version) == (2, 2)
    assert third.trained.tolist() == [False] * 5 + [True, True, False, True]
    advantages = by_sample([group], [[np.array([1, 2, 3, 4]), np.array([5, 6, 7, 8, 9])]])
    assert [a.tolist() for a in advantages] == [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    placed = with_advantages([first, second, third], advantages)
    assert placed[0].advantages.tolist() == [0, 0, 1, 2, 0, 0, 3, 4]
    assert placed[2].advantages.tolist() == [0, 0, 0, 0, 0, 7, 8, 0, 9]
    assert [[a.tolist() for a in g] for g in by_rollout([group], advantages)] == [[[1, 2, 3, 4], [5, 6, 7, 8, 9]]]
