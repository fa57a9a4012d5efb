"""The perplexity reward: formulas by hand, the answerer against a plain forward pass, leaks, failures."""

import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from hone.base.settings import UserError
from hone.model.load import load_model, load_tokenizer
from hone.model.tiny import create
from hone.recipe.sections.model import ModelConfig, TinyConfig
from hone.recipe.sections.prompt import PromptConfig
from hone.rewards import make_reward
from hone.rewards.config import PerplexityReward, RewardConfig
from hone.rewards.gold import gold_text, number, written_numbers
from hone.rewards.perplexity import (
    AnswererError,
    AnswerRequest,
    _visible,
    leaks,
    perplexity,
    relative_improvement,
    score,
    vr_cli,
)
from hone.rollout.answer_server import AnswerServer, tail
from hone.rollout.answerer import LocalAnswerer, load_answerer
from hone.rollout.prompts import Renderer
from hone.tasks.countdown.task import CountdownConfig, CountdownTask
from hone.tasks.knights.task import KnightsConfig, KnightsTask
from hone.types import Problem, Rollout, Turn

CUE = "The final answer is: "
KNIGHTS = KnightsTask(KnightsConfig(people=(2,), train=4, validation=0, test=0))
PROMPT = PromptConfig(style="raw", template="Puzzle: {user}\n")


def rollout(text, finish="stop"):
    ids = np.zeros(3, dtype=np.int64)
    return Rollout("p", 0, (Turn(ids, ids, np.zeros(3, dtype=np.float32), finish, 0),), text)


def question(answer="42", text="What is 6 * 7?"):
    return Problem("p", "sums", ({"role": "user", "content": text},), answer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("answerer")
    texts = [p.messages[-1]["content"] + str(p.reference) for p in KNIGHTS.problems("train")]
    create(path, TinyConfig(hidden_size=32, layers=2, heads=2, kv_heads=1, mlp_size=48, max_positions=512), texts, 0)
    return path


@pytest.fixture(scope="module")
def answerer(folder):
    made = load_answerer(
        RewardConfig(parts={"perplexity": 1.0}), ModelConfig(path=str(folder)), PROMPT, system=KNIGHTS.system
    )
    assert isinstance(made, LocalAnswerer)
    return made


# --- formulas --------------------------------------------------------------------------------


def test_perplexity_is_exp_of_the_mean_surprise():
    assert perplexity(np.log([0.5, 0.125]).astype(np.float32)) == pytest.approx(4.0)  # exp((ln 2 + ln 8) / 2)
    assert perplexity(np.zeros(3, np.float32)) == 1.0
    assert perplexity(np.array([-np.inf, -1], np.float32)) == math.exp(700)
    with pytest.raises(AnswererError, match="not all of them numbers"):
        perplexity(np.array([np.nan, -1], np.float32))


@pytest.mark.parametrize(
    "kind, value",
    [
        ("absolute", 0.4),  # 1 / 2.5
        ("relative", 0.375),  # 1 - 2.5 / 4
        ("hybrid", 0.3875),  # half of each
        ("vr_cli", 1.0),
    ],
)
def test_each_kind_by_hand(kind, value):
    result = score(2.5, 4.0, False, PerplexityReward(kind=kind))
    assert result.value == pytest.approx(value)
    assert result.details == pytest.approx(
        {"gold_ppl": 2.5, "gold_ppl_without": 4.0, "absolute": 0.4, "relative": 0.375, "leak": 0.0}
    )


def test_alpha_is_the_share_of_relative():
    assert score(2.5, 4.0, False, PerplexityReward(alpha=0.25)).value == pytest.approx(0.25 * 0.375 + 0.75 * 0.4)


def test_a_context_that_hurts_is_not_punished_by_the_relative_part():
    assert relative_improvement(5.0, 4.0) == 0.0
    assert relative_improvement(4.0, 4.0) == 0.0


@pytest.mark.parametrize(
    "percent, reward",
    [(-3, 0.0), (0.0, 0.0), (0.049, 0.0), (0.051, 0.5), (0.99, 0.5), (1.01, 0.9), (1.99, 0.9), (2.01, 1.0), (80, 1.0)],
)
def test_thresholds_of_vr_cli(percent, reward):
    assert vr_cli(3.0 * (1 - percent / 100), 3.0) == reward


def test_a_leak_scores_zero_only_if_asked():
    assert score(2.0, 4.0, True, PerplexityReward()).value == 0.5
    assert score(2.0, 4.0, True, PerplexityReward(leak="zero")).value == 0.0
    assert score(2.0, 4.0, True, PerplexityReward(leak="zero")).details["leak"] == 1.0


# --- the answerer ----------------------------------------------------------------------------


def plain_logprobs(folder, text, answer):
    """One sequence, an ordinary forward pass with transformers' own attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    out = tokenizer(text + answer, return_offsets_mapping=True, add_special_tokens=False)
    ids = torch.tensor([out["input_ids"]])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()
    first = next(i for i, (_, end) in enumerate(out["offset_mapping"]) if end > len(text))
    return chosen[first - 1 :]


CONTEXTS = ["", "Suppose Zoey knight.", "Suppose Zoey knave. Wait, go back. " * 4, "Everything fits.", "é ✓ 中文"]


@pytest.mark.parametrize("cue", [CUE, "<answer>", "A:\n"])
def test_one_pass_for_a_group_equals_one_pass_for_each(folder, answerer, cue):
    problem = KNIGHTS.problems("train")[0]
    gold = gold_text(problem)
    start = f"Puzzle: {problem.messages[-1]['content']}\n"
    logprobs = answerer.logprobs(problem, CONTEXTS, cue, gold)
    for context, ours in zip(CONTEXTS, logprobs, strict=True):
        text = f"{start}{context}\n{cue}" if context else f"{start}{cue}"
        theirs = plain_logprobs(folder, text, gold)
        assert len(ours) == len(theirs) > 5
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert perplexity(ours) == pytest.approx(perplexity(theirs), rel=1e-5)


def test_the_group_is_one_forward_pass(answerer, monkeypatch):
    calls = []
    inner = answerer.model.base_model.forward
    monkeypatch.setattr(
        answerer.model.base_model, "forward", lambda *a, **k: calls.append(k["input_ids"].shape[1]) or inner(*a, **k)
    )
    problem = KNIGHTS.problems("train")[0]
    answerer.logprobs(problem, CONTEXTS + CONTEXTS, CUE, gold_text(problem))
    assert len(calls) == 1
    separately = sum(
        len(answerer._encode(answerer._question(problem), c, CUE, gold_text(problem))[0]) for c in CONTEXTS
    )
    assert calls[0] < separately  # the question once, and equal contexts once; padded to a multiple of 128


def test_the_groups_of_a_step_are_one_forward_pass_and_equal_one_group_at_a_time(answerer, monkeypatch):
    """Packed together they are the same to 1e-5: no group sees another, not even one of the same problem."""
    problems = [*KNIGHTS.problems("train")[:3], KNIGHTS.problems("train")[0]]
    requests = [AnswerRequest(p, CONTEXTS[n : n + 3], gold_text(p)) for n, p in enumerate(problems)]
    alone = [answerer.logprobs(*one[:2], CUE, one.answer) for one in requests]
    calls = []
    inner = answerer.model.base_model.forward
    monkeypatch.setattr(answerer.model.base_model, "forward", lambda *a, **k: calls.append(1) or inner(*a, **k))
    together = answerer.logprobs_all(requests, CUE)
    assert len(calls) == 1
    for ours, theirs in zip(together, alone, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    assert answerer.logprobs_all([], CUE) == []


def test_the_boundary_is_that_of_the_whole_text(answerer):
    """A blank that ends the cue belongs to the token of the answer's first word."""
    answerer_ids, first = answerer._encode("Puzzle: x\n", "", "The answer is ", "knight")
    tokenizer = answerer.renderer.tokenizer
    assert tokenizer.decode(answerer_ids[first:]) == " knight"
    assert tokenizer.decode(answerer_ids[:first]) == "Puzzle: x\nThe answer is"


def test_the_relative_part_is_0_for_an_empty_context(answerer):
    reward = make_reward(RewardConfig(parts={"perplexity": 1.0}, perplexity={"context": "thinking"}), KNIGHTS, answerer)
    texts = ["<think></think><answer>x</answer>", "<think> \n </think>", "no thinking block", "<think>Suppose.</think>"]
    rewards = reward(KNIGHTS.problems("train")[0], [rollout(t) for t in texts])
    assert [r.parts["relative"] for r in rewards[:3]] == [0.0, 0.0, 0.0]
    assert all(r.parts["gold_ppl"] == r.parts["gold_ppl_without"] for r in rewards[:3])
    assert rewards[3].parts["gold_ppl"] != rewards[3].parts["gold_ppl_without"]
    assert rewards[0].total == pytest.approx(0.5 / rewards[0].parts["gold_ppl"])


def test_the_cue_is_in_both_prompts(answerer, monkeypatch):
    seen = []
    monkeypatch.setattr(
        answerer, "_encode", lambda *a: seen.append(a) or LocalAnswerer._encode(answerer, *a), raising=True
    )
    answerer.logprobs(KNIGHTS.problems("train")[0], ["", "ctx"], CUE, "gold")
    assert [(context, cue) for _, context, cue, _ in seen] == [("", CUE), ("ctx", CUE)]


def test_what_of_the_text_is_read(answerer):
    text = "<think>hm</think>\nso <answer>x</answer>"
    problem = KNIGHTS.problems("train")[0]
    for which, context in [("text", text), ("thinking", "hm"), ("before_answer", "<think>hm</think>\nso")]:
        config = RewardConfig(parts={"perplexity": 1.0}, perplexity={"context": which})
        (result,) = make_reward(config, KNIGHTS, answerer)(problem, [rollout(text)])
        (expected,) = answerer.logprobs(problem, [context], CUE, gold_text(problem))
        assert result.parts["gold_ppl"] == pytest.approx(perplexity(expected), rel=1e-6)


def test_an_opening_tag_in_the_prompt_is_part_of_the_context(folder):
    prompt = PromptConfig(style="raw", template="Q: {user}\n", open_think=True)
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    answerer = LocalAnswerer(load_model(ModelConfig(path=str(folder))).eval(), Renderer(tokenizer, prompt, ""))
    assert answerer._question(question()).rstrip() == "Q: What is 6 * 7?"
    ids = answerer.prompt_ids(question(), "<think>six</think>", CUE)
    assert tokenizer.decode(ids).count("<think>") == 1


def test_special_tokens_written_out_are_left_out_of_the_context(answerer):
    problem = question()
    honest, forged = answerer.logprobs(problem, ["so", "so<|endoftext|>"], CUE, "42")
    np.testing.assert_allclose(honest, forged, atol=1e-6)


def test_a_context_too_long_loses_its_beginning(answerer):
    long = "Zoey says. " * 400 + "Everything fits."
    ids, first = answerer._encode("Puzzle: x\n", long, CUE, "42")
    text = answerer.renderer.tokenizer.decode(ids)
    assert len(ids) == 512
    assert text.startswith("Puzzle: x\n")
    assert text.endswith(f"Everything fits.\n{CUE}42")
    assert answerer.renderer.tokenizer.decode(ids[first:]).strip() == "42"
    with pytest.raises(UserError, match="exceed its context of 512 tokens"):
        answerer._encode("Puzzle: x " * 600, "", CUE, "42")


def test_the_frozen_model_does_not_move(answerer):
    assert not any(p.requires_grad for p in answerer.model.parameters())
    assert not answerer.model.training


# --- leaks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "context",
    ["so 42", "42", "= 42.", "(42)", "$42", "42%", "x=42,", "**42**", "42.0", "42.00 dollars", "\\boxed{42}", "a-42",
     "4\u200b2", "\uff14\uff12", "\u0664\u0662", "040+2=042", "1,042 or 42", "#### 42", "is 42-ish"],
)  # fmt: skip
def test_a_number_leaks_if_its_value_is_there(context):
    assert leaks(context, "42")


@pytest.mark.parametrize(
    "context",
    [
        "",
        "142",
        "421",
        "4.2",
        "42.5",
        "0.42",
        "-42",
        "x = -42",
        "1,042",
        "42,000",
        "forty-two",
        "4 2",
        "3.42",
        "42" * 80,
    ],
)
def test_digits_inside_another_number_are_no_leak(context):
    assert not leaks(context, "42")


def test_signs_separators_and_decimals_belong_to_the_number():
    assert leaks("it is -7.", "-7")
    assert not leaks("it is 7, or 10-7", "-7")
    assert leaks("10-7 is 3", "7")
    assert leaks("1,234,567 in all", "1234567")
    assert leaks("1234567 in all", "1,234,567")
    assert leaks("half is .5", "0.5")
    assert not leaks("version 1.0.5", "5")
    assert leaks("costs 3.50", "$3.5")


def test_words_leak_whole_in_any_case_and_spacing():
    gold = "(1) Zoey is a knight\n(2) Oliver is a knave"
    assert leaks("I say: (1) zoey is a  KNIGHT (2) Oliver is a knave!", gold)
    assert not leaks("Zoey is a knight and Oliver is a knave", gold)
    assert leaks("it is Paris.", "paris")
    assert not leaks("Parisians", "Paris")
    assert leaks("x^2+1", "x^2+1")
    assert not leaks("x^2+12", "x^2+1")
    assert leaks("so (B)", "B")
    assert not leaks("so b", "B")  # one letter alone: a and b are words and variables
    assert not leaks("A Better idea", "B")


@given(
    st.lists(st.from_regex(r"[-\u2212]?(\d{1,4}|\d{1,3},\d{3}|\.\d|\d{1,3}\.\d{1,3})", fullmatch=True), max_size=5),
    st.from_regex(r"[-+]? ?\$?(0{0,2}\d{1,4}|\d,\d00|\d{0,2}\.\d0?) ?%?\.?", fullmatch=True),
)
def test_numbers_leak_by_their_value_alone(numbers, gold):
    assume(number(gold) is not None)
    context = " and ".join(numbers)
    assert leaks(context, gold) == (number(gold) in [number(one) for one in written_numbers(_visible(context))])


@pytest.mark.parametrize(
    "context",
    [" ".join(map(str, range(10_000, 30_000))), "".join(chr(0xAC00 + 7919 * n % 11_172) for n in range(100_000))],
    ids=["numbers", "syllables"],
)
def test_texts_in_which_little_occurs_twice_are_quick(context):
    """Each different number was once computed with, and each different character counted in the whole text."""
    took = []
    for _ in range(3):
        start = time.process_time()
        assert not leaks(context, "1234.5")
        took.append(time.process_time() - start)
    assert min(took) < (0.04 if context.isascii() else 0.15)


@given(st.text(), st.text())
def test_a_context_that_is_the_answer_leaks_and_nothing_raises(text, gold):
    assert leaks(gold, gold) == bool(leaks(f"so {gold} .", gold)) or not gold.strip()
    leaks(text, gold)


def test_a_leak_in_a_sample_is_counted_and_can_be_worth_nothing(answerer):
    problem = KNIGHTS.problems("train")[0]
    gold = gold_text(problem)
    config = RewardConfig(parts={"perplexity": 1.0}, perplexity={"leak": "zero"})
    leaked, honest = make_reward(config, KNIGHTS, answerer)(problem, [rollout(f"It is {gold}."), rollout("Hm.")])
    assert (leaked.total, leaked.parts["leak"]) == (0.0, 1.0)
    assert honest.total > 0.0
    assert honest.parts["leak"] == 0.0


# --- settings and failures -------------------------------------------------------------------


class Broken:
    """Fails on the groups that are asked for, at their places in the step."""

    def __init__(self, at=(0,)):
        self.at = at

    def logprobs_all(self, requests, cue):
        fine = np.full(1, -1.0, np.float32)
        return [
            AnswererError("no connection") if n in self.at else [fine for _ in one.contexts]
            for n, one in enumerate(requests)
        ]


def test_an_answerer_that_fails_is_a_verdict_and_never_a_zero():
    reward = make_reward(RewardConfig(parts={"perplexity": 1.0}), KNIGHTS, Broken())
    rewards = reward(KNIGHTS.problems("train")[0], [rollout("a"), rollout("b")])
    assert [r.note for r in rewards] == ["perplexity: no connection"] * 2
    assert [r.verdict for r in rewards] == ["verifier_error"] * 2
    assert [r.parts for r in rewards] == [{}, {}]


def test_a_group_that_fails_does_not_take_the_others_of_the_step_with_it():
    reward = make_reward(RewardConfig(parts={"perplexity": 1.0}), KNIGHTS, Broken(at=(1,)))
    results = reward.score_all(KNIGHTS.problems("train")[:3], [[rollout("a"), rollout("b")]] * 3)
    assert [[r.verdict for r in group] for group in results] == [
        ["malformed"] * 2, ["verifier_error"] * 2, ["malformed"] * 2
    ]  # fmt: skip
    assert results[0][0].total == pytest.approx(0.5 / math.e)  # PPL e with and without: nothing relative, 1/e absolute


def test_gold_answers_are_text():
    assert gold_text(question(7)) == "7"
    assert gold_text(question(" 3/4 ")) == "3/4"
    zoey = KNIGHTS.problems("train")[0]
    assert gold_text(zoey) == str(zoey.reference).split("<answer>")[1].split("</answer>")[0]
    with pytest.raises(UserError, match="no gold answer as text"):
        gold_text(Problem("p", "t", (), {"nums": [1]}))


def test_impossible_settings_are_named():
    with pytest.raises(ValidationError, match="served_model: missing"):
        PerplexityReward(answerer="http://localhost:1/v1")
    with pytest.raises(ValueError, match="needs a frozen answerer"):
        make_reward(RewardConfig(parts={"perplexity": 1.0}), KNIGHTS)
    # A countdown row from a file has no worked solution, so no gold answer.
    task = CountdownTask(CountdownConfig(train=1))
    task.problems("train")
    task._problems["train"] = [Problem("p", "countdown", (), {"nums": [1], "target": 1})]
    with pytest.raises(UserError, match="no gold answer as text"):
        make_reward(RewardConfig(parts={"perplexity": 1.0}), task, Broken())


def test_a_kl_reference_is_used_again(folder):
    config, model = RewardConfig(parts={"perplexity": 1.0}), ModelConfig(path=str(folder))
    reference = load_model(model).eval()
    assert load_answerer(config, model, PROMPT, "", reference).model is reference
    other = config.model_copy(update={"perplexity": PerplexityReward(answerer=str(folder))})
    assert load_answerer(other, model, PROMPT, "", reference).model is not reference
    assert load_answerer(RewardConfig(), model, PROMPT, "") is None


# --- a server --------------------------------------------------------------------------------


class Echo(BaseHTTPRequestHandler):
    """Echoes prompts as characters, each with log-prob -(number of characters before it) / 100."""

    failures: list = []
    wishes: list = []
    now = most = 0  # requests at the same time

    def do_POST(self):
        Echo.now += 1
        Echo.most = max(Echo.most, Echo.now)
        time.sleep(0.02)
        Echo.now -= 1
        wish = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.wishes.append(wish)
        if self.failures:
            self.send_response(self.failures.pop())
            self.end_headers()
            return
        choices = [
            {
                "index": i,
                "logprobs": {"tokens": list(p), "token_logprobs": [None, *(-n / 100 for n in range(1, len(p)))]},
            }
            for i, p in enumerate(wish["prompt"])
        ]
        body = json.dumps({"choices": choices[::-1]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("hone.base.http.FIRST_PAUSE", 0.001)
    Echo.failures, Echo.wishes = [], []
    http = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    yield AnswerServer(f"http://127.0.0.1:{http.server_port}/v1/", "m", PROMPT, "")
    http.shutdown()


def test_a_server_is_asked_once_for_a_group_and_the_answer_is_at_the_end(server):
    logprobs = server.logprobs(question(), ["", "é so", ""], "A: ", "42")
    n = len("Puzzle: What is 6 * 7?\nA: ")
    m = n + len("é so\n")
    np.testing.assert_allclose(logprobs[0], [-n / 100, -(n + 1) / 100], rtol=1e-6)
    np.testing.assert_allclose(logprobs[1], [-m / 100, -(m + 1) / 100], rtol=1e-6)
    assert logprobs[2] is logprobs[0]
    (wish,) = Echo.wishes
    assert (len(wish["prompt"]), wish["echo"], wish["max_tokens"]) == (2, True, 0)


def test_groups_are_sent_to_a_server_at_the_same_time_and_come_back_in_order(server):
    Echo.failures = [400]
    groups = [AnswerRequest(question("4" * n), ["x" * n], "4" * n) for n in range(1, 30)]
    results = server.logprobs_all(groups, "A: ")
    assert [type(f) for f in results].count(AnswererError) == 1
    assert all(isinstance(f, AnswererError) or len(f[0]) == n for n, f in enumerate(results, start=1))
    assert Echo.most > 1


def test_a_server_that_fails_for_a_while_is_asked_again(server):
    Echo.failures = [503, 429]
    assert len(server.logprobs(question(), [""], "A: ", "42")[0]) == 2
    assert len(Echo.wishes) == 3
    Echo.failures = [400]
    with pytest.raises(AnswererError, match="answered 400"):
        server.logprobs(question(), [""], "A: ", "42")
    Echo.failures = [500] * 9
    with pytest.raises(AnswererError, match="answered 500"):
        server.logprobs(question(), [""], "A: ", "42")


@pytest.mark.parametrize(
    "choice",
    [
        None,
        {},
        {"logprobs": None},
        {"logprobs": {"tokens": ["a", "b"], "token_logprobs": [0, 0]}},
        {"logprobs": {"tokens": ["4", "2"], "token_logprobs": [0, 0]}},  # nothing before the answer
        {"logprobs": {"tokens": [1], "token_logprobs": [0]}},
    ],
)
def test_an_echo_without_the_answer_is_an_error(choice):
    with pytest.raises(AnswererError):
        tail(choice, "42")


def test_ligatures_of_up_to_three_letters_are_spelt_out():
    assert leaks("7 \u32cd", "erg")  # one character, three letters
    assert not leaks("at \u33c2", "a.m.")  # one character, four: left alone
