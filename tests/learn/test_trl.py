"""TRL as the oracle: its own trainers, on a tiny random Qwen2, compute the same losses and gradients.

A real `GRPOTrainer` is built once. For the losses its `_compute_loss` runs with log-probs that we
choose (all of TRL's loss code, none of its forward pass), so that ratios beyond the clip bounds and
log-prob gradients can be compared token by token. `test_the_whole_way` leaves the forward pass in.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hone.learn.advantages import group_advantages
from hone.learn.kl import kl_estimate
from hone.learn.losses import LOSSES, Clip, sampler_correction
from hone.learn.reduce import token_weights
from hone.model.logprobs import head_logprobs
from hone.recipe.sections.algo import AlgoConfig, KLConfig

LENGTHS = [5, 2, 6, 1, 4, 6, 3, 3]
WIDTH = 6  # the longest completion allowed
REWARDS = [1.0, 0.0, 2.0, 0.5, 0.0, 0.0, 1.0, -1.0]  # two groups of four


def build(kind: str, folder: str, **settings: Any) -> Any:
    pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(30))])}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=32, num_key_value_heads=1, max_position_embeddings=64, **sizes)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():  # a random model is nearly uniform; sharpen it so that log-probs differ
        model.lm_head.weight.mul_(20.0)
    args = getattr(trl, f"{kind}Config")(
        output_dir=folder,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=WIDTH,
        temperature=0.7,
        use_cpu=True,
        bf16=False,
        report_to=[],
        **settings,
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        reward_funcs=lambda completions, **columns: REWARDS,
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w1 w2 w3", "w5"] * 4}),
        processing_class=tokenizer,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


@pytest.fixture(scope="module")
def grpo_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build("GRPO", str(tmp_path_factory.mktemp("grpo")), beta=0.0)


@pytest.fixture(scope="module")
def rloo_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build("RLOO", str(tmp_path_factory.mktemp("rloo")), beta=0.0)


PROMPTS = [{"prompt": "w1 w2 w3"}] * 4 + [{"prompt": "w5"}] * 4


def tokens(off_policy: bool = True) -> SimpleNamespace:
    """Padded [B, WIDTH] log-probs and the same flat [N]; old ones far enough to clip on both sides."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    logprobs = -3 * torch.rand(len(LENGTHS), WIDTH, generator=generator, dtype=torch.float64) - 0.1
    noise = 0.5 * torch.randn(logprobs.shape, generator=generator, dtype=torch.float64)
    per_sample = torch.randn(len(LENGTHS), 1, generator=generator, dtype=torch.float64)
    return SimpleNamespace(
        mask=mask,
        logprobs=logprobs,
        old=logprobs + noise + 0.3 * per_sample if off_policy else None,
        ref=logprobs + noise.flip(0),
        advantages=torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64),
        samples=mask.nonzero()[:, 0],
    )


def trl_loss(trainer: Any, data: SimpleNamespace, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient [N] per log-prob from TRL's `_compute_loss`; settings replace the trainer's."""
    leaf = data.logprobs.clone().requires_grad_()
    inputs = {
        "prompt_ids": torch.ones(len(LENGTHS), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.int64),
        "completion_ids": torch.ones(len(LENGTHS), WIDTH, dtype=torch.int64),
        "completion_mask": data.mask.long(),
        "advantages": data.advantages,
        "num_items_in_batch": data.mask.sum(),
        "ref_per_token_logps": data.ref,
        **({} if data.old is None else {"old_per_token_logps": data.old}),
    }
    inputs.update(settings.pop("inputs", {}))
    entropies = torch.zeros_like(leaf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "_get_per_token_logps_and_entropies", lambda *a, **k: (leaf, entropies, None))
        for name, value in settings.items():
            patch.setattr(trainer if hasattr(trainer, name) else trainer.args, name, value)
        loss = trainer._compute_loss(trainer.model, inputs)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss, grad[data.mask]


def our_loss(
    data: SimpleNamespace, loss: str, reduction: str, kl_coef: float = 0.0, factor: Any = 1.0, *, clip: Clip
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    leaf = data.logprobs[data.mask].clone().requires_grad_()
    old = None if data.old is None else data.old[data.mask]
    per_token, cut = LOSSES[loss](leaf, old, data.advantages[data.samples], data.samples, clip)
    per_token = factor * per_token + kl_coef * kl_estimate(leaf, data.ref[data.mask], "k3")
    weights = torch.from_numpy(token_weights(LENGTHS, reduction, WIDTH))[data.samples]
    total = (weights * per_token).sum()
    (grad,) = torch.autograd.grad(total, leaf)
    return total, grad, cut


def assert_same(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    assert theirs[1].abs().max() > 1e-3  # there is something to compare
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(ours[1], theirs[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("loss_type", "reduction"), [("grpo", "sequence_mean"), ("dr_grpo", "constant"), ("dapo", "token_mean")]
)
@pytest.mark.parametrize("off_policy", [False, True])
def test_clipped(grpo_trainer: Any, loss_type: str, reduction: str, off_policy: bool) -> None:
    data = tokens(off_policy)
    ours = our_loss(data, "clipped", reduction, clip=Clip(0.2, 0.28))
    assert bool(ours[2].any()) == off_policy
    assert_same(ours, trl_loss(grpo_trainer, data, loss_type=loss_type, epsilon_low=0.2, epsilon_high=0.28))


def test_dual_clip(grpo_trainer: Any) -> None:
    data = tokens()
    ours = our_loss(data, "clipped", "sequence_mean", clip=Clip(0.2, 0.2, 1.4))
    plain = our_loss(data, "clipped", "sequence_mean", clip=Clip(0.2, 0.2))
    assert (ours[2] & ~plain[2]).any()  # it bites
    assert_same(ours, trl_loss(grpo_trainer, data, loss_type="grpo", epsilon_low=0.2, epsilon_high=0.2, delta=1.4))


def test_kl_in_the_loss(grpo_trainer: Any) -> None:
    data = tokens()
    ours = our_loss(data, "clipped", "sequence_mean", kl_coef=0.3, clip=Clip(0.2, 0.2))
    settings = {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.3}
    # TRL's default multiplies the KL term by rho; DeepSeekMath, and we, do not.
    assert_same(ours, trl_loss(grpo_trainer, data, use_bias_correction_kl=False, **settings))


@pytest.mark.parametrize(("loss_type", "reduction"), [("grpo", "sequence_mean"), ("dapo", "token_mean")])
def test_gspo(grpo_trainer: Any, loss_type: str, reduction: str) -> None:
    # TRL's sequence form against our per-token one: the same loss and, summed over a sample, the same gradient.
    data = tokens()
    ours = our_loss(data, "gspo", reduction, clip=Clip(0.1, 0.1))
    assert ours[2].any()
    assert not ours[2].all()
    theirs = trl_loss(
        grpo_trainer,
        data,
        loss_type=loss_type,
        importance_sampling_level="sequence",
        epsilon_low=0.1,
        epsilon_high=0.1,
    )
    assert_same(ours, theirs)


def test_cispo(grpo_trainer: Any) -> None:
    # TRL's epsilon_high is the bound of the weight itself, ours its distance from 1; it has no lower bound.
    data = tokens()
    ours = our_loss(data, "cispo", "token_mean", clip=Clip(1.0, 0.25))
    assert ours[2].any()
    assert_same(ours, trl_loss(grpo_trainer, data, loss_type="cispo", epsilon_high=1.25))


def test_sampler_correction_multiplies_the_loss(grpo_trainer: Any) -> None:
    # The weights are made in TRL's generation (vLLM only), so here only their use is compared.
    data = tokens()
    sampled = data.old + 0.4 * torch.randn(data.old.shape, generator=torch.Generator().manual_seed(5)).double()
    weights = sampler_correction(data.old, sampled, "tis", 1.5)
    ours = our_loss(data, "clipped", "sequence_mean", factor=weights[data.mask], clip=Clip(0.2, 0.2))
    theirs = trl_loss(
        grpo_trainer,
        data,
        loss_type="grpo",
        epsilon_low=0.2,
        epsilon_high=0.2,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        inputs={"importance_sampling_ratio": weights},
    )
    assert_same(ours, theirs)


def ours_for(name: str, kl: Any = None, coef: float = 0.0) -> np.ndarray:
    algo = AlgoConfig(advantage=name, kl=KLConfig(coef=coef, estimator="k1", place="reward"))
    rewards = [np.array(REWARDS[:4]), np.array(REWARDS[4:])]
    lengths = [[1] * 4, [1] * 4] if kl is None else [[len(x) for x in group] for group in kl]
    return np.array([sample[0] for group in group_advantages(rewards, lengths, algo, kl) for sample in group])


def test_group_advantages(grpo_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_trainer, "scale_rewards", "none")
    centred = grpo_trainer._generate_and_score_completions(PROMPTS)["advantages"].numpy()
    np.testing.assert_allclose(ours_for("dr_grpo"), centred, atol=1e-6)
    # TRL divides by std + 1e-4, we by std + 1e-6.
    monkeypatch.setattr(grpo_trainer, "scale_rewards", "group")
    scaled = grpo_trainer._generate_and_score_completions(PROMPTS)["advantages"].numpy()
    std = np.repeat([np.std(REWARDS[:4], ddof=1), np.std(REWARDS[4:], ddof=1)], 4)
    np.testing.assert_allclose(ours_for("grpo") * (std + 1e-6), scaled * (std + 1e-4), atol=1e-6)


def test_rloo_advantages(rloo_trainer: Any) -> None:
    theirs = rloo_trainer._generate_and_score_completions(PROMPTS)["advantages"].numpy()
    np.testing.assert_allclose(ours_for("rloo"), theirs, atol=1e-6)


def test_rloo_on_policy_gradient(rloo_trainer: Any) -> None:
    # TRL's loss is one ratio per sequence, the sum of log-probs, and the mean over samples. On-policy its
    # gradient is -A per token over S: our constant reduction without the factor 1 / WIDTH.
    data = tokens(off_policy=False)
    old = (data.logprobs * data.mask).sum(1)
    theirs = trl_loss(rloo_trainer, data, inputs={"old_logps": old})
    ours = our_loss(data, "clipped", "constant", clip=Clip(0.2, 0.2))
    torch.testing.assert_close(ours[1] * WIDTH, theirs[1], atol=1e-6, rtol=0)
    assert theirs[1].abs().max() > 1e-3


def test_the_whole_way(grpo_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled by TRL, scored by TRL, its forward pass and loss: parameters get the gradient that ours gives."""
    for name, value in {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28, "beta": 0.1}.items():
        monkeypatch.setattr(grpo_trainer, name, value)
    monkeypatch.setattr(grpo_trainer.args, "use_bias_correction_kl", False)
    model = grpo_trainer.model
    monkeypatch.setattr(grpo_trainer, "ref_model", model)
    torch.manual_seed(0)
    batch = grpo_trainer._generate_and_score_completions(PROMPTS)
    mask = batch["completion_mask"].bool()
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    batch["ref_per_token_logps"] = batch["ref_per_token_logps"] + 0.3 * noise
    batch["old_per_token_logps"] = batch["ref_per_token_logps"] + 0.3 * noise.flip(0)
    model.zero_grad()
    theirs = grpo_trainer._compute_loss(model, batch)
    theirs.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}

    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    hidden = model.model(input_ids=ids, attention_mask=attention).last_hidden_state
    before = hidden[:, -mask.shape[1] - 1 : -1]  # the state that predicts each completion token
    logprobs, _ = head_logprobs(model, before[mask], batch["completion_ids"][mask], temperature=0.7)
    samples = mask.nonzero()[:, 0]
    per_token, cut = LOSSES["clipped"](
        logprobs,
        batch["old_per_token_logps"][mask],
        batch["advantages"][samples],
        samples,
        Clip(0.2, 0.28),
    )
    assert 0 < cut.float().mean() < 1
    per_token = per_token + 0.1 * kl_estimate(logprobs, batch["ref_per_token_logps"][mask], "k3")
    weights = torch.from_numpy(token_weights(mask.sum(1).tolist(), "token_mean")).float()
    model.zero_grad()
    ours = (weights[samples] * per_token).sum()
    ours.backward()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert max(g.abs().max() for g in expected.values()) > 1e-3
    for name, parameter in model.named_parameters():
        scale = max(1.0, expected[name].abs().max().item())
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-6 * scale, rtol=0)
