"""On-policy distillation: its advantages by hand, its gradient by brute force, its refusal of other tokens."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hone.base.settings import UserError
from hone.learn.policy import Policy
from hone.learn.samples import to_samples
from hone.model.load import load_tokenizer
from hone.model.tiny import create, train_tokenizer
from hone.recipe.sections.algo import AlgoConfig
from hone.recipe.sections.model import ModelConfig
from hone.recipe.sections.rollout import SamplingConfig
from hone.stages import teacher as onpolicy
from hone.types import Group, Problem, Reward, Rollout, Turn
from tests.learn.policies import OPTIM, TINY, load, make_groups, packer

VOCABULARY = TINY.vocab_size
SAMPLING = SamplingConfig(max_tokens=16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student and a teacher, of other weights and another size."""
    base = tmp_path_factory.mktemp("models")
    create(base / "student", TINY, ["Zoey is a knight."] * 3, seed=0)
    create(base / "teacher", TINY.model_copy(update={"layers": 1}), ["Zoey is a knight."] * 3, seed=1)
    return base / "student", base / "teacher"


def logprobs(model: torch.nn.Module, ids: np.ndarray, temperature: float) -> tuple[torch.Tensor, torch.nn.Module]:
    """[L - 1, V] as any reader of the model's definition would compute them, without our attention or packing."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation="eager").eval()
    plain.load_state_dict(model.state_dict())
    plain.train(False)
    logits = plain(torch.as_tensor(ids)[None]).logits[0, :-1]
    return torch.log_softmax(logits / temperature, dim=-1), plain


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_advantages_are_teacher_less_student(folders: tuple[Path, Path], temperature: float) -> None:
    student, teacher = (load(folder) for folder in folders)
    groups = make_groups([[0.0, 1.0], [0.0, 0.0]])
    sampling = SAMPLING.model_copy(update={"temperature": temperature})
    batch = onpolicy.teacher_batch(groups, student, teacher.model, AlgoConfig(), sampling, packer(64))
    every = []
    for sample in batch.samples:
        first, n = sample.prompt_len - 1, len(sample.token_ids) - sample.prompt_len
        at = np.arange(first, first + n)
        chosen = torch.as_tensor(sample.token_ids[first + 1 :])
        p, q = (logprobs(m.model, sample.token_ids, temperature)[0][at, chosen].detach() for m in (student, teacher))
        np.testing.assert_allclose(sample.advantages[sample.trained], (q - p).numpy(), atol=2e-5)
        every += (p - q).tolist()
    assert batch.metrics["teacher/kl"] == pytest.approx(np.mean(every), abs=1e-5)
    assert np.std(every) > 0.1
    # Every answer is trained on, whatever its reward, and the loss is -mean(A): the ratio is 1.
    assert sum(len(b.targets) for u in batch.minibatches for b in u) == len(every)
    stats = student.update(batch.minibatches, AlgoConfig(), temperature)
    assert stats.loss == pytest.approx(np.mean(every), abs=1e-5)


def test_the_expected_gradient_is_that_of_the_reverse_kl(folders: tuple[Path, Path]) -> None:
    """All answers of one token to a prompt, each weighted by its probability: the whole expectation, no sampling."""
    student, teacher = (load(folder) for folder in folders)
    prompt = np.asarray([7, 50, 91, 12])
    whole = np.append(prompt, 0)
    log_p, plain = logprobs(student.model, whole, 1.0)
    log_q = logprobs(teacher.model, whole, 1.0)[0].detach()
    kl = (log_p[-1].exp() * (log_p[-1] - log_q[-1])).sum()
    kl.backward()
    wanted = torch.cat([p.grad.flatten() for p in plain.parameters()])

    turns = [Turn(prompt, np.asarray([v]), np.zeros(1, np.float32), "stop", 0) for v in range(VOCABULARY)]
    rollouts = tuple(Rollout("p", v, (turn,), "") for v, turn in enumerate(turns))
    problem = Problem("p", "t", ({"role": "user", "content": "?"},), None)
    group = Group(problem, rollouts, tuple(Reward(0.0, {}, "wrong") for _ in rollouts))
    batch = onpolicy.teacher_batch([group], student, teacher.model, AlgoConfig(), SAMPLING, packer(10_000))
    probability = log_p[-1].detach().exp()
    (updates,) = batch.minibatches
    weighted = [replace(b, weights=probability[b.targets]) for b in updates]
    found = gradient_of(student, weighted)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-3)
    assert float(wanted.norm()) > 0.01
    assert float(torch.dot(found, wanted)) > 0.999 * float(wanted.norm()) ** 2


def gradient_of(policy: Policy, batches: list) -> torch.Tensor:
    """What one update would follow: the optimizer only keeps the gradients."""
    kept: list[torch.Tensor] = []
    policy.optimizer.step = lambda *_: kept.extend(p.grad.flatten().clone() for p in policy.parameters)  # type: ignore
    policy.update([batches], AlgoConfig(), 1.0)
    return torch.cat(kept)


def test_a_student_learns_its_teacher(folders: tuple[Path, Path]) -> None:
    """The exact KL at the places of fixed answers falls; with the sign flipped it would rise."""
    student = load(folders[0], OPTIM.model_copy(update={"lr": 3e-3, "grad_clip": 1.0}))
    teacher = load(folders[1]).model
    rng = np.random.default_rng(0)
    ids = rng.integers(5, 290, 12)

    def exact() -> float:
        log_p, log_q = (logprobs(m, ids, 1.0)[0].detach() for m in (student.model, teacher))
        return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())

    before = exact()
    for _ in range(15):
        log_p = logprobs(student.model, ids, 1.0)[0].detach().exp().numpy().astype(np.float64)
        rollouts = []
        for at in range(4, len(ids)):
            drawn = rng.choice(VOCABULARY, size=16, p=log_p[at - 1] / log_p[at - 1].sum())
            turns = [Turn(ids[:at], np.asarray([v]), np.zeros(1, np.float32), "stop", 0) for v in drawn]
            rollouts.append(tuple(Rollout(f"p{at}", g, (turn,), "") for g, turn in enumerate(turns)))
        problem = Problem("p", "t", ({"role": "user", "content": "?"},), None)
        groups = [Group(problem, r, tuple(Reward(0.0, {}, "wrong") for _ in r)) for r in rollouts]
        batch = onpolicy.teacher_batch(groups, student, teacher, AlgoConfig(), SAMPLING, packer(4096))
        student.update(batch.minibatches, AlgoConfig(), 1.0)
    assert exact() < 0.8 * before


def test_several_updates_have_ratios(folders: tuple[Path, Path]) -> None:
    student, teacher = (load(folder) for folder in folders)
    algo = AlgoConfig(updates_per_rollout=2)
    batch = onpolicy.teacher_batch(make_groups([[0.0], [1.0]]), student, teacher.model, algo, SAMPLING, packer(64))
    assert len(batch.minibatches) == 2
    assert all(b.old_logprobs is not None for u in batch.minibatches for b in u)


def test_another_tokenizer_is_refused(folders: tuple[Path, Path]) -> None:
    student = load_tokenizer(ModelConfig(path=str(folders[0])))
    onpolicy.check_same_tokens(student, load_tokenizer(ModelConfig(path=str(folders[1]))), "the teacher")
    other = train_tokenizer(["something else entirely, with other merges"] * 9, VOCABULARY)
    with pytest.raises(
        UserError, match=r"teacher: big has another tokenizer than the student \(\d+ tokens differ; token"
    ):
        onpolicy.check_same_tokens(student, other, "big")


def test_samples_keep_their_tokens(folders: tuple[Path, Path]) -> None:
    """Tokens in, tokens out: only advantages are added."""
    groups = make_groups([[0.0, 1.0]])
    samples = [s for group in groups for s in to_samples(group)]
    values = [np.arange(int(s.trained.sum()), dtype=np.float32) for s in samples]
    judged = onpolicy.teacher_advantages(samples, values, [v * 3 for v in values])
    for sample, made, v in zip(samples, judged, values, strict=True):
        assert (made.token_ids == sample.token_ids).all()
        assert made.advantages[made.trained].tolist() == (2 * v).tolist()
        assert not made.advantages[~made.trained].any()
