"""The API through OpenAI's own client; the engine itself and a plain forward pass are the oracles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from hone.base.settings import UserError
from hone.base.web import listen
from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.native.core import Core
from hone.serve.model import ServedModel
from hone.serve.server import serve


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def name(model: ServedModel) -> str:
    return model.name


def _generated(model: ServedModel, text: str, samples: int, seed: int, **sampling: Any) -> list[str]:
    """What the engine says by itself."""
    ids = model.renderer.text_ids(text)
    (turns,) = model.engine.generate([ids], SamplingConfig(**sampling), samples=samples, seed=seed)
    return [model.decode(turn.completion_ids.tolist()) for turn in turns]


def test_models_and_health(client: openai.OpenAI, url: str, folder: Path) -> None:
    (listed,) = client.models.list().data
    assert listed.id == str(folder)
    assert httpx.get(url.replace("/v1", "/health")).json() == {"status": "ok"}


def test_completions_are_the_engines(client: openai.OpenAI, model: ServedModel, name: str) -> None:
    got = client.completions.create(model=name, prompt="the cat", max_tokens=12, n=3, seed=5)
    assert [c.text for c in got.choices] == _generated(model, "the cat", 3, 5, max_tokens=12)
    assert len({c.text for c in got.choices}) == 3
    assert [c.index for c in got.choices] == [0, 1, 2]
    assert got.usage is not None
    assert got.usage.prompt_tokens == len(model.renderer.text_ids("the cat"))
    assert got.usage.completion_tokens == 36
    greedy = client.completions.create(model=name, prompt="the cat", temperature=0, n=2)
    assert [c.text for c in greedy.choices] == _generated(model, "the cat", 2, 0, temperature=0.0, max_tokens=20)
    assert {c.finish_reason for c in greedy.choices} <= {"stop", "length"}
    one = client.completions.create(model=name, prompt="the cat", max_tokens=12)
    assert one.choices[0].text != client.completions.create(model=name, prompt="the cat", max_tokens=12).choices[0].text


def test_settings_reach_the_sampler(client: openai.OpenAI, model: ServedModel, name: str) -> None:
    given: dict[str, Any] = {"temperature": 1.7, "top_p": 0.7, "max_tokens": 15}
    got = client.completions.create(
        model=name, prompt="the cat", seed=2, extra_body={"top_k": 9, "min_p": 0.02}, **given
    )
    expected = _generated(model, "the cat", 1, 2, top_k=9, min_p=0.02, **given)
    assert [c.text for c in got.choices] == expected
    assert expected != _generated(model, "the cat", 1, 2, max_tokens=15)


def test_several_prompts_as_text_or_tokens(client: openai.OpenAI, model: ServedModel, name: str) -> None:
    texts = ["the cat sat", "a", "on a mat"]
    ids = [model.renderer.text_ids(text).tolist() for text in texts]
    got = client.completions.create(model=name, prompt=texts, temperature=0, max_tokens=6, n=2)
    same = client.completions.create(model=name, prompt=ids, temperature=0, max_tokens=6, n=2)
    assert [c.text for c in got.choices] == [c.text for c in same.choices]
    assert [c.text for c in got.choices] == [
        text for t in texts for text in _generated(model, t, 2, 0, temperature=0.0, max_tokens=6)
    ]
    single = client.completions.create(model=name, prompt=ids[0], temperature=0, max_tokens=6)
    assert single.choices[0].text == got.choices[0].text


def test_streams_joined_are_the_whole(client: openai.OpenAI, name: str) -> None:
    ask: dict[str, Any] = {"model": name, "max_tokens": 15, "n": 2, "seed": 4}
    whole = client.completions.create(prompt="an elephant", **ask)
    pieces = list(
        client.completions.create(prompt="an elephant", stream=True, stream_options={"include_usage": True}, **ask)
    )
    for choice in whole.choices:
        mine = [p.choices[0] for p in pieces if p.choices and p.choices[0].index == choice.index]
        assert "".join(p.text for p in mine) == choice.text
        assert [p.finish_reason for p in mine][-1] == choice.finish_reason
        assert len(mine) > 5
    assert pieces[-1].usage == whole.usage

    messages: Any = [{"role": "system", "content": "hello"}, {"role": "user", "content": "the cat?"}]
    chat = client.chat.completions.create(messages=messages, **ask)
    stream = list(client.chat.completions.create(messages=messages, stream=True, **ask))
    for c in chat.choices:
        deltas = [p.choices[0].delta for p in stream if p.choices[0].index == c.index]
        assert "".join(d.content or "" for d in deltas) == c.message.content
        assert deltas[0].role == "assistant"


def test_chats_are_rendered_with_the_models_template(client: openai.OpenAI, model: ServedModel, name: str) -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]},
        {"role": "assistant", "content": "sat"},
        {"role": "user", "content": "on?"},
    ]
    got = client.chat.completions.create(model=name, messages=messages, temperature=0, max_completion_tokens=9)
    prompt = "user: the cat\nassistant: sat\nuser: on?\nassistant:"
    assert [got.choices[0].message.content] == _generated(model, prompt, 1, 0, temperature=0.0, max_tokens=9)


def test_a_stop_string_is_not_shown_not_even_in_part(client: openai.OpenAI, model: ServedModel, name: str) -> None:
    (free,) = _generated(model, "the", 1, 3, max_tokens=20)
    stop = free[6:9]
    ask: dict[str, Any] = {"model": name, "prompt": "the", "max_tokens": 20, "seed": 3, "stop": [stop, "zzz"]}
    got = client.completions.create(**ask)
    assert got.choices[0].text == free[: free.index(stop)]
    assert got.choices[0].finish_reason == "stop"
    assert got.usage is not None
    assert got.usage.completion_tokens < 20
    pieces = [p.choices[0] for p in client.completions.create(stream=True, **ask)]
    assert "".join(p.text for p in pieces) == free[: free.index(stop)]
    assert pieces[-1].finish_reason == "stop"


def _forward(folder: Path, ids: list[int]) -> torch.Tensor:
    """Log-probs [L, V] of what follows each token."""
    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)


def test_scores_of_an_echoed_prompt_are_those_that_lm_eval_adds_up(
    client: openai.OpenAI, model: ServedModel, name: str, folder: Path
) -> None:
    ids = model.renderer.text_ids("the cat sat on a mat and saw").tolist()
    context = 4
    ask: dict[str, Any] = {"model": name, "echo": True}
    got = client.completions.create(prompt=[ids], logprobs=1, max_tokens=1, temperature=0, seed=1, **ask)
    scores = got.choices[0].logprobs
    assert scores is not None
    assert scores.token_logprobs is not None
    assert scores.top_logprobs is not None
    assert len(scores.token_logprobs) == len(ids) + 1
    expected = _forward(folder, ids)
    # As `LocalCompletionsAPI.parse_logprobs` of lm-evaluation-harness has it:
    own = [expected[t - 1, ids[t]].item() for t in range(context, len(ids))]
    assert sum(scores.token_logprobs[context:-1]) == pytest.approx(sum(own), abs=1e-4)
    greedy = [
        x == max(top.values()) for x, top in zip(scores.token_logprobs[context:-1], scores.top_logprobs[context:-1])
    ]
    assert greedy == [expected[t - 1].argmax().item() == ids[t] for t in range(context, len(ids))]
    assert scores.token_logprobs[0] is None
    assert scores.token_logprobs[-1] == max(scores.top_logprobs[-1].values())  # sampled greedily, the same number
    text = got.choices[0].text
    assert text.startswith("the cat sat on a mat and saw")
    assert scores.text_offset is not None
    assert scores.tokens is not None
    assert all(text[at:].startswith(token) for at, token in zip(scores.text_offset, scores.tokens[: len(ids)]))

    only = client.completions.create(prompt=ids, logprobs=0, max_tokens=0, **ask)
    assert only.choices[0].text == "the cat sat on a mat and saw"
    assert only.choices[0].logprobs is not None
    assert only.choices[0].logprobs.token_logprobs == scores.token_logprobs[:-1]
    assert only.usage is not None
    assert only.usage.completion_tokens == 0


def test_log_probs_of_a_chat(client: openai.OpenAI, model: ServedModel, name: str, folder: Path) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    ask: dict[str, Any] = {"model": name, "messages": messages, "max_tokens": 6, "seed": 0}
    got = client.chat.completions.create(logprobs=True, top_logprobs=3, **ask)
    scores = got.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    assert len(scores.content) == 6
    ids = model.renderer.messages_ids(messages)
    ((turn,),) = model.engine.generate([ids], SamplingConfig(max_tokens=6), samples=1, seed=0)
    np.testing.assert_allclose([t.logprob for t in scores.content], turn.logprobs, rtol=0, atol=1e-6)
    top = _forward(folder, [*ids.tolist(), *turn.completion_ids.tolist()])[len(ids) - 1 : -1].topk(3)[0]
    np.testing.assert_allclose([[x.logprob for x in t.top_logprobs] for t in scores.content], top, rtol=0, atol=1e-5)
    pieces = list(client.chat.completions.create(logprobs=True, stream=True, **ask))
    joined = [t.logprob for p in pieces if p.choices[0].logprobs for t in p.choices[0].logprobs.content or []]
    assert joined == [t.logprob for t in scores.content]


@pytest.mark.parametrize(
    ("ask", "status", "param", "message"),
    [
        ({"model": "other"}, 404, "model", "there is no model 'other' here"),
        ({"max_tokens": 1000}, 400, None, "do not fit the model's context of 256.*max_tokens to 25[0-9] or less"),
        ({"prompt": [7] * 300}, 400, None, "300 tokens and leaves no room"),
        ({"prompt": [5, 300]}, 400, "prompt", "300 is not a token id: use 0 to 299"),
        ({"prompt": ""}, 400, None, "empty"),
        ({"prompt": []}, 400, "prompt", "at least one"),
        ({"temperature": -1}, 400, "temperature", "temperature"),
        ({"stop": ""}, 400, "stop", "at least one character"),
        ({"logit_bias": {"5": 3}}, 400, "logit_bias", "not supported"),
        ({"best_of": 3}, 400, "best_of", "best_of 3"),
        ({"max_tokens": 0}, 400, "max_tokens", "without echo"),
    ],
)
def test_errors_have_openais_form(
    client: openai.OpenAI, name: str, ask: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    with pytest.raises(openai.APIStatusError, match=message) as caught:
        client.completions.create(**{"model": name, "prompt": "a", **ask})
    assert caught.value.status_code == status
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "invalid_request_error"
    assert caught.value.body["param"] == param
    with pytest.raises(openai.APIStatusError):  # refused before a stream begins, too
        client.completions.create(**{"model": name, "prompt": "a", "stream": True, **ask})


def test_other_paths_methods_bodies_and_hosts(url: str, name: str) -> None:
    assert httpx.get(url + "/nothing").json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(url + "/completions").status_code == 405
    broken = httpx.post(url + "/chat/completions", content=b"{no")
    assert (broken.status_code, "JSON" in broken.json()["error"]["message"]) == (400, True)
    neutral = {"model": name, "prompt": "a", "max_tokens": 1, "presence_penalty": 0, "logit_bias": None, "user": "me"}
    assert httpx.post(url + "/completions", json=neutral).status_code == 200
    # A web page that has its own name point to this machine.
    assert httpx.get(url + "/models", headers={"host": "evil.example"}).status_code == 400


def test_many_clients_share_a_batch_and_get_what_they_get_alone(
    client: openai.OpenAI, model: ServedModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = [0]
    step = Core.step

    def counted(core: Core) -> Any:
        most[0] = max(most[0], len(core._rows.work))
        return step(core)

    monkeypatch.setattr(Core, "step", counted)
    asks = [{"seed": i, "temperature": [0.0, 1.0, 1.4][i % 3], "max_tokens": 30 + i} for i in range(12)]

    def ask(i: int) -> str:
        stream = client.completions.create(model=name, prompt="the cat"[: 3 + i % 5], stream=i % 2 == 0, **asks[i])
        return "".join(p.choices[0].text for p in stream) if i % 2 == 0 else stream.choices[0].text

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, range(12)))
    assert most[0] > 3
    for i, text in enumerate(together):
        sampling = {k: v for k, v in asks[i].items() if k != "seed"}
        assert [text] == _generated(model, "the cat"[: 3 + i % 5], 1, i, **sampling)


def test_a_client_that_leaves_frees_its_rows(client: openai.OpenAI, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[int] = []
    cancel = Core.cancel
    monkeypatch.setattr(Core, "cancel", lambda core, number: (cancelled.append(number), cancel(core, number)))
    step = Core.step
    monkeypatch.setattr(Core, "step", lambda core: (time.sleep(0.02), step(core))[1])  # 250 tokens take 5 seconds
    stream = client.completions.create(model=name, prompt="a", max_tokens=250, stream=True, n=2)
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1.0).completions.create(model=name, prompt="a", max_tokens=250, n=8)
    deadline = time.monotonic() + 30
    while len(cancelled) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(cancelled) == 2


def test_an_engine_that_fails_says_so_and_goes_on(
    client: openai.OpenAI, model: ServedModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = client.completions.create(model=name, prompt="the", seed=1).choices[0].text
    with monkeypatch.context() as broken:
        broken.setattr(model.engine.model.lm_head, "forward", lambda x: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="ZeroDivisionError"):
            client.completions.create(model=name, prompt="the", seed=1)
    assert client.completions.create(model=name, prompt="the", seed=1).choices[0].text == before


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with listen("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=rf"127.0.0.1:{port} is taken: give another with --port"):
            serve("no/such/model", [], None, "127.0.0.1", port)
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError):
        serve("no/such/model", [], None, "0.0.0.0", 0)
    assert "can be reached from other machines" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_server_ends_after_ctrl_c_and_lets_answers_finish(folder: Path) -> None:
    command = [sys.executable, "-m", "hone", "serve", str(folder), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split(" at ")[1].split(";")[0]
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=10, timeout=60)
        assert client.models.list().data[0].id == str(folder)
        stream = iter(client.completions.create(model=str(folder), prompt="a", max_tokens=200, stream=True, seed=0))
        next(stream)
        process.send_signal(signal.SIGINT)
        assert [p.choices[0].finish_reason for p in stream][-1] is not None
        assert process.wait(30) == 130
        assert process.stderr.read() == ""
