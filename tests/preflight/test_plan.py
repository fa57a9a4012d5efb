"""The planner: shapes, what is traced, the parts, the sizes it proposes, and that the rehearsal changes nothing."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import huggingface_hub.constants
import pytest
import torch
from transformers import AutoConfig

from hone.base.parallel import ParallelConfig
from hone.base.settings import UserError
from hone.learn.forward import fast_layers, to_device
from hone.model.load import load_model
from hone.preflight.plan import batch as batches
from hone.preflight.plan import estimate, kernels, rehearse
from hone.preflight.plan.calibrate import _seconds
from hone.preflight.plan.cost import Shape, Speeds, Work, generate_seconds, sent_bytes, train_flops
from hone.preflight.plan.lengths import lengths_of
from hone.preflight.plan.memory import GIB, Lengths, Plan, batch_of, stage_plan
from hone.preflight.plan.rehearse import explained, remedy
from hone.preflight.plan.shapes import config_of, meta_model, published, share_of
from hone.preflight.plan.show import cli_plan
from hone.preflight.plan.size import advise
from hone.preflight.plan.trace import Alive, forward_backward, trace
from hone.recipe.load import load
from hone.recipe.recipe import Recipe
from hone.recipe.sections.model import LoraConfig, ModelConfig, TinyConfig
from hone.stages import loop as rl
from hone.stages import pipeline
from hone.tasks.knights.task import KnightsConfig
from hone.types import Problem
from tests.tiny_families import make

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = Lengths(40, 60)


def recipe(**more: Any) -> Recipe:
    return Recipe(name="x", task=KnightsConfig(name="knights"), **more)


@pytest.mark.parametrize(
    "name, parameters",  # of the model cards, to the last weight
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-Math-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-7B-Instruct-1M", 7_615_616_512),
        ("Qwen/Qwen3-0.6B-Base", 596_049_920),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("meta-llama/Meta-Llama-3-8B", 8_030_261_248),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1_777_088_000),
    ],
)
def test_published_shapes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    config = published(name)
    assert config is not None
    assert sum(p.numel() for p in meta_model(config, "bfloat16").parameters()) == parameters


def test_a_model_of_which_nothing_is_known_is_an_error_that_says_what_to_give() -> None:
    with pytest.raises(UserError, match=r"nobody/nothing.*folder with a checkpoint"):
        config_of(ModelConfig(path="nobody/nothing"))


def test_storages_are_counted_while_they_live() -> None:
    with Alive() as alive:
        a = torch.empty(100, device="meta")
        b = a + 1
        c = b.view(10, 10)  # no storage of its own
        assert alive.now == 800
        del a, b
        assert alive.now == 400
        del c
    assert (alive.now, alive.peak) == (0, 800)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_traced_without_memory_is_what_a_real_step_keeps(
    recompute: bool, lora: LoraConfig | None, tmp_path: Path
) -> None:
    from hone.model import lora as adapters

    config, _ = config_of(ModelConfig(tiny=TinyConfig(hidden_size=64, layers=2, mlp_size=96)))
    shaped = meta_model(config, "float32", recompute)
    meta_model(config, "float32").to_empty(device="cpu").save_pretrained(tmp_path)
    real = load_model(ModelConfig(path=str(tmp_path), recompute_activations=recompute)).train()
    if lora is not None:
        for model in (shaped, real):
            adapters.attach(model, lora, 0)
            model.enable_input_require_grads()
    batch = batches.longest(batch_of(recipe(tokens_per_microbatch=512)), 40, 60)
    predicted = trace(shaped, to_device(batch, torch.device("meta")))
    assert predicted == pytest.approx(trace(real, batch), rel=0.03)
    assert all(p.grad is None for p in real.parameters())


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_norms_are_traced_as_the_update_on_a_cpu_computes_them(kind: Any, tmp_path: Path) -> None:
    tiny = TinyConfig(architecture=kind, hidden_size=64, layers=4, mlp_size=96)
    config, _ = config_of(ModelConfig(tiny=tiny))
    shaped = meta_model(config, "float32")
    meta_model(config, "float32").to_empty(device="cpu").save_pretrained(tmp_path)
    real = load_model(ModelConfig(path=str(tmp_path))).train()
    batch = batches.longest(batch_of(recipe(tokens_per_microbatch=512)), 40, 60)
    for p in real.parameters():
        p.grad = torch.zeros_like(p)
    with Alive() as alive, fast_layers(real):
        forward_backward(real, batch, entropy=False)
    meta = to_device(batch, torch.device("meta"))
    assert trace(shaped, meta, device="cpu") == pytest.approx(alive.peak, rel=0.05)
    assert trace(shaped, meta, device="cuda") > 1.1 * alive.peak  # with the norms of the model's own code


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_traced_in_both_precisions(dtype: Literal["float32", "bfloat16"], tmp_path: Path) -> None:
    make("qwen3-moe", tmp_path)
    shaped = meta_model(AutoConfig.from_pretrained(tmp_path), dtype)
    real = load_model(ModelConfig(path=str(tmp_path), dtype=dtype))
    batch = batches.longest(batch_of(recipe(tokens_per_microbatch=512)), 40, 60)
    predicted = trace(shaped, to_device(batch, torch.device("meta")))
    assert predicted == pytest.approx(trace(real, batch), rel=0.03)


def test_with_a_large_vocabulary_a_cpu_is_traced_with_the_chunks_of_a_cpu(tmp_path: Path) -> None:
    config, _ = config_of(ModelConfig(tiny=TinyConfig(hidden_size=8, layers=1, heads=1, kv_heads=1, mlp_size=8)))
    config.vocab_size = 151_936  # 110 tokens a chunk on a CPU, 883 on a GPU
    shaped = meta_model(config, "float32")
    meta_model(config, "float32").to_empty(device="cpu").save_pretrained(tmp_path)
    real = load_model(ModelConfig(path=str(tmp_path))).train()
    batch = batches.longest(batch_of(recipe(tokens_per_microbatch=512)), 40, 60)
    meta = to_device(batch, torch.device("meta"))
    measured = trace(real, batch)
    assert trace(shaped, meta, device="cpu") == pytest.approx(measured, rel=0.03)
    assert trace(shaped, meta, device="cuda") > 1.5 * measured


def test_a_micro_batch_is_filled_to_its_bound() -> None:
    stage = recipe(tokens_per_microbatch=1000, samples_per_prompt=3)
    assert batches.lengths(batch_of(stage), 100, 200) == [[200, 200, 200], [200]]
    assert len(batches.longest(batch_of(stage), 100, 200).inputs) == 1000
    assert batches.lengths(batch_of(recipe(tokens_per_microbatch=50, samples_per_prompt=3)), 100, 200) == [[200]]
    few = recipe(tokens_per_microbatch=10_000, prompts_per_step=2, samples_per_prompt=2)
    assert batches.lengths(batch_of(few), 10, 20) == [[20, 20], [20, 20]]
    # 2 x 16 answers of 200 and 2 prompts of 100: 6600 tokens in micro-batches of 1000
    many = recipe(tokens_per_microbatch=1000, prompts_per_step=2, samples_per_prompt=16)
    assert batches.micro_batches(batch_of(many), 100, 200) == 7


def test_parts_of_full_training_and_of_an_adapter() -> None:
    full = stage_plan(recipe(), device="cpu", lengths=LENGTHS)
    n = full.parameters
    update = full.moments["update"]
    assert full.trained == n
    assert update["gradients"] == 4 * n
    assert update["optimizer"] == 8 * n
    assert update["weights"] == pytest.approx(4 * n, rel=0.001)  # and buffers
    low = stage_plan(recipe(model=ModelConfig(dtype="bfloat16")), device="cuda", lengths=LENGTHS).moments["update"]
    assert (low["gradients"], low["optimizer"]) == (4 * n, 12 * n)
    # rank 4, on q (128 -> 128), k and v (128 -> 64), o, gate, up (128 -> 352) and down (352 -> 128) of 4 layers
    adapter = 4 * 4 * ((128 + 128) * 2 + (128 + 64) * 2 + (128 + 352) * 3)
    thin = stage_plan(recipe(lora=LoraConfig(rank=4)), device="cpu", lengths=LENGTHS)
    assert thin.trained == adapter
    assert thin.moments["update"]["optimizer"] == 8 * adapter
    assert thin.moments["update"]["gradients"] == 4 * adapter


def test_a_reference_is_a_copy_except_with_an_adapter() -> None:
    kl = {"algo": {"kl": {"coef": 0.1}}}
    with_copy = Recipe.model_validate({"name": "x", "task": {"name": "knights"}, **kl})
    plan = stage_plan(with_copy, device="cpu", lengths=LENGTHS)
    assert plan.parts["reference"] == plan.parts["weights"]
    thin = with_copy.model_copy(update={"lora": LoraConfig(rank=4)})
    assert "reference" not in stage_plan(thin, device="cpu", lengths=LENGTHS).parts


def test_keys_and_values_as_the_engine_reserves_them() -> None:
    stage = recipe(prompts_per_step=4, samples_per_prompt=8)  # 32 rows of 60 + 32 columns, 4 prompts of 40
    stage = stage.model_copy(update={"eval": stage.eval.model_copy(update={"problems": 1})})
    stage = stage.model_copy(update={"sampling": stage.sampling.model_copy(update={"max_tokens": 60})})
    plan = stage_plan(stage, device="cpu", lengths=LENGTHS)
    assert plan.rows == 32
    assert plan.kv_tokens == 4 * 40 + 32 * 92
    assert plan.kv_bytes_per_token == 4 * 2 * 2 * 32 * 4  # layers, keys and values, kv heads, head size, float32


def test_episodes_are_planned_with_their_whole_conversations() -> None:
    stage = recipe(prompts_per_step=4, samples_per_prompt=8, tools=["calculator"])
    stage = stage.model_copy(update={"eval": stage.eval.model_copy(update={"problems": 1})})
    stage = stage.model_copy(update={"sampling": stage.sampling.model_copy(update={"max_tokens": 60})})
    lengths = lengths_of(stage)
    assert lengths.answer == 8 * 60  # environment.max_turns
    plan = stage_plan(stage, device="cpu", lengths=Lengths(40, 8 * 60))
    assert plan.rows == 32
    assert plan.kv_tokens == 32 * (40 + 7 * 60) + 32 * 92  # before the last turn each row has its own conversation


def test_kernels_are_kept_for_every_shape_that_a_run_comes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.linear, "available", lambda: True)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4), torch.nn.Linear(4, 8))
    layers.get_output_embeddings = lambda: layers[1]  # type: ignore[assignment]
    both = kernels.KERNEL + kernels.PRIMITIVE
    # 17 rows at most: a single one, 8, 16, 24; two layers are alike
    assert kernels.memory(layers, 17, None, 0, 0) == 4 * 2 * both
    # 300 tokens: 128, 256, 384; three products of a layer that is trained, two of one that is not
    assert kernels.memory(None, 0, layers, 300, 99) == 3 * 3 * both
    layers[0].requires_grad_(False)
    assert kernels.memory(None, 0, layers, 300, 2) == 2 * (2 + 3) * both
    # beyond the capacity only the machine code stays
    shapes = 2 * (8 * kernels.linear.CAPACITY // 8 + 1)
    kept = kernels.linear.CAPACITY * kernels.PRIMITIVE
    assert kernels.memory(layers, 8 * kernels.linear.CAPACITY, None, 0, 0) == shapes * kernels.KERNEL + kept
    assert "kernels" in stage_plan(recipe(), device="cpu", lengths=LENGTHS).parts
    assert "kernels" not in stage_plan(recipe(), device="cuda", lengths=LENGTHS).parts


def test_a_process_meets_the_shapes_of_its_own_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.linear, "available", lambda: True)
    stage = recipe(tokens_per_microbatch=2048, prompts_per_step=16, samples_per_prompt=32, steps=1)
    one, two = (
        stage_plan(stage, device="cpu", lengths=LENGTHS, parallel=ParallelConfig(replicate=n)).parts["kernels"]
        for n in (1, 16)
    )
    assert two < one


def test_data_in_memory_is_a_part(tmp_path: Path) -> None:
    plan = stage_plan(recipe(), device="cpu", lengths=Lengths(40, 60, data=7 * GIB))
    assert plan.parts["data"] == 7 * GIB
    assert remedy(plan).startswith("the largest part is data: lower task.train")
    problem = Problem("x" * 1000, "t", ({"role": "user", "content": "y" * 1000},), "1")
    # two texts of a thousand characters, and the objects around them
    assert 2000 * 50 < batches.data_bytes([problem] * 50) < 6000 * 50


def test_data_that_was_not_downloaded_is_assumed_and_no_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_: Any) -> None:
        assert datasets.config.HF_HUB_OFFLINE
        assert huggingface_hub.constants.is_offline_mode()
        raise FileNotFoundError("not cached")

    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = lengths_of(load("perplexity-full"))  # type: ignore[arg-type]
    assert found.prompt == 512
    assert "prompts of at most 512 tokens, since the data cannot be read here: " in found.assumptions[0]
    assert before == (datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE)


def test_on_a_cpu_the_calibration_counts_the_time_of_this_process_only() -> None:
    assert _seconds(lambda: time.sleep(0.05), torch.device("cpu")) < 0.02
    assert _seconds(lambda: sum(range(400_000)), torch.device("cpu")) > 0.0005


def test_recomputed_activations_bring_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    meta_model(config_of(ModelConfig(tiny=TinyConfig(hidden_size=32, layers=1)))[0], "float32", recompute=True)
    assert not [w for w in recwarn if issubclass(w.category, FutureWarning)]


def test_shards_and_tensor_parts_hold_less() -> None:
    one = stage_plan(recipe(), device="cuda", lengths=LENGTHS).moments["update"]
    sharded = stage_plan(recipe(), device="cuda", lengths=LENGTHS, parallel=ParallelConfig(shard=4)).moments
    assert sharded["update"]["optimizer"] == one["optimizer"] // 4
    assert sharded["update"]["gathered"] > 0
    for moment in sharded.values():  # a whole model to sample from, which the update does not free
        assert moment["whole copy"] == pytest.approx(one["weights"], rel=0.001)
    assert "whole copy" not in one
    cut = stage_plan(recipe(), device="cuda", lengths=LENGTHS, parallel=ParallelConfig(tensor=2)).moments["update"]
    assert one["weights"] / 2 <= cut["weights"] < 0.52 * one["weights"]
    assert cut["activations"] < one["activations"]
    assert share_of(published("Qwen/Qwen3-8B"), 2).num_attention_heads == 16  # type: ignore[arg-type]


def test_estimate_is_of_the_stage_that_needs_most_and_reaches_nothing() -> None:
    found = estimate(load("knights-distil-full"))
    assert found.stage == "teacher"
    assert found.device == "cuda"
    assert 45 * GIB < found.peak_bytes < 60 * GIB  # in each of 4 processes
    assert sum(found.parts.values()) == found.peak_bytes


def test_sizes_that_are_proposed_fit_and_a_larger_micro_batch_would_not() -> None:
    stage = recipe(tokens_per_microbatch=8192, samples_per_prompt=64, prompts_per_step=64)
    given: Any = {"device": "cpu", "total_bytes": int(1.1 * GIB), "lengths": LENGTHS}

    def planned(one: Recipe, split: ParallelConfig) -> Plan:
        return stage_plan(one, parallel=split, **given)

    found = advise(stage, planned(stage, ParallelConfig()), planned, ParallelConfig())
    assert found.fits
    assert found.plan.peak_bytes <= 0.9 * 1.1 * GIB
    tokens = int(found.settings["tokens_per_microbatch"])
    assert 512 <= tokens < 8192
    more = stage.model_copy(update={"tokens_per_microbatch": tokens + 1024, "rollout": stage.rollout})
    assert stage_plan(more, **given).peak_bytes > 0.9 * 1.1 * GIB
    given["total_bytes"] = int(0.4 * GIB)  # less than Python and its libraries
    assert not advise(stage, planned(stage, ParallelConfig()), planned, ParallelConfig()).fits


# --- time ------------------------------------------------------------------------------------------------------------

SHAPE = Shape(weights=1000, products=900, layers=2, hidden=8, attention=8, item=2, kv_bytes=64)
WORK = Work(4, 8, 10, 20, 20, True, 1, 0, 4, 32, False, False)


def test_operations_and_seconds_by_hand() -> None:
    # 4 x (10 + 8 x 20) = 680 tokens, each 2 x 900 and 4 x 2 x 8 x 20 (keys) = 3080; three passes' worth
    assert train_flops(WORK, SHAPE) == 3 * 680 * 3080
    prefill = 40 * (1800 + 4 * 2 * 8 * 5) / 1e6
    fast, slow = (Speeds("t", train=1e6, decode=1e6, bandwidth=b) for b in (1e6, 1e5))
    assert generate_seconds(WORK, SHAPE, fast) == pytest.approx(prefill + 20 * 32 * 3080 / 1e6)  # by operations
    # by bytes: the weights, and of 32 rows 10 keys of their own and an eighth of the prompt's 10
    assert generate_seconds(WORK, SHAPE, slow) == pytest.approx(prefill + 20 * (2000 + 32 * 11.25 * 64) / 1e5)


def test_bytes_sent_by_hand() -> None:
    assert set(sent_bytes(WORK, SHAPE, ParallelConfig()).values()) == {0.0}
    sharded = sent_bytes(WORK, SHAPE, ParallelConfig(shard=4))  # one micro-batch each: twice 2000 bytes, once 4000
    assert sharded["shard"] == pytest.approx(0.75 * (2 * 2000 + 4000))
    assert sent_bytes(WORK, SHAPE, ParallelConfig(replicate=2))["replicate"] == pytest.approx(4000)
    tensor = sent_bytes(WORK, SHAPE, ParallelConfig(tensor=2))["tensor"]
    assert tensor == pytest.approx(680 * 4 * 2 * 8 * 2)  # tokens, all-reduces, layers, hidden, bytes; 2 (t - 1) / t = 1


# --- the run ---------------------------------------------------------------------------------------------------------


def small_run(folder: Path, name: str, **more: Any) -> Recipe:
    task = {"name": "knights", "people": [2], "quiz": "brief", "train": 60, "validation": 8, "test": 8}
    reward = folder / "reward.py"
    reward.write_text("def first(problem, rollouts):\n    return [float(len(r.text) % 2) for r in rollouts]\n")
    values = {
        "name": name,
        "runs": str(folder),
        "task": task,
        "model": {"path": "tiny", "tiny": {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "mlp_size": 48}},
        "reward": {"parts": {f"{reward}:first": 1.0}},
        "steps": 2,
        "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "sampling": {"max_tokens": 12},
        "eval": {"problems": 2, "sampling": {"max_tokens": 8}},
        **more,
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(values))
    found = load(file)
    assert isinstance(found, Recipe)
    return found


def digest(folder: Path) -> dict[str, str]:
    files = [folder / "metrics.jsonl", *(folder / "model").glob("*.safetensors"), *(folder / "rollouts").glob("*")]
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@pytest.mark.parametrize("more", [{}, {"lora": {"rank": 2}}], ids=["full", "lora"])
def test_the_rehearsal_changes_nothing_and_the_run_says_how_well_memory_was_predicted(
    more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline.run(small_run(tmp_path, "with", **more))
    said = capsys.readouterr().err
    results = json.loads((tmp_path / "with" / "results.json").read_text())
    assert "GiB predicted" in said
    assert results["memory"]["measured_bytes"][0] > 1e8
    assert results["memory"]["stages"]["with"]["parts"]["update"]["gradients"] > 0
    passes: list[int] = []
    monkeypatch.setattr(rl, "rehearse", lambda *_: passes.append(1))
    pipeline.run(small_run(tmp_path, "without", **more))
    assert passes
    assert digest(tmp_path / "with") == digest(tmp_path / "without")


def test_the_rehearsal_draws_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    from hone.learn.policy import Policy
    from hone.recipe.sections.optim import OptimConfig

    stage = small_run(tmp_path, "r")
    folder = pipeline.first_model(stage, tmp_path, tmp_path / "base")
    policy = Policy.load(stage.model.at(str(folder)), OptimConfig(), 2)
    before, weights = torch.get_rng_state(), [p.detach().clone() for p in policy.parameters]
    rehearse.go_through(policy, batches.longest(batch_of(stage), 20, 12), entropy=True)
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in (*policy.parameters, *policy.optimizer.masters))
    assert not policy.optimizer.state
    assert policy.updates == 0
    assert all(torch.equal(a, b) for a, b in zip(weights, policy.parameters, strict=True))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_running_out_of_memory_names_the_parts_and_the_setting(error: Exception, tmp_path: Path) -> None:
    stage = recipe(stage="sft", tokens_per_microbatch=65536)
    said = r"(?s)out of memory in stage x.*activations.*lower tokens_per_microbatch"
    with pytest.raises(UserError, match=said), explained(stage, tmp_path):
        raise error


def test_other_errors_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shape"), explained(recipe(), tmp_path):
        raise RuntimeError("shape mismatch")


def test_the_remedy_is_that_of_the_largest_part() -> None:
    model = ModelConfig(tiny=TinyConfig(hidden_size=1024, layers=8))
    stage = recipe(stage="sft", tokens_per_microbatch=128, model=model)
    plan = stage_plan(stage, device="cpu", lengths=Lengths(10, 10))
    assert "optimizer: lower the number of trained weights" in remedy(plan), plan.parts


# --- on the command line ---------------------------------------------------------------------------------------------


def test_hone_plan_prints_parts_sizes_and_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_plan(load("knights-direct-full"), None, 24.0, False, False) == 1
    out = capsys.readouterr().out
    assert "stage knights-direct-full: " in out
    assert "activations" in out
    assert "write: " in out
    assert "a step: " in out
    small = load("demo")
    assert cli_plan(small, "cpu", 4.0, False, True) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["stage"] for row in rows] == ["warmup", "rl"]
    assert all(row["advice"]["fits"] for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_predicted_peak_is_within_15_percent_of_a_real_run() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "plan.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.strip().splitlines()[-1])["worst_error"] < 0.15
