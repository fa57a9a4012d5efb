"""Models that would train silently wrong are refused by name; what is not there is said in a line."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from hone.base.settings import UserError
from hone.model.limits import context_limit
from hone.model.load import check_supported, load_model, load_tokenizer, require_weights, stop_token_ids
from hone.model.tiny import train_tokenizer
from hone.model.update_mode import update_mode
from hone.recipe.sections.model import ModelConfig

SIZES = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_recurrent_layers_without_a_state_are_refused() -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, layer_types=["full_attention", "full_attention"]))
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UserError, match=r"qwen2 has 1 recurrent layers \(linear_attention\), of which 0 take"):
        check_supported(model)


def test_the_context_ends_with_the_positions_whatever_the_window() -> None:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    config = Qwen2Config(**SIZES, max_position_embeddings=99, **window)
    assert str(context_limit(config)) == "99 (max_position_embeddings)"


def test_windows_without_a_size_are_refused() -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, layer_types=["full_attention", "full_attention"]))
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(UserError, match="layers of type chunked_attention"):
        check_supported(model)


def test_models_stay_in_eval_mode_so_that_nothing_is_dropped(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=300, resid_pdrop=0.5)).save_pretrained(
        tmp_path
    )
    model = load_model(ModelConfig(path=str(tmp_path)))
    with update_mode(model):
        assert not any(module.training for module in model.modules())


def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"model.path: {tmp_path}: .*give a folder with a checkpoint, or a hub id"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_a_folder_without_a_tokenizer_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"has no tokenizer .*AutoTokenizer\.from_pretrained\(BASE\)\.save_pretrained"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_a_folder_without_weights_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"model.path: {tmp_path} has no weights"):
        require_weights(str(tmp_path))
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    require_weights(str(tmp_path))
    require_weights("owner/name")  # of the hub: loading it says what is missing


def test_a_tokenizer_that_cannot_stop_is_refused(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["2 + 2"], 300)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no end-of-text token"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_every_token_that_may_end_a_completion_counts_once() -> None:
    tokenizer = train_tokenizer(["2 + 2"], 300)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, eos_token_id=7))
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [9, 7]
    assert stop_token_ids(model, tokenizer) == (tokenizer.eos_token_id, 7, 9)
