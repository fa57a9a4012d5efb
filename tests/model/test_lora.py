"""Adapters: the forward of peft, the merge, and files that peft and transformers read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    PreTrainedModel,
)

from hone.base.settings import UserError
from hone.learn.forward import packed_hidden
from hone.model import lora
from hone.model.load import load_model, load_tokenizer
from hone.model.tiny import create
from hone.recipe.sections.model import LoraConfig, ModelConfig, TinyConfig
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
from hone.rollout.native.engine import NativeEngine
from hone.types import Block, MicroBatch

TINY = TinyConfig(vocab_size=300, hidden_size=32, layers=2, heads=2, kv_heads=1, mlp_size=48)
LORA = LoraConfig(rank=3, targets="all")
TOKENS = torch.arange(5, 25)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    create(path, TINY, ["Zoey is a knight."] * 3, seed=0)
    return path


def adapted(folder: Path, config: LoraConfig = LORA, dtype: str = "float32") -> PreTrainedModel:
    """With an adapter that changes the logits by about as much as they are."""
    model = load_model(ModelConfig(path=str(folder), dtype=dtype))  # type: ignore[arg-type]
    lora.attach(model, config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, value in lora.adapter_weights(model).items():
            if "lora_B" in name:
                value.copy_(0.3 * torch.randn(value.shape, generator=generator))
    return model.eval()


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    n = len(TOKENS)
    zeros = torch.zeros(n)
    batch = MicroBatch(
        TOKENS, torch.arange(n), (Block(0, (n,)),), torch.arange(n), TOKENS, zeros.long(), zeros, zeros, zeros
    )
    hidden: torch.Tensor = model.get_output_embeddings()(packed_hidden(model, batch))
    return hidden


@torch.no_grad()
def plain_logits(model: torch.nn.Module) -> torch.Tensor:
    out: torch.Tensor = model(TOKENS[None]).logits[0]
    return out


def test_a_new_adapter_changes_nothing_and_a_trained_one_much(folder: Path) -> None:
    base = logits(load_model(ModelConfig(path=str(folder))))
    fresh = load_model(ModelConfig(path=str(folder)))
    lora.attach(fresh, LORA, seed=1)
    assert torch.equal(logits(fresh), base)
    assert (logits(adapted(folder)) - base).abs().max() > 0.5


def test_only_the_adapter_asks_for_gradients(folder: Path) -> None:
    names = [name for name, p in adapted(folder).named_parameters() if p.requires_grad]
    assert len(names) == 2 * 7 * TINY.layers
    assert all("lora_" in name for name in names)


def test_merged_is_the_same_function_and_leaves_the_weights_alone(folder: Path) -> None:
    model = adapted(folder)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    beside = logits(model)
    with lora.merged(model):
        assert set(model.state_dict()) == set(load_model(ModelConfig(path=str(folder))).state_dict())
        torch.testing.assert_close(logits(model), beside, atol=1e-5, rtol=0)
    assert torch.equal(logits(model), beside)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_merged_by_hand(folder: Path) -> None:
    """W + (alpha / rank) B A: with alpha 12 and rank 3 four times B A."""
    model = adapted(folder, LoraConfig(rank=3, alpha=12.0, targets=("q_proj",)))
    layer = model.model.layers[1].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = layer.base_layer.weight + 4 * b @ a
    lora.merge(model)
    torch.testing.assert_close(model.model.layers[1].self_attn.q_proj.weight, expected, atol=1e-6, rtol=0)
    assert not lora.has_adapter(model)
    assert type(model.model.layers[1].self_attn.q_proj) is torch.nn.Linear


def test_adapter_off_is_the_base_bit_for_bit(folder: Path) -> None:
    model = adapted(folder)
    with lora.adapter_off(model):
        assert torch.equal(logits(model), logits(load_model(ModelConfig(path=str(folder)))))
    assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())


def test_an_exchange_ends_when_something_raises_in_it(folder: Path) -> None:
    model = adapted(folder)
    expected = logits(model)
    for exchange in (lora.merged, lora.adapter_off):
        with pytest.raises(KeyError), exchange(model):
            raise KeyError
        assert torch.equal(logits(model), expected)


def test_a_second_adapter_after_a_merge_is_the_only_one(folder: Path) -> None:
    model = adapted(folder)
    expected = logits(model)
    lora.merge(model)
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)
    lora.attach(model, LoraConfig(rank=5, targets=("o_proj",)), seed=3)
    assert {value.shape for value in lora.adapter_weights(model).values()} == {(5, 32), (32, 5)}
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)


def test_peft_reads_what_is_saved(folder: Path, tmp_path: Path) -> None:
    """Oracle: peft's own loader over transformers' own attention."""
    from peft import PeftModel

    model = adapted(folder)
    lora.save_adapter(model, tmp_path / "adapter", str(folder))
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(plain_logits(theirs), logits(model), atol=1e-5, rtol=0)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        folder.resolve()
    )


def test_we_read_what_peft_saves(folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs = get_peft_model(base, PeftConfig(r=4, lora_alpha=6, target_modules=["k_proj", "up_proj"])).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    theirs.save_pretrained(tmp_path / "adapter")
    expected = plain_logits(theirs)
    model = load_model(ModelConfig(path=str(folder)))
    lora.attach(model, LoraConfig(rank=4, alpha=6.0, targets=("up_proj", "k_proj")), seed=0)
    lora.load_adapter(model, tmp_path / "adapter")
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)
    # As a model.path it stands for its base with the adapter merged in; the tokenizer is the base's.
    merged = load_model(ModelConfig(path=str(tmp_path / "adapter")))
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=0)
    tokenizers = [load_tokenizer(ModelConfig(path=str(p))) for p in (tmp_path / "adapter", folder)]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    for wrong in (LoraConfig(rank=5, alpha=6.0), LoraConfig(rank=4, alpha=8.0, targets=("k_proj", "up_proj"))):
        lora.remove(model)
        lora.attach(model, wrong, seed=0)
        with pytest.raises(UserError, match=r"has rank 4, alpha 6 and targets k_proj, up_proj; set lora.rank"):
            lora.load_adapter(model, tmp_path / "adapter")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_samples_from_the_adapter_and_says_so(folder: Path, dtype: str) -> None:
    """A sampler that forgets the adapter (verl#7495) has the log-probs of the base."""
    model = adapted(folder, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    prompt = np.arange(5, 12)
    (turns,) = NativeEngine(model, [], RolloutConfig()).generate(
        [prompt], SamplingConfig(max_tokens=12), samples=4, seed=3
    )
    for turn in turns:
        ids = torch.from_numpy(np.concatenate([prompt, turn.completion_ids]))
        zeros = torch.zeros(len(ids))
        batch = MicroBatch(
            ids,
            torch.arange(len(ids)),
            (Block(0, (len(ids),)),),
            torch.arange(len(ids)),
            ids,
            zeros.long(),
            zeros,
            zeros,
            zeros,
        )

        @torch.no_grad()
        def logprobs(
            batch: MicroBatch = batch, wanted: np.ndarray = turn.completion_ids, first: int = len(prompt)
        ) -> np.ndarray:
            scores = model.get_output_embeddings()(packed_hidden(model, batch)).float().log_softmax(-1)
            return scores[torch.arange(first - 1, first - 1 + len(wanted)), torch.from_numpy(wanted)].numpy()

        np.testing.assert_allclose(turn.logprobs, logprobs(), atol=1e-5 if dtype == "float32" else 0.05)
        with lora.adapter_off(model):
            assert np.abs(turn.logprobs - logprobs()).max() > 0.3


def test_a_new_adapter_depends_on_its_seed_alone(folder: Path) -> None:
    def first(seed: int) -> torch.Tensor:
        torch.randn(3)  # whatever was drawn before
        model = load_model(ModelConfig(path=str(folder)))
        state = torch.random.get_rng_state()
        lora.attach(model, LORA, seed)
        assert torch.equal(torch.random.get_rng_state(), state)
        return next(iter(lora.adapter_weights(model).values())).clone()

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("attention", "k_proj o_proj q_proj v_proj"),
        ("mlp", "down_proj gate_proj up_proj"),
        ("all", "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"),
        (("v_proj", "q_proj"), "q_proj v_proj"),
    ],
)
def test_targets_by_name(folder: Path, targets: str, names: str) -> None:
    model = load_model(ModelConfig(path=str(folder)))
    assert " ".join(lora.target_names(model, targets)) == names


def test_a_name_that_two_parts_have_means_the_one_that_was_given() -> None:
    config = GPTBigCodeConfig(n_embd=16, n_layer=2, n_head=2, vocab_size=300)
    model = GPTBigCodeForCausalLM(config)
    assert lora.target_names(model, "all") == ["c_attn", "c_fc", "c_proj"]
    assert lora.target_names(model, "attention") == ["attn.c_proj", "c_attn"]
    assert lora.target_names(model, "mlp") == ["c_fc", "mlp.c_proj"]
    lora.attach(model, LoraConfig(rank=2, targets="mlp"), seed=0)
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == {f"transformer.h.{n}.mlp.{leaf}" for n in (0, 1) for leaf in ("c_fc", "c_proj")}


def test_routers_and_fused_experts_are_no_targets() -> None:
    config = HunYuanMoEV1Config(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_experts=2, moe_topk=1,
    )  # fmt: skip
    model = HunYuanMoEV1ForCausalLM(config)
    assert lora.target_names(model, "all") == ["k_proj", "o_proj", "q_proj", "v_proj"]
    with pytest.raises(UserError, match=r"no linear layers in its mlp that can be adapted \(its experts, down_proj"):
        lora.target_names(model, "mlp")


def test_targets_that_are_not_there(folder: Path) -> None:
    model = load_model(ModelConfig(path=str(folder)))
    with pytest.raises(
        UserError, match=r"lora.targets: w1 is not a linear layer of this model; it has down_proj, gate"
    ):
        lora.target_names(model, ("q_proj", "w1"))
    with pytest.raises(ValueError, match="lm_head cannot be a target"):
        LoraConfig(targets=("q_proj", "lm_head"))
    with pytest.raises(ValueError, match="nothing would be trained"):
        LoraConfig(targets=())


def test_an_adapter_whose_base_has_gone(folder: Path, tmp_path: Path) -> None:
    lora.save_adapter(adapted(folder), tmp_path / "adapter", str(folder))
    path = tmp_path / "adapter" / "adapter_config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "base_model_name_or_path": "/not/here"}))
    with pytest.raises(UserError, match=r"its base model /not/here is not there \(moved\?\)"):
        load_model(ModelConfig(path=str(tmp_path / "adapter")))
    path.write_text(json.dumps({**values, "peft_type": "IA3"}))
    with pytest.raises(UserError, match="an adapter of type IA3; only LORA is supported"):
        load_model(ModelConfig(path=str(tmp_path / "adapter")))
    path.write_text(json.dumps({**values, "use_dora": True}))
    with pytest.raises(UserError, match="use_dora"):
        load_model(ModelConfig(path=str(tmp_path / "adapter")))
