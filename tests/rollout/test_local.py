"""Assembling a model that answers in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.model import tiny
from hone.recipe.sections.model import ModelConfig, TinyConfig
from hone.recipe.sections.prompt import PromptConfig
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
from hone.rollout.local import LocalModel, load_local, native_engine

RAW = PromptConfig(style="raw", template="{user}")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    folder: Path = tmp_path_factory.mktemp("local") / "small"
    tiny.create(folder, TinyConfig(vocab_size=300, hidden_size=32, layers=1), ["ab ba"], seed=0)
    return load_local(ModelConfig(path=str(folder)), RolloutConfig(), RAW, "")


def test_a_loaded_model_is_frozen_and_ends_at_stop_strings(local: LocalModel) -> None:
    assert not local.model.training
    assert not any(p.requires_grad for p in local.model.parameters())
    engine = native_engine(local.model, local.renderer.tokenizer, RolloutConfig())
    prompt = local.renderer.text_ids("ab")
    ((whole,),) = engine.generate([prompt], SamplingConfig(max_tokens=12, temperature=0.0), samples=1, seed=0)
    first = local.renderer.text(whole.completion_ids[:1])
    ((cut,),) = engine.generate(
        [prompt], SamplingConfig(max_tokens=12, temperature=0.0, stop=(first,)), samples=1, seed=0
    )
    assert (cut.finish, cut.completion_ids.tolist()) == ("stop", whole.completion_ids[:1].tolist())
