"""Settings of the objective. Formulas: `hone.learn.advantages`, `losses`, `kl`."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from hone.base import streams
from hone.base.settings import Section


class KLConfig(Section):
    """Penalty for leaving a frozen reference: the model at the start of the stage, or at its last hard reset."""

    coef: NonNegativeFloat = 0.0
    estimator: Literal["k1", "k2", "k3"] = "k3"
    place: Literal["loss", "reward"] = "loss"


class CorrectionConfig(Section):
    """Importance correction between sampler and trainer."""

    kind: Literal["none", "tis", "mis"] = "none"
    cap: PositiveFloat = 2.0


class ValueConfig(Section):
    """PPO's value head (advantage `gae`): a linear layer on the policy's hidden states, which it does not train."""

    lr: PositiveFloat = 1e-3
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    lam: float = Field(default=1.0, ge=0.0, le=1.0)
    clip: PositiveFloat | None = 0.2  # largest change of a value in one step that the loss counts; null: no limit


#: Advantages computed within one group: one number per sample.
WithinGroup = Literal["grpo", "dr_grpo", "rloo"]
#: Advantages whitened over the whole step: one number per token, with the KL penalty of `kl.place: reward` at each.
OverStep = Literal["reinforce_pp", "reinforce_pp_baseline", "gae"]
WITHIN_GROUP: tuple[str, ...] = get_args(WithinGroup)
#: Advantages that compare the samples of a group.
NEEDS_GROUP = (*WITHIN_GROUP, "reinforce_pp_baseline")


class AlgoConfig(Section):
    advantage: Literal[WithinGroup, OverStep] = "grpo"
    loss: Literal["clipped", "gspo", "cispo"] = "clipped"
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.2
    dual_clip: float | None = Field(default=None, gt=1.0)
    credit: Literal["episode", "turn"] = (
        "episode"  # what a turn's tokens earn: the episode's reward, or that from it on
    )
    reduction: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    updates_per_rollout: PositiveInt = 1
    kl: KLConfig = KLConfig()
    entropy_coef: float = 0.0
    correction: CorrectionConfig = CorrectionConfig()
    mask_truncated: bool = False  # leave truncated answers out of the batch (overlong filtering)
    # extra rounds of generation to replace groups without a reward difference
    refill_rounds: Annotated[int, Field(ge=0, lt=streams.ROUNDS)] = 0
    value: ValueConfig = ValueConfig()

    @model_validator(mode="after")
    def _consistent(self) -> AlgoConfig:
        if self.dual_clip is not None and self.dual_clip <= 1.0 + self.clip_high:
            raise ValueError(f"dual_clip {self.dual_clip} must be above 1 + clip_high = {1.0 + self.clip_high}")
        if self.credit == "turn" and (self.advantage not in ("grpo", "dr_grpo") or self.kl.place == "reward"):
            raise ValueError("credit: turn needs advantage grpo or dr_grpo, and kl.place loss; change one of them")
        if self.refill_rounds and self.advantage not in WITHIN_GROUP:
            raise ValueError(
                f"refill_rounds replaces groups of equal rewards, but with advantage {self.advantage} the policy "
                f"learns from them too; set it to 0, or advantage to {' or '.join(WITHIN_GROUP)}"
            )
        return self

    @property
    def divides_by_spread(self) -> bool:
        """Whether advantages are divided by the standard deviation of the group's rewards."""
        return self.advantage == "grpo"

    @property
    def needs_every_sample(self) -> bool:
        """Whether samples with advantage 0 still have a gradient."""
        return (self.kl.coef > 0 and self.kl.place == "loss") or self.entropy_coef != 0 or self.advantage == "gae"


class WatchConfig(Section):
    """When to warn that a run is unhealthy. Means are over `window` steps; "start" is the first `window` steps."""

    window: PositiveInt = 5
    entropy_floor: NonNegativeFloat = 0.02  # nats: below this and below a tenth of the start
    entropy_rise: PositiveFloat = 3.0  # times the start
    length_drop: PositiveFloat = 0.4  # of the start
    duplicate_thinking: PositiveFloat = 0.3  # share of samples with the same thinking for different problems
    kl: PositiveFloat = 1.0  # nats per token
    clip_fraction: PositiveFloat = 0.4
    grad_norm_rise: PositiveFloat = 10.0  # times the median of the steps before
    mismatch: PositiveFloat = 0.1  # mean |log-ratio| of sampler and trainer
    mismatch_k3: PositiveFloat = 0.05  # nats per token, KL of sampler to trainer: also detects a few large ratios
    max_skipped: PositiveInt = 3  # stop after this many steps in a row with a skipped (non-finite) update
    max_unscored: PositiveInt = 3  # stop after this many steps in a row in which the verifier failed on every sample


class StagnationConfig(Section):
    """When validation counts as stagnating: see `hone.recipe.schedule.stagnation`."""

    window: PositiveInt = 3  # validations that are averaged to reduce noise
    tolerance: NonNegativeFloat = 0.01  # smaller gains do not count as an improvement
    patience: PositiveInt = 3  # validations in a row without an improvement


class ResetConfig(Section):
    """Hard resets (Liu et al., ProRL, arXiv:2505.24864): the current model becomes the reference and, with an
    adapter, the base; optimizer and adapter start afresh. `hone reset RUN` asks for one by hand."""

    at: Annotated[tuple[PositiveInt, ...], Field(max_length=streams.RESETS)] = ()  # before these steps
    on_stagnation: StagnationConfig | None = None  # when validation, measured each `eval.every` steps, stagnates
    limit: PositiveInt | None = None  # most resets on stagnation; null: no limit

    @model_validator(mode="after")
    def _rising(self) -> ResetConfig:
        if list(self.at) != sorted(set(self.at)):
            raise ValueError(f"at: {list(self.at)} must increase; give each step once, in order")
        return self
