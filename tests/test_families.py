"""Every architecture is exact or refused before a run, with the reason: nothing is silently wrong.

The short form has a family per mechanism; the long one (`-m slow`) has all, and writes the table of docs/models.md:

    python -m pytest tests/test_families.py -m slow -n 0
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.settings import UserError
from hone.learn.forward import packed_logprobs
from hone.learn.pack import Packer
from hone.learn.samples import supervised_sample
from hone.model import lora
from hone.model.limits import longest_exact
from hone.model.load import load_model
from hone.model.update_mode import update_mode
from hone.recipe.sections.model import LoraConfig, ModelConfig
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
from hone.rollout import exactness
from hone.rollout.native.engine import NativeEngine
from hone.types import Sample
from tests.tiny_families import FAMILIES, make

TABLE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- table: tests/test_families.py writes it -->\n", "<!-- end of table -->\n"

#: What the short form asks of each: exact (up to so many tokens), or a word of the refusal.
SHORT = {
    "qwen2": "exact",
    "qwen2-moe (window)": "exact",
    "mistral (window)": "exact",
    "gemma2": "exact",
    "gemma3": "exact",
    "granite": "exact",
    "cohere2": "exact",
    "llama4": "exact",
    "olmo": "exact",
    "gemma2 (attention cap)": "exact",
    "gpt-oss": "exact",
    "phi3 (longrope)": "exact to 32 tokens",
    "phi3 (dropout)": "exact",
    "phimoe": "exact",
    "mixtral (router noise)": "exact",
    "seed-oss": "exact",
    "stablelm": "exact",
    "nemotron": "exact",
    "deepseek-v3": "exact",
    "bloom": "never calls the configured attention function",
    "doge": "its own attention mask",
    "diffllama": "computes attention twice",
    "modernbert-decoder": "is not computed exactly",
    "gpt-j": "has its own attention classes",
    "mpt": "cannot run with hone's attention",
    "rwkv": "never calls the configured attention function",
    "lfm2": "exact",
    "qwen3.5": "exact",
    "granite4-h": "exact",
    "nemotron-h": "exact",
    "jamba": "exact",
    "minimax": "of which 0 take a cache of states",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is remembered from one test to the next."""
    monkeypatch.setattr(exactness, "_folder", lambda: tmp_path / "cache")


@pytest.mark.parametrize("name", SHORT)
def test_exact_or_refused(name: str, tmp_path: Path) -> None:
    make(name, tmp_path / "model")
    found = measured(tmp_path / "model", sampled=False)  # the guard has sampled
    assert SHORT[name] == found.verdict if SHORT[name].startswith("exact") else SHORT[name] in found.verdict
    assert not found.wrong


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_families_and_the_table_of_the_docs(tmp_path: Path) -> None:
    rows, wrong = [], []
    for name in FAMILIES:
        try:
            make(name, tmp_path / name)
        except Exception as error:  # this version of transformers does not have it, or not with these sizes
            rows.append((name, f"not made: {type(error).__name__}", "", "", "", ""))
            continue
        found = measured(tmp_path / name)
        numbers = (found.logprobs, found.gradient, found.engine)
        adapted = ("", "") if found.refused else adapter(tmp_path / name)
        rows.append((name, found.verdict, *("" if found.refused else bound(x) for x in numbers), adapted[0]))
        wrong += [f"{name}: {what}" for what in (found.wrong, adapted[1]) if what]
    header = ("family", "float32", "log-probs", "gradient", "engine", "LoRA `all`")
    lines = [" | ".join(cell.replace("|", " ") for cell in row) for row in (header, ["---"] * len(header), *rows)]
    before, after = TABLE.read_text().split(BEGIN)[0], TABLE.read_text().split(END)[1]
    if os.access(TABLE, os.W_OK):
        TABLE.write_text(before + BEGIN + "".join(f"| {line} |\n" for line in lines) + END + after)
    assert not wrong
    assert sum(row[1].startswith("exact") for row in rows) >= 60


@dataclass(frozen=True)
class Measured:
    """Largest differences to the model's own eager code: of log-probs in an update (nats), of the gradient of a
    parameter relative to its largest entry, and of the engine's log-probs."""

    refused: str = ""
    limit: str = ""
    logprobs: float = 0.0
    gradient: float = 0.0
    engine: float = 0.0

    @property
    def verdict(self) -> str:
        return f"refused: {self.refused}" if self.refused else f"exact{self.limit}"

    @property
    def wrong(self) -> str:
        """What the guard let pass, but is not exact."""
        exact = self.logprobs <= 1e-4 and self.gradient <= 1e-4 and self.engine <= 1e-4
        return "" if exact else f"{self.logprobs:.2g} {self.gradient:.2g} {self.engine:.2g}"


def bound(x: float) -> str:
    return next((text for text in ("1e-6", "1e-5", "1e-4") if x <= float(text)), f"{x:.1g}")


def measured(folder: Path, sampled: bool = True) -> Measured:
    try:
        model = load_model(ModelConfig(path=str(folder)))
        found = exactness.check_model(model)
    except UserError as error:
        return Measured(refused=str(error).replace(str(folder.parent), ""))
    assert found is not None
    limit = longest_exact(model.config)
    logprobs, gradient = compare(model, limit or 512)
    ways = (True, False) if sampled else ()
    engine = max((answers(model, min(limit or 512, 512), compiled) for compiled in ways), default=0.0)
    return Measured("", "" if limit in (None, 512) else f" to {limit} tokens", logprobs, gradient, engine)


def compare(model: torch.nn.Module, limit: int) -> tuple[float, float]:
    """Differences of log-probs and gradients. Groups of several prompts in one row, in the mode of an update."""
    rng = np.random.default_rng(1)
    shapes = [(5, [9, 30, 12]), (23, [20, 7]), (41, [25])] if limit > 90 else [(limit // 2, [limit // 2, 2]), (1, [2])]
    samples = []
    for n, (prompt_len, lengths) in enumerate(shapes):
        prompt = rng.integers(5, 500, prompt_len)
        samples += [supervised_sample(str(n), prompt, rng.integers(5, 500, length)) for length in lengths]
    signs = [1.0, -0.5, 2.0, 0.25, 1.0, -1.0][: len(samples)]
    (batch,) = Packer(1000)(samples, signs)
    model.zero_grad()
    with update_mode(model):
        logprobs = packed_logprobs(model, batch, 1.0).logprobs  # type: ignore[arg-type]
        (batch.weights * logprobs).sum().backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    parts = {}
    for i, (sample, sign) in enumerate(zip(samples, signs, strict=True)):
        parts[i] = own_logprobs(model, sample)
        (sign * parts[i].sum()).backward()
    expected = torch.cat([parts[i].detach() for i in batch.sample_ids])
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    # Gradients that cancel to nothing, such as those of a bias of all keys (OPT, BioGPT), are rounding alone.
    floor = 1e-3 * max(float(grad.abs().max()) for grad in theirs.values())
    off = [
        float((ours.get(name, torch.zeros_like(grad)) - grad).abs().max()) / max(float(grad.abs().max()), floor)
        for name, grad in theirs.items()
    ]
    return float((logprobs.detach() - expected).abs().max()), max(off)


def answers(model: torch.nn.Module, limit: int, compiled: bool = True) -> float:
    """The engine's log-probs against the model's own, with rows that come and go, and prompts on both sides of the
    window of 8 tokens. Each token of a greedy answer must be the likeliest for the model's own code."""
    engine = NativeEngine(model, (), RolloutConfig(compiled=compiled, max_sequences=5))  # type: ignore[arg-type]
    rng, gap = np.random.default_rng(3), 0.0
    tokens = min(14, limit // 2)
    prompts = [rng.integers(5, 500, min(n, limit - tokens)) for n in (1, 4, 7, 8, 9, 23)]
    for temperature, samples in ((0.0, 1), (1.0, 3)):
        sampling = SamplingConfig(temperature=temperature, max_tokens=tokens)
        for turn in (turn for group in engine.generate(prompts, sampling, samples=samples, seed=0) for turn in group):
            with exactness.own_attention(model), torch.no_grad():  # type: ignore[arg-type]
                ids = torch.as_tensor(np.concatenate([turn.prompt_ids, turn.completion_ids]))
                logits = model(input_ids=ids[None], use_cache=False).logits[0, len(turn.prompt_ids) - 1 : -1]
            if not temperature:
                assert logits.argmax(-1).tolist() == turn.completion_ids.tolist()
            own = logits.log_softmax(-1).gather(1, torch.as_tensor(turn.completion_ids)[:, None])[:, 0]
            gap = max(gap, float(np.abs(turn.logprobs - own.numpy()).max()))
    return gap


def adapter(folder: Path) -> tuple[str, str]:
    """What an adapter on all targets covers, and what is not exact with it: sampling, and the merge."""
    model = load_model(ModelConfig(path=str(folder)))
    try:
        lora.attach(model, LoraConfig(rank=2), seed=0)
    except UserError as error:
        return f"refused: {str(error).split(';')[0]}", ""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0.0, 0.05)
    covered = ", ".join(lora.target_names(load_model(ModelConfig(path=str(folder))), "all"))
    rng = np.random.default_rng(4)
    (batch,) = Packer(100)([supervised_sample("p", rng.integers(5, 500, 9), rng.integers(5, 500, 12))], [1.0])
    sampling = answers(model, min(longest_exact(model.config) or 512, 512))
    with torch.no_grad():
        beside = packed_logprobs(model, batch, 1.0).logprobs
        lora.merge(model)
        merged = float((packed_logprobs(model, batch, 1.0).logprobs - beside).abs().max())
    return (
        covered,
        "" if sampling <= 2e-4 and merged <= 1e-4 else f"adapter: sampling {sampling:.2g}, merge {merged:.2g}",
    )


def own_logprobs(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """Log-probs [Lc] of a sample's answer by the model's own code, with a graph."""
    ids = torch.as_tensor(sample.token_ids)
    with exactness.own_attention(model):  # type: ignore[arg-type]
        logprobs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, ids[1:, None])[sample.prompt_len - 1 :, 0]


#: Log-probs may differ by so much: experts add rounding to that of attention.
WINDOWED = {"gemma3": 1e-5, "gpt-oss": 5e-5}


@pytest.fixture(scope="module", params=WINDOWED)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    folder = tmp_path_factory.mktemp("windowed")
    make(request.param, folder)
    return load_model(ModelConfig(path=str(folder)))


@settings(max_examples=12, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=1, max_size=3)), min_size=1, max_size=3
    ),
    budget=st.sampled_from([30, 60, 1000]),
)
def test_windows_in_rows_packed_in_any_way(
    windowed: torch.nn.Module, groups: list[tuple[int, list[int]]], budget: int
) -> None:
    """Prompts and answers end before, at and after the window of 8 tokens, together in one row or not."""
    rng = np.random.default_rng(2)
    samples = []
    for n, (prompt_len, answers) in enumerate(groups):
        prompt = rng.integers(5, 500, prompt_len)
        samples += [supervised_sample(str(n), prompt, rng.integers(5, 500, length)) for length in answers]
    expected = [own_logprobs(windowed, sample).detach() for sample in samples]
    for batch in Packer(budget)(samples, [1.0] * len(samples)):
        with torch.no_grad():
            found = packed_logprobs(windowed, batch, 1.0).logprobs  # type: ignore[arg-type]
        of_each = torch.cat([expected[i] for i in batch.sample_ids])
        torch.testing.assert_close(found, of_each, atol=tolerance(windowed), rtol=0)


def tolerance(model: torch.nn.Module) -> float:
    return WINDOWED["gemma3" if model.config.model_type == "gemma3_text" else "gpt-oss"]  # type: ignore[union-attr]


def test_the_guard_sees_a_wrong_model_says_the_three_numbers_and_remembers_right_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("qwen2", tmp_path / "model")
    model = load_model(ModelConfig(path=str(tmp_path / "model")))
    from hone.rollout.native import core

    real = core.Core._logits
    monkeypatch.setattr(core.Core, "_logits", lambda *a: 1.05 * real(*a))
    with pytest.raises(UserError, match=r"of the engine -?\d.*own eager forward -?\d.*Sampling would be"):
        exactness.check_model(model)
    monkeypatch.undo()
    monkeypatch.setattr(exactness, "_folder", lambda: tmp_path / "cache")
    assert exactness.check_model(model) is not None
    assert exactness.check_model(model) is None
    exactness.check_path(ModelConfig(path=str(tmp_path / "model")))  # known, so that no model is loaded
    assert model.config._attn_implementation == "hone"


def test_an_update_computes_without_the_noise_of_train_mode_with_recomputed_activations_too(tmp_path: Path) -> None:
    make("starcoder2", tmp_path)
    rng = np.random.default_rng(0)
    (batch,) = Packer(100)([supervised_sample("p", rng.integers(5, 500, 9), rng.integers(5, 500, 12))], [1.0])
    found = []
    for recompute in (False, True):
        model = load_model(ModelConfig(path=str(tmp_path), recompute_activations=recompute))
        calls = [0]
        layer = next(m for m in model.modules() if type(m).__name__ == "Starcoder2MLP")
        layer.register_forward_hook(lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1))
        with update_mode(model):
            logprobs = packed_logprobs(model, batch, 1.0).logprobs
            (-logprobs.sum()).backward()
        assert calls[0] == 1 + recompute, "recomputed once in the backward pass"
        assert not any(m.training for m in model.modules())
        found.append((logprobs.detach(), {n: p.grad for n, p in model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)
    for name, grad in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], grad, rtol=0, atol=0)
