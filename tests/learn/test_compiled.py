"""Compiled layers: the same gradients, the same answers, and nothing stays behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hone.base.settings import ConfigError, UserError
from hone.learn.batches import prepare
from hone.model import compiled
from hone.recipe.load import load as load_recipe
from hone.recipe.sections.algo import AlgoConfig
from tests.learn.policies import REWARDS, SAMPLING, gradient, load, make_groups, packer


@pytest.fixture(autouse=True)
def fresh() -> None:
    compiled._compiled.cache_clear()
    torch._dynamo.reset()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Graphs are captured and differentiated ahead of time, and then run by PyTorch as they are. Returns them."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    real, graphs = torch.compile, list[object]()

    def keep(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=keep)
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: real(f, backend=backend, dynamic=dynamic))
    return graphs


def test_compiled_layers_have_the_same_gradient_and_any_length_will_do(folder: Path, quick: list[object]) -> None:
    """Layers share their code, and other lengths make none: otherwise every step would compile anew."""
    groups, algo = make_groups(REWARDS), AlgoConfig(entropy_coef=0.01)
    expected = gradient(load(folder), groups, algo, 60)
    policy = load(folder, compile=True)
    actual = gradient(policy, groups, algo, 60)
    np.testing.assert_allclose(actual, expected, atol=2e-6 * np.abs(expected).max())
    assert not any("forward" in vars(module) for module in policy.model.modules())
    counts = []
    for seed, budget in ((0, 10_000), (1, 300), (2, 130), (3, 10_000)):
        batch = prepare(make_groups(REWARDS, seed), policy, None, AlgoConfig(), SAMPLING, packer(budget))
        policy.update(batch.minibatches, AlgoConfig(), 1.0)
        counts.append(len(quick))
    assert counts[1:] == [counts[1]] * 3
    assert 0 < counts[1] <= 16, "for each part of a layer: without gradient, there, and back"


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_the_compiler_of_this_machine_agrees(folder: Path, recompute: bool) -> None:
    """Half a minute of compiling."""
    groups = make_groups(REWARDS)
    expected = gradient(load(folder), groups, AlgoConfig(), 60, reference=True)
    policy = load(folder, compile=True, recompute_activations=recompute)
    actual = gradient(policy, groups, AlgoConfig(), 60, reference=True)
    np.testing.assert_allclose(actual, expected, atol=2e-5 * np.abs(expected).max())


def test_a_model_that_does_not_name_its_layers_is_refused(folder: Path) -> None:
    policy = load(folder)
    policy.model._no_split_modules = None
    with pytest.raises(UserError, match=r"model\.compile: Qwen2ForCausalLM does not declare its layers"):
        compiled.request(policy.model)


def test_parts_of_layers_are_not_compiled(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: r\nstage: rl\ntask: knights\nparallel: {tensor: 2}\nmodel: {compile: true}\n")
    with pytest.raises(
        ConfigError, match=r"model\.compile: PyTorch does not compile layers that parallel\.tensor splits"
    ):
        load_recipe(recipe)
