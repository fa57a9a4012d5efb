"""Engines behind servers, with stand-ins for the servers: what is asked, what comes back, and every fault."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hone.base import streams
from hone.base.http import Http, ServerHangs, ServerLost, ServerRefused, free_port
from hone.base.settings import UserError
from hone.base.streams import server_prompt
from hone.recipe.sections.model import LoraConfig
from hone.recipe.sections.rollout import SamplingConfig, ServerConfig, SGLangConfig, VLLMConfig
from hone.rollout.engine import ModelTraits
from hone.rollout.servers.host import Host
from hone.rollout.servers.server import ServerEngine
from hone.rollout.servers.sglang import SGLangEngine
from hone.rollout.servers.vllm import VLLMEngine
from hone.types import Turn
from tests.environments import toy
from tests.rollout.stand_ins import contract

STAND_INS = Path(__file__).parent / "stand_ins"
PATHS = os.pathsep.join([str(STAND_INS), str(STAND_INS / "packages")])  # for servers alone: no test may import `vllm`
ENGINES: dict[str, tuple[type[ServerEngine], type[ServerConfig], type[contract.Handler]]] = {
    "vllm": (VLLMEngine, VLLMConfig, contract.VLLM),
    "sglang": (SGLangEngine, SGLangConfig, contract.SGLang),
}
SAMPLING = SamplingConfig(max_tokens=8)
PROMPTS = [np.arange(3, 8), np.arange(10, 20), np.arange(5, 7), np.arange(30, 31)]


class Weights:
    """All of a policy that a server engine needs: it writes down which version it is."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def export(self, folder: Path) -> None:
        (folder / "version").write_text(str(self.version))


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """An engine that starts its server, a stand-in in a process of its own, and the events it tells."""
    engines: list[ServerEngine] = []

    def start(
        kind: str = "vllm", fault: str = "none", vocabulary: int | None = None, **settings: Any
    ) -> tuple[ServerEngine, list[tuple[str, str]]]:
        state = tmp_path / "state"
        state.mkdir(exist_ok=True)
        (state / "fault").write_text(fault)
        make, config, _ = ENGINES[kind]
        events: list[tuple[str, str]] = []
        given = {
            "environment": {
                "PYTHONPATH": os.pathsep.join([str(STAND_INS), str(STAND_INS / "packages")]),
                "STAND_IN": str(state),
            },
            "start_timeout": 30.0,
            "request_timeout": 20.0,
            **settings,
        }
        engine = make(
            config(**given),
            ModelTraits((contract.STOP,), vocabulary=vocabulary),
            max_sequences=8,
            folder=tmp_path,
            event=lambda kind, message: events.append((kind, message)),
        )
        engines.append(engine)
        return engine, events

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """An engine for a server that already runs, a stand-in in a thread; and that server."""
    servers: list[contract.Server] = []

    def connect(kind: str, server: contract.Server | None = None, **settings: Any) -> tuple[ServerEngine, Any, Any]:
        make, config, handler = ENGINES[kind]
        (tmp_path / "version").write_text("0")
        server = server or contract.Server(handler, contract.Toy(str(tmp_path)))
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        events: list[tuple[str, str]] = []
        engine = make(
            config(url=server.url, request_timeout=10.0, start_timeout=5.0, **settings),
            ModelTraits((contract.STOP,)),
            max_sequences=8,
            folder=tmp_path,
            event=lambda kind, message: events.append((kind, message)),
        )
        return engine, server, events

    yield connect
    for server in servers:
        server.shutdown()
        server.server_close()


class Adapted(Weights):
    """The same for a policy with an adapter."""

    def __init__(self, version: int = 0, resets: int = 0, rank: int = 4) -> None:
        super().__init__(version)
        self.resets, self.lora = [{}] * resets, LoraConfig(rank=rank)

    def export_base(self, folder: Path) -> None:
        (folder / "version").write_text("900")  # not to be asked

    def export_adapter(self, folder: Path) -> None:
        self.export(folder)


def flat(groups: list[list[Turn]]) -> list[tuple[list[int], list[float], str, int]]:
    return [
        (t.completion_ids.tolist(), np.round(t.logprobs, 6).tolist(), t.finish, t.policy_version)
        for group in groups
        for t in group
    ]


def wanted(version: int, samples: int, seed: int, prompts: list[np.ndarray] = PROMPTS) -> Any:
    """What the stand-in's model says, computed here."""
    toy = contract.Toy.__new__(contract.Toy)
    toy.version = version
    found = []
    for i, prompt in enumerate(prompts):
        for g in range(samples):
            ids, logprobs, reason = toy.sample(prompt.tolist(), server_prompt(seed, i) + g, SAMPLING.max_tokens)
            found.append((ids, np.round(np.float32(logprobs), 6).tolist(), reason, version))
    return found


# --- asking and answering --------------------------------------------------------------------------------------------


def test_vllm_returns_the_tokens_and_logprobs_of_every_sample_in_order(running: Any) -> None:
    engine, _server, events = running("vllm")
    engine.sync(Weights(7), 7)
    seen: list[tuple[int, int]] = []
    groups = engine.generate(PROMPTS, SAMPLING, samples=3, seed=5, progress=lambda done, all: seen.append((done, all)))
    assert flat(groups) == wanted(7, 3, 5)
    assert {finish for _, _, finish, _ in flat(groups)} == {"stop", "length"}
    assert all(t.completion_ids[-1] == contract.STOP for group in groups for t in group if t.finish == "stop")
    assert [t.prompt_ids.tolist() for t, *_ in groups] == [p.tolist() for p in PROMPTS]
    assert seen[-1] == (12, 12)
    assert not events


def test_sglang_returns_the_tokens_and_logprobs_of_every_sample_in_order(running: Any) -> None:
    engine, _server, _ = running("sglang")
    engine.sync(Weights(7), 7)
    groups = engine.generate(PROMPTS, SAMPLING, samples=3, seed=5)
    assert [len(group) for group in groups] == [3] * 4
    assert {version for *_, version in flat(groups)} == {7}
    ids, logprobs, _, _ = flat(groups)[0]
    assert logprobs == pytest.approx([-1.007 - i / 1e6 for i in ids], abs=1e-6)
    assert len({tuple(ids) for ids, *_ in flat(groups)}) > 6
    again = engine.generate(PROMPTS, SAMPLING, samples=3, seed=5)
    assert flat(again) != flat(groups)  # its seeds have no effect


@pytest.mark.parametrize("kind", ENGINES)
def test_scores_are_of_the_tokens_after_the_first(running: Any, kind: str) -> None:
    engine, _, _ = running(kind)
    engine.sync(Weights(3), 3)
    (turn,) = engine.score([np.asarray([5, 6, 7])])
    assert (turn.prompt_ids.tolist(), turn.completion_ids.tolist()) == ([5], [6, 7])
    assert turn.logprobs.tolist() == pytest.approx([-1.003 - 6e-6, -1.003 - 7e-6], abs=1e-6)


@pytest.mark.parametrize(
    "kind, calls",
    [
        ("vllm", ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]),
        ("sglang", ["/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation"]),
    ],
)
def test_new_weights_are_taken_over_while_nothing_is_generated_and_caches_are_dropped(
    running: Any, kind: str, calls: list[str]
) -> None:
    engine, server, _ = running(kind)
    engine.sync(Weights(1), 1)
    server.calls.clear()
    engine.sync(Weights(2), 2)
    assert server.calls[:4] == calls
    assert server.model.version == 2
    assert not server.paused
    assert len(list(engine._transfer._folder.iterdir())) == 1  # weights that were taken over do not pile up
    assert flat(engine.generate(PROMPTS, SAMPLING, samples=1, seed=0))[0][3] == 2


def test_an_adapter_is_handed_over_by_itself_under_a_name_for_each_version(running: Any, tmp_path: Path) -> None:
    engine, server, _ = running("vllm", lora="adapter")
    folder = engine._transfer._folder
    engine.sync(Adapted(1), 1)
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_000001", "base_000"]
    first = list(server.adapters)
    server.calls.clear()
    engine.sync(Adapted(2), 2)
    assert server.calls == [  # the base stays where it is
        *("/pause", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache", "/resume")
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_000002", "base_000"]
    assert (len(first), len(server.adapters)) == (1, 1)
    assert first != server.adapters
    assert flat(engine.generate(PROMPTS, SAMPLING, samples=2, seed=3)) == wanted(2, 2, 3)
    server.calls.clear()
    engine.sync(Adapted(3, resets=1), 3)  # the adapter was merged: a new base
    assert server.calls[:3] == ["/pause", "/collective_rpc", "/v1/load_lora_adapter"]
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_000003", "base_001"]
    assert flat(engine.generate(PROMPTS, SAMPLING, samples=2, seed=3)) == wanted(3, 2, 3)


def test_a_server_that_is_started_again_gets_the_adapter_again(started: Any) -> None:
    engine, events = started(fault="die 3", requests=2, lora="adapter")
    engine.sync(Adapted(4, rank=9), 4)
    command = (engine._log).read_text()
    assert "--enable-lora" in command
    assert "'--max-lora-rank', '16'" in command  # vLLM's next size
    assert flat(engine.generate(PROMPTS, SAMPLING, samples=2, seed=9)) == wanted(4, 2, 9)
    assert [name for name, _ in events] == ["server_restart"]
    pid = engine._process.pid
    engine.sync(Adapted(5, rank=16), 5)
    assert engine._process.pid == pid
    engine.sync(Adapted(6, resets=1, rank=17), 6)  # more than it was started for
    assert engine._process.pid != pid
    assert flat(engine.generate(PROMPTS, SAMPLING, samples=2, seed=9)) == wanted(6, 2, 9)


def test_an_adapter_with_merged_weights_and_a_policy_without_one_go_whole(running: Any) -> None:
    plain = Weights(1)
    plain.lora = None
    for lora, policy in (("merged", Adapted(1)), ("adapter", plain)):
        engine, server, _ = running("vllm", lora=lora)
        engine.sync(policy, 1)
        assert not server.adapters
        assert [path.name for path in engine._transfer._folder.iterdir()] == ["version_000001"]
        assert flat(engine.generate(PROMPTS, SAMPLING, samples=1, seed=3)) == wanted(1, 1, 3)
        engine.close()


def test_greedy_answers_are_asked_for_once_and_given_to_each_sample(running: Any) -> None:
    engine, _server, _ = running("vllm")  # vLLM refuses n > 1 there
    engine.sync(Weights(), 0)
    groups = engine.generate(PROMPTS[:1], SamplingConfig(temperature=0.0, max_tokens=4), samples=3, seed=0)
    assert len({tuple(t.completion_ids) for t in groups[0]}) == 1
    assert len(groups[0]) == 3


@pytest.mark.parametrize("kind", ENGINES)
def test_sampling_settings_arrive_in_the_servers_own_words(running: Any, kind: str) -> None:
    engine, _server, _ = running(kind)
    engine.sync(Weights(), 0)
    bodies: list[dict[str, Any]] = []
    original = engine.http.post
    engine.http.post = lambda path, body=None, **k: (bodies.append(body), original(path, body, **k))[1]
    engine.generate(PROMPTS[:1], SamplingConfig(temperature=0.7, top_p=0.9, top_k=0, max_tokens=5), samples=1, seed=0)
    settings = bodies[0] if kind == "vllm" else bodies[0]["sampling_params"][0]
    assert (settings["temperature"], settings["top_p"], settings["stop_token_ids"]) == (0.7, 0.9, [contract.STOP])
    assert settings["top_k"] == (0 if kind == "vllm" else -1)  # off
    assert settings["max_tokens" if kind == "vllm" else "max_new_tokens"] == 5


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENGINES)
def test_a_server_that_dies_while_generating_is_started_again_and_no_group_is_lost(started: Any, kind: str) -> None:
    engine, events = started(kind, fault="die 3", requests=2)
    engine.sync(Weights(4), 4)
    checked: list[int] = []
    engine.on_restart = lambda: checked.append(engine._version)
    groups = engine.generate(PROMPTS, SAMPLING, samples=2, seed=9)
    if kind == "vllm":
        assert flat(groups) == wanted(4, 2, 9)  # each once, in order, from the same weights
    assert [len(group) for group in groups] == [2] * 4
    assert checked == [4]
    ((name, message),) = events
    assert name == "server_restart"
    assert "version 4" in message
    assert "restart 1 of 3" in message


def test_a_server_that_is_killed_from_outside_is_started_again(started: Any) -> None:
    engine, events = started(fault="hang 2", requests=1)
    engine.sync(Weights(4), 4)
    threading.Timer(0.5, lambda: psutil.Process(engine._process.pid).send_signal(signal.SIGKILL)).start()
    assert flat(engine.generate(PROMPTS, SAMPLING, samples=2, seed=9)) == wanted(4, 2, 9)
    assert [name for name, _ in events] == ["server_restart"]
    assert "is lost" in events[0][1]


def test_a_server_that_hangs_is_given_up_in_time_and_started_again(started: Any) -> None:
    engine, events = started(fault="hang 2", request_timeout=1.0)
    engine.sync(Weights(4), 4)
    begin = time.monotonic()
    assert flat(engine.generate(PROMPTS, SAMPLING, samples=2, seed=9)) == wanted(4, 2, 9)
    assert time.monotonic() - begin < 15
    assert "within 1 s" in events[0][1]


def test_a_server_that_dies_every_time_ends_the_run_with_its_log(started: Any) -> None:
    engine, events = started(fault="die always", restarts=1)
    engine.sync(Weights(), 0)
    with pytest.raises(UserError, match=r"restarted 1 times already \(rollout.vllm.restarts\).*\n.*stand-in"):
        engine.generate(PROMPTS, SAMPLING, samples=1, seed=0)
    assert len(events) == 1


def test_a_server_without_memory_for_keys_and_values_says_so_at_the_start(started: Any) -> None:
    engine, _ = started(fault="no memory")
    with pytest.raises(
        UserError, match=r"ended with code 1 before it answered; its log is .*vllm.log(.*\n)*.*KV cache"
    ):
        engine.sync(Weights(), 0)


def test_a_server_that_never_answers_is_given_up(started: Any) -> None:
    engine, _ = started(fault="slow start", start_timeout=1.0)
    with pytest.raises(UserError, match=r"did not answer within 1 s \(start_timeout\)"):
        engine.sync(Weights(), 0)
    assert engine._process is not None
    assert not psutil.pid_exists(engine._process.pid)


def test_an_answer_that_is_given_up_is_asked_for_again_and_then_ends_the_run(running: Any) -> None:
    engine, server, events = running("vllm")
    engine.sync(Weights(), 0)
    sample, times = server.model.sample, [0]

    def flaky(*given: Any) -> Any:
        times[0] += 1
        ids, logprobs, reason = sample(*given)
        return ids, logprobs, "abort" if times[0] <= limit else reason

    server.model.sample, limit = flaky, 1
    assert flat(engine.generate(PROMPTS[:1], SAMPLING, samples=1, seed=2)) == wanted(0, 1, 2, PROMPTS[:1])
    assert [name for name, _ in events] == ["server_retry"]
    limit = 100
    with pytest.raises(UserError, match=r"no complete answer to prompt 0 in 3 tries.*abort.*rollout.max_sequences"):
        engine.generate(PROMPTS[:1], SAMPLING, samples=1, seed=2)


def test_a_server_that_is_out_of_memory_for_one_request_is_asked_again(running: Any) -> None:
    engine, server, events = running("sglang")
    engine.sync(Weights(), 0)

    def fault(number: int) -> None:
        if number == 2:
            raise contract.Refusal(500, "Out of memory: no room in the token_to_kv_pool")

    server.fault = fault
    groups = engine.generate(PROMPTS, SAMPLING, samples=2, seed=2)
    assert [len(group) for group in groups] == [2] * 4
    assert "token_to_kv_pool" in events[0][1]


@pytest.mark.parametrize("kind, context", [("vllm", 64), ("sglang", 62)])  # SGLang leaves two tokens unused
def test_a_prompt_longer_than_the_context_is_an_error_before_anything_is_sent(
    running: Any, kind: str, context: int
) -> None:
    engine, server, _ = running(kind)
    engine.sync(Weights(), 0)
    too_long = rf"prompt 1 has 60 tokens.*68 do not fit.*{context}.*max_tokens to {context - 60}"
    with pytest.raises(UserError, match=too_long):
        engine.generate([PROMPTS[0], np.arange(60)], SAMPLING, samples=1, seed=0)
    with pytest.raises(UserError, match="prompt 0 is empty"):
        engine.generate([np.arange(0)], SAMPLING, samples=1, seed=0)
    assert server.asked == 0


@pytest.mark.parametrize(
    "kind, length, message",
    [
        ("vllm", 60, "This model's maximum context length is 64 tokens"),
        ("sglang", 60, "Requested token count exceeds the model's maximum context length of 64 tokens"),
        ("sglang", 64, r"The input \(64 tokens\) is longer than the model's context length \(64 tokens\)"),
    ],
)
def test_what_the_server_refuses_is_not_tried_again(running: Any, kind: str, length: int, message: str) -> None:
    engine, server, events = running(kind)
    engine.sync(Weights(), 0)
    engine._context = None  # as if it had not told
    with pytest.raises(UserError, match=rf"refuses prompt 0: {message}.*\(status 400\)"):
        engine.generate([np.arange(length)], SAMPLING, samples=1, seed=0)
    assert server.asked == 1
    assert not events


@pytest.mark.parametrize("kind", ENGINES)
def test_a_token_that_the_model_does_not_have_is_an_error_before_anything_is_sent(started: Any, kind: str) -> None:
    engine, events = started(kind, vocabulary=100)
    engine.sync(Weights(), 0)
    for token in (100, 127, 128, -1):  # SGLang answers the first two with noise; the others end it
        with pytest.raises(UserError, match=rf"prompt 1 contains the token id {token}, and .* 0 to 99: .*tokenizer"):
            engine.generate([PROMPTS[0], np.asarray([5, token, 6])], SAMPLING, samples=1, seed=0)
        with pytest.raises(UserError, match=rf"prompt 0 contains the token id {token}, and .* 0 to 99"):
            engine.probe([np.asarray([5, token])])
    assert flat(engine.generate([np.asarray([0, 99])], SAMPLING, samples=1, seed=0))
    assert not events


def test_the_stand_in_of_sglang_ends_with_a_token_that_the_model_does_not_have(started: Any) -> None:
    """As SGLang on a CPU does."""
    engine, events = started("sglang", restarts=1)
    engine.sync(Weights(), 0)
    with pytest.raises(UserError, match="restarted 1 times already"):
        engine.generate([np.asarray([5, 128])], SAMPLING, samples=1, seed=0)
    assert [kind for kind, _ in events] == ["server_restart"]


# --- answers that are not whole, or not of the weights that were handed over -----------------------------------------


def test_an_answer_that_sglang_aborts_is_asked_for_again(running: Any) -> None:
    """Such an answer has status 200, and the tokens that were there."""
    engine, server, events = running("sglang")
    engine.sync(Weights(4), 4)

    def fault(number: int | str) -> None:
        server.aborts += number == 2

    server.fault = fault
    groups = engine.generate(PROMPTS, SAMPLING, samples=2, seed=2)
    assert [len(group) for group in groups] == [2] * 4
    assert {finish for _, _, finish, _ in flat(groups)} <= {"stop", "length"}
    assert [kind for kind, _ in events] == ["server_retry"]
    assert "'type': 'abort'" in events[0][1]


def test_a_probe_that_sglang_aborts_is_asked_for_again(running: Any) -> None:
    engine, server, events = running("sglang")
    engine.sync(Weights(4), 4)
    probes = []

    def fault(number: int | str) -> None:
        probes.append(number)
        server.aborts += len(probes) == 1

    server.fault = fault
    ((turn,), _) = engine.probe([np.asarray([5, 6, 7])])
    assert turn.logprobs.tolist() == pytest.approx([-1.004 - 6e-6, -1.004 - 7e-6], abs=1e-6)
    assert (probes, [kind for kind, _ in events]) == (["probe", "probe"], ["server_retry"])


def test_an_answer_begun_with_other_weights_ends_the_run(running: Any) -> None:
    """SGLang names the version of the last token, and those of all parts beside it."""
    engine, server, _ = running("sglang")
    engine.sync(Weights(4), 4)
    server.weight_version = "3"

    def fault(number: int | str) -> None:
        server.weight_version = "4"

    server.fault = fault
    with pytest.raises(UserError, match=r"prompt 0 with old weights: it comes from weight_version 3, 4, not from 4"):
        engine.generate([np.arange(3, 8)], SAMPLING, samples=4, seed=2)
    server.weight_version = "default"  # an update that said nothing
    with pytest.raises(UserError, match=r"weight_version default, not from 4|weight_version default, 4, not"):
        engine.generate([np.arange(3, 8)], SAMPLING, samples=1, seed=2)


def test_a_prompt_that_sglang_cuts_by_itself_is_an_error(running: Any) -> None:
    """`--allow-auto-truncate` among its arguments."""
    engine, _server, _ = running("sglang")
    engine.sync(Weights(), 0)
    original = engine.http.post

    def post(path: str, body: Any = None, **k: Any) -> Any:
        cut = {**body, "input_ids": [ids[:2] for ids in body["input_ids"]]}
        return original(path, cut, **k)

    engine.http.post = post
    with pytest.raises(UserError, match="it answers 2 of the prompt's 5 tokens"):
        engine.generate(PROMPTS[:1], SAMPLING, samples=1, seed=0)


@pytest.mark.parametrize("kind", ENGINES)
def test_weights_do_not_change_under_an_answer(running: Any, kind: str) -> None:
    engine, server, _ = running(kind)
    engine.sync(Weights(1), 1)
    begun, go_on = threading.Event(), threading.Event()

    def fault(number: int | str) -> None:
        begun.set()
        go_on.wait(10)

    server.fault = fault
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(engine.generate(PROMPTS[:1], SAMPLING, samples=1, seed=0)))
    thread.start()
    assert begun.wait(10)
    with pytest.raises(RuntimeError, match="wait for generate to return"):
        engine.sync(Weights(2), 2)
    go_on.set()
    thread.join(10)
    assert flat(results[0])[0][3] == 1
    engine.sync(Weights(2), 2)
    assert server.model.version == 2


# --- lost during a sync ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENGINES)
def test_a_server_lost_while_its_weights_are_checked_is_started_again(started: Any, kind: str) -> None:
    engine, events = started(kind, fault="die probe")
    engine.sync(Weights(4), 4)
    ((turn,), held) = engine.probe([np.asarray([5, 6, 7])])
    assert turn.logprobs.tolist() == pytest.approx([-1.004 - 6e-6, -1.004 - 7e-6], abs=1e-6)
    assert held is None
    assert [name for name, _ in events] == ["server_restart"]
    assert "asked again for the check of its weights (restart 1 of 3)" in events[0][1]


@pytest.mark.parametrize(
    "kind, path",
    [
        *(("vllm", path) for path in ("/v1/models", "/pause", "/collective_rpc", "/reset_prefix_cache", "/resume")),
        *(("sglang", path) for path in ("/pause_generation", "/update_weights_from_disk", "/get_model_info")),
    ],
)
def test_a_server_at_a_url_lost_anywhere_in_a_sync_is_waited_for(running: Any, kind: str, path: str) -> None:
    engine, server, events = running(kind)
    server.losses = {path: 2}  # once more after it has come back
    engine.sync(Weights(4), 4)
    assert server.model.version == 4
    assert not server.paused
    assert [name for name, _ in events] == ["server_restart"] * 2
    server.losses = {path: 2}
    engine._http = None  # connects again
    with pytest.raises(UserError, match=rf"restarted 3 times already \(rollout.{kind}.restarts\)"):
        engine.sync(Weights(5), 5)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/load_lora_adapter"])
def test_a_server_lost_while_it_is_started_with_an_adapter_is_started_again(started: Any, path: str) -> None:
    engine, events = started(fault=f"die {path}", lora="adapter")
    engine.sync(Adapted(4), 4)
    assert flat(engine.generate(PROMPTS, SAMPLING, samples=2, seed=9)) == wanted(4, 2, 9)
    assert [name for name, _ in events] == ["server_restart"]


def test_a_port_that_is_taken_is_an_error_before_anything_starts(started: Any) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"rollout.vllm.port: {port} is taken"):
            started(port=port)


@pytest.mark.skipif(sys.platform != "linux", reason="no other address of loopback")
def test_a_server_on_another_machine_listens_there_and_says_so(tmp_path: Path) -> None:
    """That machine is this one by another of its addresses."""

    class Elsewhere(Host):
        address = "127.0.0.2"

        def sees(self, folder: Path) -> bool:
            return "shared" in str(folder)

    events: list[tuple[str, str]] = []

    def engine(weights: Path) -> VLLMEngine:
        (tmp_path / "state").mkdir(exist_ok=True)
        environment = {"PYTHONPATH": PATHS, "STAND_IN": str(tmp_path / "state")}
        return VLLMEngine(
            VLLMConfig(environment=environment, start_timeout=30.0, weights_folder=str(weights)),
            ModelTraits((contract.STOP,)),
            max_sequences=8,
            folder=tmp_path,
            event=lambda kind, message: events.append((kind, message)),
            host=Elsewhere(),
        )

    with pytest.raises(UserError, match=r"weights_folder: 127.0.0.2, where the server runs, does not see .*/own; name"):
        engine(tmp_path / "own")
    there = engine(tmp_path / "shared")
    try:
        there.sync(Weights(), 0)  # type: ignore[arg-type]
        assert flat(there.generate(PROMPTS, SAMPLING, samples=2, seed=5)) == wanted(0, 2, 5)
        assert there.http.url.startswith("http://127.0.0.2:")
        port = int(there.http.url.rsplit(":", 1)[1])
        with pytest.raises(ServerLost):
            Http(f"http://127.0.0.1:{port}").get("/health", seconds=5, what="loopback")
    finally:
        there.close()
    url = f"http://127.0.0.2:{port}"
    assert events == [("server_listens", f"vLLM at {url}: open to every machine that reaches this address")]


def test_an_interpreter_without_the_server_is_an_error_before_anything_starts(started: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no vllm; install it"):
        started(environment={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(UserError, match=r"rollout.vllm.python: /no/such/python cannot be run"):
        started(python="/no/such/python")


def test_a_url_where_nothing_answers_is_an_error_before_anything_starts(running: Any) -> None:
    _engine, _server, _ = running("vllm")
    config = VLLMConfig(url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(UserError, match=r"rollout.vllm.url: no usable server"):
        VLLMEngine(config, ModelTraits((2,)), max_sequences=8, folder=Path(), event=lambda *_: None)


def test_closing_ends_the_server_and_all_it_started_and_removes_the_weights(started: Any, tmp_path: Path) -> None:
    engine, _ = started()
    engine.sync(Weights(), 0)
    pid = engine._process.pid
    engine.close()
    assert not psutil.pid_exists(pid)
    assert not list((tmp_path / "serving").iterdir())
    engine.close()  # again is harmless


def test_a_server_that_a_killed_run_left_behind_is_stopped(started: Any, tmp_path: Path) -> None:
    left, _ = started()
    left.sync(Weights(), 0)
    pid = left._process.pid
    engine, events = started()
    engine.sync(Weights(1), 1)
    assert [name for name, _ in events] == ["server_leftover"]
    assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # ours to collect: in truth its parent is dead
    assert flat(engine.generate(PROMPTS, SAMPLING, samples=1, seed=1)) == wanted(1, 1, 1)


# --- http ------------------------------------------------------------------------------------------------------------


def test_an_answer_that_drips_does_not_outlast_the_bound() -> None:
    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(50):
            time.sleep(0.05)
            try:
                connection.sendall(b"x")
            except OSError:
                return

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=drip, args=(listener,), daemon=True).start()
        begin = time.monotonic()
        with pytest.raises(ServerHangs, match=r"the test: no answer .* within 0.4 s"):
            Http(f"http://127.0.0.1:{listener.getsockname()[1]}").get("/", seconds=0.4, what="the test")
        assert time.monotonic() - begin < 1.5


def test_http_errors_say_what_was_waited_for_and_what_the_server_said(running: Any) -> None:
    _, server, _ = running("vllm")
    http = Http(server.url)
    with pytest.raises(ServerRefused, match="a thing: the server answered 404: Not Found"):
        http.get("/nothing", seconds=5, what="a thing")
    with pytest.raises(ServerLost, match=r"a thing: the connection to .* is lost \(.*refused"):
        Http(f"http://127.0.0.1:{free_port()}").get("/", seconds=5, what="a thing")


def test_hanging_up_ends_what_is_under_way_at_once() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        http = Http(f"http://127.0.0.1:{listener.getsockname()[1]}")
        threading.Timer(0.2, http.hang_up).start()
        begin = time.monotonic()
        with pytest.raises(ServerLost):
            http.get("/", seconds=30, what="a thing")
        assert time.monotonic() - begin < 5


def test_seeds_of_prompts_leave_room_for_their_samples() -> None:
    seeds = sorted(server_prompt(seed, prompt) for seed in range(40) for prompt in range(40))
    assert min(b - a for a, b in itertools.pairwise(seeds)) > 10_000
    assert seeds[-1] < 2**62


def test_the_vllm_extension_needs_nothing_of_hone() -> None:
    code = (
        "import sys, types; ops = types.ModuleType('vllm._custom_ops'); ops._supports_onednn = True\n"
        "platforms = types.ModuleType('vllm.platforms')\n"
        "platforms.current_platform = types.SimpleNamespace(is_cpu=lambda: True)\n"
        "vllm = types.ModuleType('vllm'); vllm._custom_ops = ops\n"
        "sys.modules |= {'vllm': vllm, 'vllm.platforms': platforms}\n"
        "import hone_worker\n"
        "assert not ops._supports_onednn\n"
        "sys.exit(any(m.split('.')[0] == 'hone' for m in sys.modules))"
    )
    inside = Path(__file__).resolve().parents[2] / "hone" / "rollout" / "servers" / "inside"
    done = subprocess.run([sys.executable, "-c", code], cwd=inside, capture_output=True, text=True, env={})
    assert done.returncode == 0, done.stderr


# --- episodes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_episode_continues_the_exact_tokens_of_the_server(running: Any, kind: str) -> None:
    """Tokens in, tokens out in every turn, which has random numbers of its own."""
    engine, server, _ = running(kind)
    engine.sync(Weights(4), 4)
    groups = toy.episodes().sample(toy.PROBLEMS, engine, SAMPLING, samples=2, seed=5)
    assert max(len(rollout.turns) for group in groups for rollout in group) == 3
    for p, group in enumerate(groups):
        for g, rollout in enumerate(group):
            before: list[int] | None = None
            for k, turn in enumerate(rollout.turns):
                prompt = turn.prompt_ids.tolist()
                assert before is None or prompt == before
                seed = server_prompt(5, streams.turn(p, g, k)) if k else server_prompt(5, p) + g
                ids = turn.completion_ids.tolist()
                if kind == "vllm":  # seeds have no effect in SGLang
                    assert (ids, turn.finish) == server.model.sample(prompt, seed, SAMPLING.max_tokens)[::2]
                assert turn.policy_version == 4
                np.testing.assert_allclose(turn.logprobs, server.model.score([0, *ids]), rtol=0, atol=1e-6)
                replies = [reply["content"] for reply in rollout.episode.steps[k].replies]
                before = [*prompt, *ids, *(int(word[1:]) for word in " ".join(replies).split())]
