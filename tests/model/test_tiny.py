"""The from-scratch model is an ordinary Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import get_args
from unicodedata import normalize

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from hone.model.load import load_model, load_tokenizer, stop_token_ids
from hone.model.tiny import WRITERS, common_phrases, create, train_tokenizer
from hone.recipe.sections.model import ModelConfig, TinyConfig
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
from hone.rollout import exactness
from hone.rollout.native.engine import NativeEngine

TEXTS = ["Zoey says: Oliver is a knave.\n<think>Suppose Zoey: knight.</think>\n<answer>(1) Zoey is a knight</answer>"]
TINY = TinyConfig(vocab_size=320, hidden_size=32, layers=2, heads=2, kv_heads=1, mlp_size=48)


def test_plain_transformers_generates_what_our_engine_does(tmp_path: Path) -> None:
    create(tmp_path, TINY, TEXTS, seed=3)
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    prompt = tokenizer("Zoey says:", return_tensors="pt")
    expected = plain.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt.input_ids.shape[1] :]

    config = ModelConfig(path=str(tmp_path))
    model, own = load_model(config), load_tokenizer(config)
    engine = NativeEngine(model, stop_token_ids(model, own), RolloutConfig())
    ids = np.asarray(own.encode("Zoey says:"))
    sampling = SamplingConfig(temperature=0, max_tokens=24)
    ((turn,),) = engine.generate([ids], sampling, samples=1, seed=0)
    assert turn.completion_ids.tolist() == expected.tolist()


def test_same_seed_same_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        create(tmp_path / name, TINY, TEXTS, seed)
    a, b, c = (load_model(ModelConfig(path=str(tmp_path / n))).state_dict() for n in "abc")
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()


def test_tags_are_single_visible_tokens() -> None:
    tokenizer = train_tokenizer(TEXTS, 320)
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        (token,) = tokenizer.encode(tag)
        assert tokenizer.decode([token], skip_special_tokens=True) == tag


PUZZLES = [
    f"Zoey says: Oliver is a {role}. <think>Suppose Zoey knight. Oliver is a {role}? Oliver {role}, yes.</think>"
    for role in ("knight", "knave")
] * 3


def test_the_tokenizer_that_is_loaded_is_the_one_that_was_made(tmp_path: Path) -> None:
    """AutoTokenizer has a word splitter of its own for each model type."""
    create(tmp_path, TINY.model_copy(update={"vocab_size": 400, "phrases": 8}), PUZZLES, seed=0)
    made, loaded = train_tokenizer(PUZZLES, 400, 8), AutoTokenizer.from_pretrained(tmp_path)
    for text in (*PUZZLES, "(1) Zoey is a\nknight!? 12+345=6", " Ünïcode e\u0301 don't I'LL  x\t y\r\n z"):
        assert loaded.encode(text) == made.encode(text)


def test_phrases_are_single_tokens_that_end_with_a_word() -> None:
    phrases = common_phrases(PUZZLES, 8)
    assert " Oliver is a knave" in phrases
    words = {"Zoey", "Oliver", "says", "Suppose", "is", "a", "knight", "knave"}
    assert words.issuperset(word for phrase in phrases for word in phrase.split())
    with_phrases, without = train_tokenizer(PUZZLES, 400, 8), train_tokenizer(PUZZLES, 400)
    assert len(with_phrases.encode(" Oliver is a knave")) == 1
    assert len(without.encode(" Oliver is a knave")) == 4


def test_phrases_leave_room_for_bytes() -> None:
    with pytest.raises(ValidationError, match="phrases: 150 leave 250 of 400 tokens"):
        TinyConfig(vocab_size=400, phrases=150)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60).filter(lambda t: "<|" not in t))
def test_every_text_round_trips(text: str) -> None:
    tokenizer = TOKENIZER
    assert tokenizer.decode(tokenizer.encode(text)) == normalize("NFC", text.encode("utf-8", "replace").decode())


TOKENIZER = train_tokenizer(TEXTS, 320)


@pytest.mark.parametrize("architecture", ["gemma3", "qwen3_5", "lfm2"])
def test_other_architectures_are_exact_and_their_tokenizer_stays_as_it_is(architecture: str, tmp_path: Path) -> None:
    create(tmp_path, TINY.model_copy(update={"architecture": architecture, "layers": 4}), TEXTS, seed=0)
    model = load_model(ModelConfig(path=str(tmp_path)))
    assert (
        model.config.layer_types
        == {
            "gemma3": ["sliding_attention", "full_attention"] * 2,
            "qwen3_5": ["linear_attention"] * 3 + ["full_attention"],
            "lfm2": ["conv", "conv", "full_attention", "conv"],
        }[architecture]
    )
    assert getattr(model.config, "sliding_window", 64) == 64
    assert exactness.measure(model).gap < 1e-5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


@pytest.mark.parametrize("architecture", get_args(TinyConfig.model_fields["architecture"].annotation))
def test_the_layers_that_write_to_the_residual_stream_begin_smaller(architecture: str, tmp_path: Path) -> None:
    """By 1/sqrt(2 layers): 0.5 of init_std with 2 layers. There are two such in each layer."""
    config = TINY.model_copy(update={"architecture": architecture, "hidden_size": 64, "layers": 2})
    create(tmp_path, config, TOKENIZER, seed=0)
    weights = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    small = {n for n, p in weights.items() if p.ndim == 2 and float(p.std()) < 0.6 * config.init_std}
    assert small == {n for n in weights if n.split(".")[-2] in WRITERS}
    assert len(small) == 4
