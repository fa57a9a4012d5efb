"""Several processes compute what one does: gloo on this machine, a model of a few thousand weights."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from hone.base import jsonl
from hone.base.parallel import ParallelConfig
from hone.base.settings import UserError
from hone.base.world import ALONE, ProcessLost, World, _store
from hone.learn import checkpoint
from hone.learn.pack import Packer, deal, empty_batch
from hone.learn.samples import to_samples
from hone.learn.state import State
from hone.model.load import load_model
from hone.model.parallel import check_tensor
from hone.model.tiny import create
from hone.recipe.sections.model import ModelConfig, TinyConfig
from tests.learn.policies import REWARDS, make_groups
from tests.tiny_families import make
from tests.world_worker import five_steps

ROOT = Path(__file__).resolve().parents[1]
MODEL = TinyConfig(vocab_size=300, hidden_size=32, layers=2, heads=4, kv_heads=4, mlp_size=48)
TOLERANCE = 1e-5


WAITING = """
import sys
from hone.base import terminal
from hone.base.parallel import ParallelConfig
from hone.base.world import World
terminal.stop_at_once_on_sigterm()
print("begins", flush=True)
World.from_env(ParallelConfig(replicate=2))
"""


def test_a_process_that_waits_for_the_others_stops_when_it_is_told_to() -> None:
    """As where the first one stopped before it listened: the other waited half an hour for it, in C++."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    environment = {**os.environ, **places, "PYTHONPATH": str(ROOT), "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", WAITING]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        time.sleep(1.0)
        process.terminate()
        try:
            assert process.wait(timeout=20) == 75
        finally:
            process.kill()


def spawn(size: int, *arguments: str, module: str = "tests.world_worker") -> list[subprocess.Popen[str]]:
    """`size` processes that find each other as under torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        for rank in range(size)
    ]


def wait(processes: list[subprocess.Popen[str]], timeout: float) -> None:
    try:
        outputs = [p.communicate(timeout=timeout)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert not any(p.returncode for p in processes), "\n".join(outputs)


def together(size: int, cases: list[dict[str, Any]], folder: Path, timeout: float = 300) -> list[dict[str, Any]]:
    """What `size` processes find for each case."""
    (folder / "cases.json").write_text(json.dumps(cases))
    wait(spawn(size, str(folder / "cases.json"), str(folder)), timeout)
    return [torch.load(folder / f"{i}.pt") for i in range(len(cases))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Qwen2 with shared embeddings and biases; Qwen3 with a head of its own and norms of queries and keys."""
    folder = tmp_path_factory.mktemp("models")
    create(folder / "qwen2", MODEL, ["Zoey is a knight."] * 3, seed=0)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=304, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, tie_word_embeddings=False, initializer_range=0.08,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder / "qwen3")
    AutoTokenizer.from_pretrained(folder / "qwen2").save_pretrained(folder / "qwen3")
    return {name: str(folder / name) for name in ("qwen2", "qwen3")}


def check_same(found: dict[str, Any], expected: dict[str, Any], label: str, tolerance: float = TOLERANCE) -> None:
    for name in ("loss", "grad_norm", "entropy", "kl"):
        assert found[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance), f"{label}: {name}"
    for name in ("logprobs", "grad_norms"):
        for a, b in zip(itertools.chain(*found[name]), itertools.chain(*expected[name]), strict=True):
            torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, msg=f"{label}: {name}")
    assert found["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, atol=tolerance, rtol=0, msg=f"{label}: {name}")


def run(cases: list[dict[str, Any]], folder: Path) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """(case, what its processes find, what one process finds); all cases have as many processes."""
    sizes = {ParallelConfig(**case["parallel"]).processes for case in cases}
    (size,) = sizes
    found = together(size, cases, folder)
    alone: dict[str, dict[str, Any]] = {}
    result = []
    for case, several in zip(cases, found, strict=True):
        one = {key: value for key, value in case.items() if key not in ("parallel", "mean", "skips")}
        key = json.dumps(one, sort_keys=True)
        if key not in alone:
            alone[key] = five_steps(one)
        result.append((case, several, alone[key]))
    return result


GAE = {"advantage": "gae"}
#: Where a process may leave out weights that another one uses: in FSDP2 as of torch 2.13.
DATA = ("replicate", "shard") if hasattr(FSDPModule, "set_reduce_scatter_unused_params") else ("replicate",)


def test_two_processes_are_one(models: dict[str, str], tmp_path: Path) -> None:
    """Replicas, shards and tensor parts, an adapter; a process without a sample; and that a mean would show."""
    base = {"model": models["qwen2"], "rewards": REWARDS}
    cases = [
        {**base, "parallel": {"replicate": 2}},
        {**base, "parallel": {"shard": 2}},
        {**base, "parallel": {"tensor": 2}},
        {**base, "parallel": {"tensor": 2}, "lora": "all"},
        {**base, "parallel": {"shard": 2}, "rewards": [[1.0]], "algo": GAE},
        # The other process has no sample; that its pass uses less of the model changes nothing.
        *({**base, "parallel": {kind: 2}, "rewards": [[1.0]], "algo": GAE, "skips": True} for kind in DATA),
        {**base, "parallel": {"shard": 2}, "mean": True},
    ]
    for case, found, expected in run(cases, tmp_path):
        if case.get("mean"):
            assert found["grad_norm"][0] == pytest.approx(expected["grad_norm"][0] / 2, rel=1e-5)
        else:
            check_same(found, expected, str(case["parallel"]))


LAYOUTS = {
    2: ({"replicate": 2}, {"shard": 2}, {"tensor": 2}),
    4: (
        *({"replicate": 4}, {"shard": 4}, {"tensor": 4}),
        *({"shard": 2, "tensor": 2}, {"replicate": 2, "shard": 2}, {"replicate": 2, "tensor": 2}),
    ),
    8: ({"replicate": 2, "shard": 2, "tensor": 2},),
}
KINDS = (
    {"model": "qwen2"},
    {"model": "qwen3", "lora": "all"},
    {"model": "qwen3"},
    {"model": "qwen2", "lora": "all", "reset": 2},
    {"model": "qwen2", "reset": 2},
    {"model": "qwen2", "settings": {"recompute_activations": True}},
    {"model": "qwen2", "algo": {"advantage": "gae", "updates_per_rollout": 2}},
    {"model": "qwen3", "algo": {"loss": "gspo", "updates_per_rollout": 2, "clip_low": 3e-4, "clip_high": 4e-4}},
    {"model": "qwen2", "rewards": [[1.0, 0.0]], "budget": 4096},
)


@pytest.mark.slow
@pytest.mark.parametrize("size", LAYOUTS)
def test_every_layout_is_one_process(models: dict[str, str], tmp_path: Path, size: int) -> None:
    kinds = KINDS[:2] if size == 8 else KINDS
    cases = [
        {"rewards": REWARDS, **kind, "model": models[kind["model"]], "parallel": layout}  # type: ignore[index]
        for layout in LAYOUTS[size]
        for kind in kinds
    ]
    if size == 2:
        compiled = {"settings": {"compile": True}, "parallel": {"shard": 2}}
        cases.append({"rewards": REWARDS, "model": models["qwen2"], **compiled})
    for case, found, expected in run(cases, tmp_path):
        check_same(found, expected, json.dumps(case))


@pytest.mark.slow
def test_two_processes_are_one_with_windows_sinks_and_caps(models: dict[str, str], tmp_path: Path) -> None:
    layouts = {"gemma3": ({"shard": 2}, {"tensor": 2}), "gemma2": ({"replicate": 2},), "gpt-oss": ({"shard": 2},)}
    cases = []
    for name, parallels in layouts.items():
        make(name, tmp_path / name)
        AutoTokenizer.from_pretrained(models["qwen2"]).save_pretrained(tmp_path / name)
        cases += [{"model": str(tmp_path / name), "rewards": REWARDS, "parallel": layout} for layout in parallels]
    for case, found, expected in run(cases, tmp_path):
        check_same(found, expected, json.dumps(case))


@pytest.mark.slow
def test_two_processes_with_recurrent_layers_are_one(models: dict[str, str], tmp_path: Path) -> None:
    cases = []
    for name in ("qwen3.5", "lfm2", "granite4-h"):
        make(name, tmp_path / name)
        weights = load_file(tmp_path / name / "model.safetensors")  # smaller, since five steps multiply rounding
        calm = {key: value * 0.3 if value.ndim == 2 else value for key, value in weights.items()}
        save_file(calm, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        AutoTokenizer.from_pretrained(models["qwen2"]).save_pretrained(tmp_path / name)
        base = {"model": str(tmp_path / name), "rewards": REWARDS}
        cases += [{**base, "parallel": {kind: 2}} for kind in ("replicate", "shard")]
        cases.append({**base, "parallel": {"shard": 2}, "lora": "all", "reset": 2})
        cases.append({**base, "parallel": {"shard": 2}, "settings": {"recompute_activations": True}})
    for case, found, expected in run(cases, tmp_path):
        check_same(found, expected, json.dumps(case), tolerance=1e-4)


# --- a whole run ------------------------------------------------------------------------------------------------------

RECIPE = """
name: small
model: {path: tiny, tiny: {vocab_size: 400, hidden_size: 32, layers: 2, heads: 2, kv_heads: 2, mlp_size: 64}}
task: {name: knights, people: [2], quiz: brief, names: 4, train: 60, validation: 10, test: 20, repeats: true}
prompt: {style: raw, system: "", template: "{user}\\n"}
checkpoint: {every: 2, keep: 2}
tokens_per_microbatch: 2048
stages:
  - name: warmup
    stage: sft
    sft: {examples: 48, examples_per_step: 8, styles: {hasty: 0.9, careful: 0.1}}
    optim: {lr: 5.0e-3, decay: cosine}
  - name: rl
    stage: rl
    steps: 3
    prompts_per_step: 4
    samples_per_prompt: 4
    sampling: {max_tokens: 48}
    optim: {lr: 1.0e-3}
    lora: {rank: 4}
    reset: {at: [2]}
    algo: {kl: {coef: 0.01}}
    reward: {parts: {outcome: 1.0, overlong: 1.0}, overlong: {buffer: 40, max_tokens: 48}}
    eval: {problems: 20, every: 2, sampling: {max_tokens: 48}}
"""


def train(recipe: Path, size: int, *arguments: str) -> Path:
    wait(spawn(size, "train", str(recipe), *arguments, module="hone"), 600)
    return Path(next(a for a in arguments if a.startswith("runs=")).removeprefix("runs=")) / "small"


def numbers(run: Path) -> list[float]:
    rows = [row for stage in ("warmup", "rl") for row in jsonl.read(run / stage / "metrics.jsonl")]
    return [value for row in rows for value in row.values() if isinstance(value, (int, float))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"warmup": "replicate", "rl": "replicate"},
        {"warmup": "shard", "rl": "tensor"},
        {"warmup": "tensor", "rl": "shard"},
    ],
    ids=str,
)
def test_a_whole_run_is_that_of_one_process(tmp_path: Path, layout: dict[str, str]) -> None:
    """Supervised, then RL with sampled answers, evaluations and a hard reset; cut before its last step and resumed."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    one = train(recipe, 1, f"runs={tmp_path}/one")
    settings = [f"stages.{stage}.parallel.{dim}=2" for stage, dim in layout.items()]
    two = train(recipe, 2, f"runs={tmp_path}/two", *settings)
    assert numbers(two) == pytest.approx(numbers(one), rel=1e-4, abs=1e-4)
    for name in ("rl/rollouts/step_000002.jsonl", "rl/evals/after.jsonl"):
        texts = [[row["text"] for row in jsonl.read(run / name)] for run in (one, two)]
        assert texts[0] == texts[1]
    for folder in ("rl/model", "rl/resets/reset_001"):
        found, expected = (load_file(run / folder / "model.safetensors") for run in (two, one))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-4, rtol=0, msg=name)
    before = (two / "rl/model/model.safetensors").read_bytes()
    (two / "results.json").unlink()
    shutil.rmtree(two / "rl/model")
    newest = max((two / "rl/checkpoints").glob("step_*"))
    assert newest.name == "step_000002"  # before the last step
    train(recipe, 2, f"runs={tmp_path}/two", *settings, "--resume")
    assert (two / "rl/model/model.safetensors").read_bytes() == before, "the continuation is another run"


# --- parts ------------------------------------------------------------------------------------------------------------


def test_shares_are_neighbours_and_all_there_is() -> None:
    shares = [World(rank, 3).share(range(7)) for rank in range(3)]
    assert shares == [[0, 1], [2, 3], [4, 5, 6]]
    assert [World(rank, 4).share("ab") for rank in range(4)] == [[], ["a"], [], ["b"]]


def test_processes_and_parallel_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match=r"replicate 1 x shard 2 x tensor 1 is 2 processes, and WORLD_SIZE says 4"):
        World.from_env(ParallelConfig(shard=2))
    monkeypatch.delenv("WORLD_SIZE")
    assert World.from_env(ParallelConfig()) == ALONE


def test_on_one_machine_only_it_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    def listening() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections()
        return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    before, wait = listening(), datetime.timedelta(seconds=20)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store = _store(0, 1, wait)
    assert store is not None
    assert listening() - before == {("127.0.0.1", port)}
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert _store(0, 1, wait) is None


def test_under_torchrun_each_attempt_has_a_prefix_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's store outlives the workers of an attempt, with all that they have written."""
    wait = datetime.timedelta(seconds=20)
    agents = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agents.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agents.add("hone/questions", 1)  # of a process that was killed before it had an answer
    for attempt in range(3):
        with ThreadPoolExecutor(3) as pool:
            stores = list(pool.map(lambda rank: _store(rank, 3, wait), range(3)))
        assert [store.check(["address"]) for store in stores] == [False] * 3
        stores[attempt].set("address", str(attempt))
        assert [store.get("address").decode() for store in stores] == [str(attempt)] * 3
    with pytest.raises(RuntimeError, match=r"1 of 3 processes arrived within 0.3 s"):
        _store(0, 3, datetime.timedelta(seconds=0.3))


def test_a_process_lost_while_a_checkpoint_is_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(torch.distributed, "all_gather_object", closed)
    two = World(0, 2, writing=object())  # type: ignore[arg-type]
    with pytest.raises(ProcessLost, match=r"process 0 of 2 waited for the others \(a checkpoint\): Connection closed"):
        checkpoint.write(tmp_path, checkpoint.Snapshot(1, State({}, {}, {}), None, 1), two)


def test_a_model_that_cannot_be_cut_says_so(models: dict[str, str]) -> None:
    model = load_model(ModelConfig(path=models["qwen3"]))  # 8 heads, 4 for keys and values, 304 tokens, 48 units
    check_tensor(model, 4)
    with pytest.raises(UserError, match=r"8 processes cannot share the 4 key/value heads .* evenly; give 1 or 2 or 4$"):
        check_tensor(model, 8)
    model.config.base_model_tp_plan = {"layers.*.self_attn.q_proj": "packed_colwise"}
    with pytest.raises(UserError, match=r"in ways that are not supported \(packed_colwise; supported are colwise, "):
        check_tensor(model, 2)
    model.config.base_model_tp_plan = None
    with pytest.raises(UserError, match=r"no tensor-parallel plan for Qwen3ForCausalLM; set parallel.tensor to 1"):
        check_tensor(model, 2)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("budget", [40, 4096])
def test_micro_batches_are_dealt_out_evenly(parts: int, budget: int) -> None:
    """As many to each process, every sample once, about as many tokens."""
    samples = [s for group in make_groups(REWARDS) for s in to_samples(group)]
    batches = Packer(budget, parts=parts)(samples, [1.0] * len(samples))
    assert sorted(i for b in batches for i in b.sample_ids) == list(range(len(samples)))
    hands = deal(batches, parts)
    assert len({len(hand) for hand in hands}) == 1
    assert sorted(i for hand in hands for i in hand if i is not None) == list(range(len(batches)))
    sizes = [[0 if i is None else len(batches[i].inputs) for i in hand] for hand in hands]
    for at_once, after in itertools.pairwise(zip(*sizes, strict=True)):
        assert min(at_once) >= max(after), "those of about one size belong together"
    if budget > 40:
        assert max(map(sum, sizes)) < 2 * sum(map(sum, sizes)) / parts  # of a handful of samples, prompts shared


def test_an_empty_micro_batch_asks_nothing() -> None:
    samples = [s for group in make_groups([[1.0, 0.0]]) for s in to_samples(group)]
    full = Packer(4096)(samples, [1.0, 1.0], old_logprobs=[s.logprobs[s.trained] for s in samples])[0]
    empty = empty_batch(full)
    assert len(empty.inputs) == 1
    assert len(empty.targets) == len(empty.weights) == 0
    assert empty.old_logprobs is not None
    assert empty.ref_logprobs is None
    assert empty.sample_ids == ()
