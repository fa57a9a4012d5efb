"""The guard against silently wrong models: three computations of the same log-probs must agree before a run.

    check_model(model, event)       # raises UserError; takes seconds once per model, then nothing

hone plugs its own attention into third-party models, packs sequences into one row, computes log-probs from hidden
states and generates with its own cache. If an architecture has a feature that this ignores (a window, a mask, a cap on
the logits, noise in train mode), nothing fails, but the numbers are wrong. So the engine answers two prompts of
different lengths, and the log-probs of these answers are compared:

1. `packed`: as computed by an update, sequences packed with a shared prompt, in the mode of an update
2. `engine`: as returned by the engine with the tokens
3. `own`: the model's own eager forward pass over each sequence alone, in eval mode

An agreement is stored in the user's cache folder, keyed by everything that it depends on except the weights.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from hone.base import streams
from hone.base.settings import UserError
from hone.learn.forward import fast_layers, packed_logprobs, to_device
from hone.learn.pack import Packer
from hone.learn.samples import supervised_sample
from hone.learn.totals import split_by_sample
from hone.model import attention, compiled
from hone.model.limits import longest_exact
from hone.model.load import load_model
from hone.model.scoring import WINDOWS
from hone.model.update_mode import update_mode
from hone.recipe.sections.model import ModelConfig
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
from hone.rollout.engine import Event, print_event
from hone.rollout.native.engine import NativeEngine
from hone.types import FloatArray, IntArray, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hone.learn.policy import Policy

#: Largest mean |difference| of log-probs, nats per token, between two of the three. Exact models differ by up to 1e-5
#: in float32 (tests/test_families.py); in bfloat16 each rounds differently.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.08}
#: Tokens of the two prompts, tokens of an answer, and answers to each prompt. Sequences beyond the model's limit cannot
#: be exact; they are refused elsewhere and not tried here.
PROMPTS, ANSWER, ANSWERS = (9, 70), 12, 2
#: Windows and chunks are shortened to this for the comparison, so that they act: the first answers reach its end.
WINDOW = 16


@dataclass(frozen=True, slots=True)
class Agreement:
    """Mean log-probs of the same tokens, computed in three ways, and the distance of two from the model's own."""

    packed: float
    engine: float
    own: float
    packed_gap: float  # mean |difference| to the model's own
    engine_gap: float
    tokens: int

    @property
    def gap(self) -> float:
        """The larger of the two; nan if either is."""
        return float(np.maximum(self.packed_gap, self.engine_gap))


def check_model(model: PreTrainedModel, event: Event = print_event) -> Agreement | None:
    """Check a model: raises UserError unless all three computations agree. Returns None if an earlier check passed.

    The model, its mode and all random state are unchanged. `event` is called if the result cannot be stored.
    """
    key = _key(model)
    if _path(key).exists():
        return None
    agreement = _measured(model)
    tolerance = TOLERANCE.get(str(model.dtype).removeprefix("torch."), TOLERANCE["bfloat16"])
    if not agreement.gap <= tolerance:  # also if it is nan
        raise UserError(_disagreement(model, agreement, tolerance))
    _remember(key, {"model": type(model).__name__, **asdict(agreement)}, event)
    return agreement


def check_policy(policy: Policy) -> None:
    """As `check_model`, for a policy that may be spread over processes. Every process calls it."""
    model, world = policy.model, policy.world
    if not world.on_main(lambda: is_known(model), "whether the model is known to be exact"):
        check_model(policy.gathered_model())


def is_known(model: PreTrainedModel) -> bool:
    """Whether an earlier check found this model exact."""
    return _path(_key(model)).exists()


def check_path(config: ModelConfig, event: Event = print_event) -> None:
    """As `check_model`, for dry runs: loads the model only if no earlier check passed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if (Path(config.path) / "config.json").exists():
        settings = AutoConfig.from_pretrained(config.path)
        kind = AutoModelForCausalLM._model_mapping.get(type(settings), None)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        modes = {"recompute": config.recompute_activations, "compile": config.compile}
        key = fingerprint(settings, kind, f"torch.{config.dtype}", device, modes)
        if _path(key).exists():
            return
    check_model(load_model(config), event)


def measure(model: PreTrainedModel) -> Agreement:
    """Compare the three computations."""
    with _short_windows(model):
        turns = _answers(model, longest_exact(model.config))
        packed, engine = _packed(model, turns), np.concatenate([turn.logprobs for turn in turns])
        own = _own(model, turns)
    gaps = [float(np.abs(values.astype(np.float64) - own).mean()) for values in (packed, engine)]
    return Agreement(float(packed.mean()), float(engine.mean()), float(own.mean()), gaps[0], gaps[1], len(own))


def _measured(model: PreTrainedModel) -> Agreement:
    """`measure`, with errors of the model's code raised as UserError: it may not support another attention."""
    try:
        return measure(model)
    except (UserError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # any exception: the model's code is from transformers or the hub
        first = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"{type(model).__name__} ({model.config.get_text_config().model_type}) cannot run with hone's attention: "
            f"{type(error).__name__}: {first}; choose another model (docs/models.md lists those that are exact)"
        ) from error


# --- three ways ------------------------------------------------------------------------------------------------------


def _answers(model: PreTrainedModel, limit: int | None) -> list[Turn]:
    """Sample two answers to each prompt at temperature 1, without stop tokens."""
    answer = ANSWER if limit is None else max(1, min(ANSWER, limit // 2))
    room = max(PROMPTS) if limit is None else max(1, limit - answer)
    prompts = [_tokens(model, min(length, room), n) for n, length in enumerate(PROMPTS)]
    engine = NativeEngine(model, (), RolloutConfig(), event=_silent)
    groups = engine.generate(
        prompts, SamplingConfig(max_tokens=answer), samples=ANSWERS, seed=streams.answers("model check")
    )
    return [turn for group in groups for turn in group]


def _tokens(model: PreTrainedModel, count: int, seed: int) -> IntArray:
    """Draw [count] random tokens, none with a meaning in the config (padding may be masked)."""
    text = model.config.get_text_config()
    size = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    named = {value for name, value in text.to_dict().items() if name.endswith("token_id") and isinstance(value, int)}
    rng = streams.generator("probe tokens", probe=seed)
    drawn = rng.permutation(size)[: count + len(named) + 1] if size < 1 << 20 else rng.integers(0, size, 2 * count)
    usable = [int(token) for token in drawn if int(token) not in named] or [0]
    return np.resize(np.asarray(usable, np.int64), count)


def _packed(model: PreTrainedModel, turns: list[Turn]) -> FloatArray:
    """Log-probs [N] as in an update: with a graph, shared prompts, and two different prompts in one row."""
    samples = [
        supervised_sample(f"probe {i // ANSWERS}", turn.prompt_ids, turn.completion_ids) for i, turn in enumerate(turns)
    ]
    by_sample: dict[int, FloatArray] = {}
    for batch in Packer(1 << 30)(samples, [0.0] * len(samples)):
        with fast_layers(model), update_mode(model):
            logprobs = packed_logprobs(model, to_device(batch, model.device), 1.0).logprobs
        by_sample |= dict(split_by_sample(batch, logprobs.detach().float().cpu().numpy()))
    return np.concatenate([by_sample[i] for i in range(len(turns))])


@torch.no_grad()
def _own(model: PreTrainedModel, turns: list[Turn]) -> FloatArray:
    """Log-probs [N] by the model's own code, one sequence at a time."""
    parts = []
    with own_attention(model):
        for turn in turns:
            ids = torch.as_tensor(np.concatenate([turn.prompt_ids, turn.completion_ids]), device=model.device)
            logits = model(input_ids=ids[None], use_cache=False).logits[0, len(turn.prompt_ids) - 1 : -1]
            targets = ids[len(turn.prompt_ids) :, None]
            parts.append(logits.float().log_softmax(-1).gather(1, targets)[:, 0].cpu().numpy())
    return np.concatenate(parts)


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Context manager in which the model uses its own plain attention ("eager"), in eval mode."""
    ours = [c for c in _configs(model) if getattr(c, "_attn_implementation", None) == attention.NAME]
    modes = [(module, module.training) for module in model.modules()]
    try:
        for config in ours:
            config._attn_implementation = "eager"
        model.eval()
        yield
    finally:
        for config in ours:
            config._attn_implementation = attention.NAME
        for module, training in modes:
            module.training = training


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Context manager in which windows and chunks have at most WINDOW tokens: one of 4096 would need sequences of
    4096."""
    entries = [(config, name) for config in _configs(model) for name in WINDOWS.values()]
    before = [(config, name, size) for config, name in entries if isinstance(size := getattr(config, name, None), int)]
    try:
        for config, name, size in before:
            setattr(config, name, min(size, WINDOW))
        yield
    finally:
        for config, name, size in before:
            setattr(config, name, size)


def _configs(model: PreTrainedModel) -> list[Any]:
    """The config of the model and those of its parts, each once."""
    return list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())


def _disagreement(model: PreTrainedModel, agreement: Agreement, tolerance: float) -> str:
    gaps = {"training": agreement.packed_gap, "sampling": agreement.engine_gap}
    where = " and ".join(name for name, gap in gaps.items() if not gap <= tolerance).capitalize()
    dtype = str(model.dtype).removeprefix("torch.")
    rounding = "" if dtype == "float32" else "; model.dtype: float32 shows whether it is rounding"
    return (
        f"{type(model).__name__} ({model.config.get_text_config().model_type}) is not computed exactly: mean log-prob "
        f"of {agreement.tokens} tokens packed as in training {agreement.packed:.5f}, of the engine "
        f"{agreement.engine:.5f}, of the model's own eager forward {agreement.own:.5f}; mean |difference| to its own "
        f"{agreement.packed_gap:.3g} and {agreement.engine_gap:.3g}, allowed {tolerance:g} in {dtype}. {where} "
        f"would be silently wrong, so nothing was started: choose another model (docs/models.md lists "
        f"those that are exact){rounding}"
    )


# --- stored results --------------------------------------------------------------------------------------------------


def fingerprint(config: Any, kind: Any, dtype: str, device: str, modes: dict[str, bool]) -> str:
    """Hash everything that the result depends on except the weights: code, versions, config, precision, device."""
    settings = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    source = inspect.getsourcefile(kind) if inspect.isclass(kind) else None
    parts = {
        "hone": _own_code(),
        "code": hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else repr(kind),
        "versions": [transformers.__version__, torch.__version__],
        "config": {k: v for k, v in settings.items() if k not in ("dtype", "torch_dtype")},
        "run": [dtype, device, torch.cuda.get_device_name() if device == "cuda" else "", modes],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:32]


@cache
def _own_code() -> str:
    """Hash the source files that compute: hone/model, the native engine, the trainer's forward pass, this file."""
    root = Path(__file__).parents[1]
    files = [Path(__file__), root / "learn" / "forward.py", root / "learn" / "pack.py"]
    files += [*sorted((root / "model").glob("*.py")), *sorted((root / "rollout" / "native").iterdir())]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files if f.suffix)).hexdigest()


def _modes(model: PreTrainedModel) -> dict[str, bool]:
    recompute = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    return {"recompute": recompute, "compile": compiled.is_compiled(model)}


def _key(model: PreTrainedModel) -> str:
    kind = next((k for k in type(model).__mro__ if not k.__name__.startswith("FSDP")), type(model))
    return fingerprint(model.config, kind, str(model.dtype), model.device.type, _modes(model))


def _path(key: str) -> Path:
    return _folder() / f"{key}.json"


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hone" / "exact"


def _remember(key: str, values: dict[str, Any], event: Event) -> None:
    """Write the file atomically, as other processes may read it."""
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        aside = _folder() / f".{key}.{os.getpid()}"
        aside.write_text(json.dumps(values))
        aside.replace(_path(key))
    except OSError as error:
        event("exactness", f"the model is exact, but that cannot be stored in {_folder()}: {error}")


def _silent(kind: str, message: str) -> None:
    """Ignore events: the run's engine reports them again."""
