"""Engines that do not serve the policy's weights: each stops the run, with both values, before a rollout is made."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from hone.learn.policy import Policy, Trainable
from hone.model import tiny
from hone.model.load import load_model
from hone.recipe.sections.model import LoraConfig, ModelConfig, TinyConfig
from hone.recipe.sections.optim import LayersConfig, OptimConfig
from hone.recipe.sections.rollout import IdentityConfig, RolloutConfig, SGLangConfig, VLLMConfig
from hone.rollout.engine import ModelTraits, Weights
from hone.rollout.identity import PolicyMismatch, Verified, mean_difference, policy_logprobs, probe_sequences
from hone.rollout.native.engine import NativeEngine
from hone.rollout.servers.inside.hone_worker import digest, digests
from hone.rollout.servers.server import ServerEngine
from hone.rollout.servers.sglang import SGLangEngine
from hone.rollout.servers.vllm import VLLMEngine
from tests.rollout.stand_ins import contract

TINY = TinyConfig(vocab_size=300, hidden_size=32, layers=2, heads=2, kv_heads=1, mlp_size=48)


class Served(contract.Toy):
    """A real model behind the stand-in. `faults` change what is loaded, as (tensors, version) -> None."""

    context = 512
    vocabulary = TINY.vocab_size

    def __init__(self, folder: Path, tells_digests: bool) -> None:
        self.tells_digests, self.version = tells_digests, 0
        self.fault: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None] = lambda new, old: None
        self.model = load_model(ModelConfig(path=str(folder)))
        self.held = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.adapter: dict[str, torch.Tensor] = {}

    def load(self, folder: str) -> None:
        new = load_file(Path(folder) / "model.safetensors")
        self.fault(new, self.held)
        self.model.load_state_dict(new, strict=False)
        self.held = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.adapter = {}

    def load_adapter(self, folder: str) -> None:
        """A and B beside the base, by their names, B times alpha / rank; computed with as one matrix."""
        files = load_file(Path(folder) / "adapter_model.safetensors")
        new = {name.removeprefix("base_model.model."): tensor for name, tensor in files.items()}
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        new = {n: t * (config["lora_alpha"] / config["r"]) if ".lora_B." in n else t for n, t in new.items()}
        self.fault(new, self.adapter)
        self.adapter = new
        whole = dict(self.held)
        for name in (n for n in new if ".lora_A." in n):
            place = name.replace(".lora_A.", ".")
            whole[place] = whole[place] + new[name.replace("lora_A", "lora_B")] @ new[name]
        self.model.load_state_dict(whole, strict=False)

    @torch.no_grad()
    def score(self, ids: list[int]) -> list[float]:
        plain = self.model.config._attn_implementation
        self.model.config._attn_implementation = "eager"  # another implementation than the policy's, as a server is
        logits = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        self.model.config._attn_implementation = plain
        return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def digests(self) -> dict[str, Any] | None:
        """As vLLM holds them: q, k, v and gate, up in one tensor, the vocabulary filled up to a multiple of 64."""
        if not self.tells_digests:
            return None
        stacked: dict[str, list[torch.Tensor]] = {}
        for name, tensor in self.held.items():
            whole = ".".join({p: w for w, parts in PACKED.items() for p in parts}.get(p, p) for p in name.split("."))
            stacked.setdefault(whole, []).append(tensor)
        tensors = {name: torch.cat(parts) for name, parts in stacked.items()}
        embedding = tensors["model.embed_tokens.weight"]
        rows = -len(embedding) % 64
        tensors["model.embed_tokens.weight"] = torch.cat([embedding, embedding.new_zeros(rows, embedding.shape[1])])
        room = {name: F.pad(t, (0, 3) if "lora_B" in name else (0, 0, 0, 3)) for name, t in self.adapter.items()}
        return {"tensors": digests([*tensors.items(), *room.items()]), "parts": PACKED}


PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.create(path, TINY, ["Zoey is a knight. Let me think: 1 + 2 = 3."] * 20, seed=0)
    return path


@pytest.fixture
def serve(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """(policy, verified engine, what the server holds, events); kinds: vllm, vllm without digests, sglang."""
    servers: list[contract.Server] = []

    def start(kind: str, lora: LoraConfig | None = None) -> tuple[Policy, Verified, Served, list[tuple[str, str]]]:
        policy = Policy.load(ModelConfig(path=str(folder)), OptimConfig(), 10, Trainable(lora))
        model = Served(folder, kind == "vllm")
        server = contract.Server(contract.SGLang if kind == "sglang" else contract.VLLM, model)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        events: list[tuple[str, str]] = []

        def event(kind: str, message: str) -> None:
            events.append((kind, message))

        make: Any = SGLangEngine if kind == "sglang" else VLLMEngine
        config: Any = SGLangConfig if kind == "sglang" else VLLMConfig
        engine: ServerEngine = make(
            config(url=server.url, **({"lora": "adapter"} if lora else {})),
            ModelTraits.of(policy),
            max_sequences=8,
            folder=tmp_path,
            event=event,
        )
        return policy, Verified(engine, policy.tokenizer, IdentityConfig(), "float32", event), model, events

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@torch.no_grad()
def step(policy: Policy, size: float = 1e-4) -> None:
    """As an optimizer does: every weight moves by about its learning rate."""
    for p in policy.parameters:
        p.add_(size * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))


KINDS = ("vllm", "vllm without digests", "sglang")


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_serves_the_policy_passes_however_often_it_is_updated(serve: Any, kind: str) -> None:
    policy, engine, _, events = serve(kind)
    gaps = []
    for version in range(6):
        gaps.append(engine.sync(policy, version)["identity/gap"])
        step(policy, [1e-6, 0.0, 1e-2, 1e-4, 1e-1][version % 5])
    assert max(gaps) < 1e-5
    assert [name for name, _ in events] == ([] if kind == "vllm" else ["identity"])  # said once: no digests


@pytest.mark.parametrize("size", [1e-4, 1e-2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sync_that_drops_one_tensor_stops_the_run(serve: Any, kind: str, size: float) -> None:
    policy, engine, served, events = serve(kind)
    engine.sync(policy, 0)
    step(policy, size)
    dropped = "model.layers.1.mlp.down_proj.weight"
    served.fault = lambda new, old: new.__setitem__(dropped, old[dropped])
    with pytest.raises(PolicyMismatch) as error:
        engine.sync(policy, 1)
    if kind == "vllm":
        assert f"1 of {len(dict(digest_names(served)))} tensors" in str(error.value)
        assert f"the first {dropped}: digest {digest(served.held[dropped])}, the policy's" in str(error.value)
    else:
        assert "the engine's -" in str(error.value)
        assert "the policy's -" in str(error.value)
    assert events[-1][0] == "policy_mismatch"


def digest_names(served: Served) -> dict[str, Any]:
    found = served.digests()
    assert found is not None
    return found["tensors"]


@pytest.mark.parametrize("size", [1e-5, 1e-2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sync_that_comes_a_version_late_stops_the_run(serve: Any, kind: str, size: float) -> None:
    policy, engine, served, _ = serve(kind)
    engine.sync(policy, 0)
    step(policy, size)
    late = served.held
    served.fault = lambda new, old: new.update(late)
    with pytest.raises(PolicyMismatch, match="answers like version 0" if kind != "vllm" else "16 of 16 tensors"):
        engine.sync(policy, 1)


def test_weights_that_never_arrive_after_a_resume_stop_the_run(serve: Any, folder: Path) -> None:
    """The first sync of a process has nothing to compare with but the policy: the server has the original weights."""
    policy, engine, served, _ = serve("vllm without digests")
    step(policy, 1e-2)
    original = served.held
    served.fault = lambda new, old: new.update(original)
    with pytest.raises(PolicyMismatch, match=r"more than 0.001 \(rollout.identity.tolerance\)"):
        engine.sync(policy, 40)


def test_a_restart_is_checked_before_its_answers_count(serve: Any) -> None:
    policy, engine, served, _ = serve("vllm without digests")
    engine.sync(policy, 0)
    old = served.held
    step(policy)
    engine.sync(policy, 1)
    engine._engine.on_restart()
    served.model.load_state_dict(old, strict=False)  # what a server that came back by itself would have
    with pytest.raises(PolicyMismatch, match="like version 0"):
        engine._engine.on_restart()


def test_a_sharded_or_quantised_engine_is_compared_by_log_probs_alone(serve: Any) -> None:
    policy, engine, _served, events = serve("vllm")
    engine._engine.weights = lambda: Weights({"other.name": 1}, {"other.name": "float32"})
    assert engine.sync(policy, 0)["identity/tensors"] == 0
    assert "26 of the policy's tensors are not compared" in events[0][1]


@pytest.mark.parametrize("wrong", ["zeroed", "negated", "of another layer"])
def test_a_corrupted_adapter_matrix_stops_the_run(serve: Any, wrong: str) -> None:
    """The policy has an adapter; what is handed over has it merged, from one matrix that is not the policy's."""
    peft = pytest.importorskip("peft")
    policy, engine, _served, events = serve("vllm without digests")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    peft.inject_adapter_in_model(config, policy.model)
    with torch.no_grad():
        for i, (_, p) in enumerate(adapter(policy)):
            p.copy_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    policy.export = lambda folder: merge_into(policy, folder, {})
    assert engine.sync(policy, 0)["identity/gap"] < 1e-5
    with torch.no_grad():
        for _, p in adapter(policy):
            p.mul_(1.01)
    matrices = dict(adapter(policy))
    name, other = (f"model.layers.{i}.mlp.down_proj.lora_B.default.weight" for i in (0, 1))
    corrupted = {
        "zeroed": torch.zeros_like(matrices[name]),
        "negated": -matrices[name],
        "of another layer": matrices[other],
    }[wrong]
    policy.export = lambda folder: merge_into(policy, folder, {name: corrupted})
    with pytest.raises(PolicyMismatch):
        engine.sync(policy, 1)
    assert events[-1][0] == "policy_mismatch"


LORA = LoraConfig(rank=4, alpha=5.0, targets=("q_proj", "down_proj"))


@pytest.mark.parametrize("kind", ["vllm", "vllm without digests"])
def test_an_adapter_that_is_served_beside_its_base_passes_through_updates_and_a_hard_reset(
    serve: Any, kind: str
) -> None:
    pytest.importorskip("peft")
    policy, engine, _, events = serve(kind, LORA)
    matrices = [8, 8, 8, 4]  # A and B of two layers in each block, later of one
    for version, count in enumerate(matrices):
        if version == 3:
            policy.merge_and_reset(3, OptimConfig(), LayersConfig(), LoraConfig(rank=2, targets=("o_proj",)), {})
        synced = engine.sync(policy, version)
        assert synced["identity/gap"] < 1e-5
        assert synced["identity/tensors"] == (16 + count if kind == "vllm" else 0)
        step(policy, 0.05)
    assert [name for name, _ in events] == ([] if kind == "vllm" else ["identity"])


@pytest.mark.parametrize("kind", ["vllm", "vllm without digests"])
@pytest.mark.parametrize("wrong", ["zeroed", "negated", "of another layer", "the one before", "a stranger"])
def test_a_corrupted_matrix_of_a_served_adapter_stops_the_run(serve: Any, kind: str, wrong: str) -> None:
    pytest.importorskip("peft")
    policy, engine, served, events = serve(kind, LORA)
    for i, p in enumerate(policy.parameters):
        p.data.copy_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    assert engine.sync(policy, 0)["identity/gap"] < 1e-5
    step(policy, 0.01)
    name, other = (f"model.layers.{i}.mlp.down_proj.lora_B.weight" for i in (0, 1))

    def fault(new: dict[str, torch.Tensor], old: dict[str, torch.Tensor]) -> None:
        if wrong == "a stranger":  # left behind in a layer that the adapter does not have
            new["model.layers.0.mlp.up_proj.lora_A.weight"] = torch.full((4, 32), 0.1)
            new["model.layers.0.mlp.up_proj.lora_B.weight"] = torch.full((48, 4), 0.1)
            return
        wrongs = {"zeroed": 0 * new[name], "negated": -new[name], "of another layer": new[other]}
        new[name] = {**wrongs, "the one before": old[name]}[wrong]

    served.fault = fault
    seen = {"vllm": "2 of 26 tensors" if wrong == "a stranger" else f"1 of 24 tensors .*{name}"}
    with pytest.raises(PolicyMismatch, match=seen.get(kind)):
        engine.sync(policy, 1)
    assert events[-1][0] == "policy_mismatch"


def test_one_bit_of_a_served_adapter_is_seen(serve: Any) -> None:
    pytest.importorskip("peft")
    policy, engine, served, _ = serve("vllm", LORA)
    step(policy, 0.1)
    name = "model.layers.1.self_attn.q_proj.lora_A.weight"
    engine.sync(policy, 0)
    served.fault = lambda new, old: new[name].view(-1)[7].mul_(1 + 2**-23)
    with pytest.raises(PolicyMismatch, match=name):
        engine.sync(policy, 1)


def adapter(policy: Policy) -> list[tuple[str, torch.Tensor]]:
    return [(name, p) for name, p in policy.model.named_parameters() if "lora_" in name]


def merge_into(policy: Policy, folder: Path, instead: dict[str, torch.Tensor]) -> None:
    """W + 2 B A, of which `instead` replaces some."""
    state = {**policy.model.state_dict(), **instead}
    plain = {k.replace(".base_layer.", "."): v.clone() for k, v in state.items() if "lora_" not in k}
    for name in [k for k in state if ".lora_A." in k]:
        target = name.replace(".lora_A.default", "")
        plain[target] += 2.0 * state[name.replace("lora_A", "lora_B")] @ state[name]
    plain.pop("lm_head.weight", None)  # tied
    save_file(plain, folder / "model.safetensors")


# --- the engine in the same process ----------------------------------------------------------------------------------


def test_the_native_engine_is_checked_by_sampling_from_it(folder: Path) -> None:
    policy = Policy.load(ModelConfig(path=str(folder)), OptimConfig(), 10)
    engine = Verified(
        NativeEngine(policy.model, policy.stop_ids, RolloutConfig()),
        policy.tokenizer,
        IdentityConfig(),
        "float32",
        lambda *_: None,
    )
    assert engine.sync(policy, 0)["identity/gap"] < 1e-5
    assert engine.sync(policy, 1) == {}  # every fifth version
    assert engine.sync(policy, 5)["identity/gap"] < 1e-5

    class Copy(NativeEngine):
        """Keeps a copy of the weights, as one that rounds or packs them does, and forgets to renew it."""

        def sync(self, policy: Policy, version: int) -> None:
            self._version = version

    other = Policy.load(ModelConfig(path=str(folder)), OptimConfig(), 10)
    stale = Verified(
        Copy(other.model, policy.stop_ids, RolloutConfig()),
        policy.tokenizer,
        IdentityConfig(),
        "float32",
        lambda *_: None,
    )
    assert stale.sync(policy, 0)["identity/gap"] < 1e-5
    step(policy, 1e-2)
    assert stale.sync(policy, 4) == {}
    with pytest.raises(PolicyMismatch, match="does not answer as the policy does"):
        stale.sync(policy, 5)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, targets="all")])
@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_an_engine_with_rounded_weights_is_compared_with_the_policy_rounded(
    folder: Path, weights: Any, lora: LoraConfig | None
) -> None:
    policy = Policy.load(ModelConfig(path=str(folder)), OptimConfig(), 10, Trainable(lora))
    step(policy, 1e-3)  # B is 0 at first
    config = RolloutConfig(weights=weights)

    def verified(engine: NativeEngine) -> Verified:
        return Verified(engine, policy.tokenizer, IdentityConfig(), "float32", lambda *_: None)

    engine = verified(NativeEngine(policy.model, policy.stop_ids, config))
    assert engine.sync(policy, 0)["identity/gap"] < 0.005

    class Stale(NativeEngine):
        """Rounds once, and goes on with that."""

        def sync(self, policy: Policy, version: int) -> None:
            self._model = getattr(self, "_kept", None) or copy.deepcopy(policy.model)
            self._kept = self._model

    stale = verified(Stale(policy.model, policy.stop_ids, config))
    assert stale.sync(policy, 0)["identity/gap"] < 0.005
    step(policy, 1e-2)
    assert engine.sync(policy, 5)["identity/gap"] < 0.005
    with pytest.raises(PolicyMismatch, match="does not answer as the policy does"):
        stale.sync(policy, 5)


def test_a_resumed_run_checks_at_once_and_has_the_same_metrics(folder: Path) -> None:
    policy = Policy.load(ModelConfig(path=str(folder)), OptimConfig(), 10)
    engine = Verified(
        NativeEngine(policy.model, policy.stop_ids, RolloutConfig()),
        policy.tokenizer,
        IdentityConfig(tolerance=1e-12),
        "float32",
        lambda *_: None,
    )
    with pytest.raises(PolicyMismatch):  # it did look: nothing agrees that closely
        engine.sync(policy, 3)


# --- digests ---------------------------------------------------------------------------------------------------------


def test_a_digest_by_hand() -> None:
    ones = torch.tensor([[1.0, 2.0], [0.0, 1.0]])  # bits 0x3f800000, 0x40000000
    assert digest(ones) == 0x3F800000 * 1 + (0x40000000 + 0x3F800000) * 3
    assert digest(torch.tensor([1.0, 2.0])) == 0x3F800000 + 0x40000000
    assert digest(torch.tensor([[-1.0]], dtype=torch.bfloat16)) == (0xBF80 - 2**16) % 2**64


def test_digests_add_up_over_stacked_tensors_and_see_every_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(7, 5, generator=generator), torch.randn(3, 5, generator=generator)
    assert digest(torch.cat([a, b])) == (digest(a) + digest(b)) % 2**64
    assert digest(torch.cat([a, torch.zeros(4, 5)])) == digest(a)
    assert digest(a[0]) == (digest(a[0, :2]) + digest(a[0, 2:])) % 2**64  # biases of q, k and v
    changed = a.clone()
    changed[3, 2] = torch.nextafter(changed[3, 2], torch.tensor(9.0))
    assert digest(changed) != digest(a)
    assert digest(a[:, [1, 0, 2, 3, 4]]) != digest(a)


def test_log_probs_of_the_probe_are_those_of_transformers(folder: Path) -> None:
    policy = Policy.load(ModelConfig(path=str(folder)), OptimConfig(), 10)
    sequences = probe_sequences(policy.tokenizer)
    assert all(len(s) > 10 for s in sequences)
    served = Served(folder, tells_digests=False)
    engine = type(
        "E", (), {"_score": lambda self, ids: served.score(ids), "_version": 0, "score": ServerEngine.score}
    )()
    turns = engine.score(sequences)
    expected = np.concatenate([turn.logprobs for turn in turns])
    assert mean_difference(policy_logprobs(policy, turns[::-1]), expected) > 0.1  # in the order of the turns
    np.testing.assert_allclose(policy_logprobs(policy, turns), expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_lost_during_the_check_is_waited_for_and_checked_whole(serve: Any, kind: str) -> None:
    policy, engine, served, events = serve(kind)
    engine.sync(policy, 0)
    step(policy)
    right, calls = served.score, []

    def lost(ids: list[int]) -> list[float]:
        calls.append(ids)
        if len(calls) == 2:  # the first sequence was answered
            raise ConnectionAbortedError
        return right(ids)

    served.score = lost
    metrics = engine.sync(policy, 1)
    assert metrics["identity/gap"] < 1e-5
    assert len(calls) == 4  # both sequences again, of one life of the server
    assert [name for name, _ in events if name != "identity"] == ["server_restart"]


def test_a_server_that_comes_back_with_other_weights_during_the_check_stops_the_run(serve: Any) -> None:
    policy, engine, served, events = serve("sglang")
    engine.sync(policy, 0)
    step(policy, 1e-2)
    right, calls = served.score, []

    def lost(ids: list[int]) -> list[float]:
        calls.append(ids)
        if len(calls) == 2:
            served.fault = keep_old  # what it loads after it has come back has no effect
            raise ConnectionAbortedError
        return right(ids)

    def keep_old(new: dict[str, torch.Tensor], old: dict[str, torch.Tensor]) -> None:
        for name in new:
            new[name] = old[name] + 1e-2

    served.score = lost
    with pytest.raises(PolicyMismatch):
        engine.sync(policy, 1)
    assert [name for name, _ in events if name != "identity"] == ["server_restart", "policy_mismatch"]
