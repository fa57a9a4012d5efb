"""The one interface that every rollout engine offers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hone.base.settings import UserError
from hone.base.visible import visible
from hone.recipe.sections.rollout import SamplingConfig
from hone.types import IntArray, Turn

if TYPE_CHECKING:
    from hone.learn.policy import Policy

#: Reports an unusual event: (kind, message). `hone.runs.writer.RunWriter.event` is one.
Event = Callable[[str, str], None]


#: The kind of events that only runs report: in the output of other commands they would be noise.
FIRST_USE = "decode_kernel_compiled"


def print_event(kind: str, message: str) -> None:
    """The `Event` for calls outside a run."""
    if kind != FIRST_USE:
        print(visible(f"{kind}: {message}"), file=sys.stderr)


class Engine(Protocol):
    def generate(
        self,
        prompts: Sequence[IntArray],
        sampling: SamplingConfig,
        *,
        samples: int,
        seed: int,
        progress: Callable[[int, int], None] | None = None,
        stream_ids: Sequence[int] | None = None,
    ) -> list[list[Turn]]:
        """Sample `samples` completions for each prompt.

        Randomness: sample g of prompt p draws from a counter-based stream keyed by
        (seed, stream_ids[p], g, token position), so a completion does not depend on the rest of the batch.
        `stream_ids` [P]: by default 0, 1, 2, ...
        `progress(done, total)` is called as sequences finish. Returns [P][G] turns.
        Raises UserError for a prompt that leaves no room for a completion.
        """
        ...

    @property
    def context(self) -> int | None:
        """The most tokens of prompt and completion together; None: no limit is known."""
        ...

    def sync(self, policy: Policy, version: int) -> object:
        """Serve these weights from now on; the policy_version of later turns is `version`."""
        ...


@dataclass(frozen=True, slots=True)
class Weights:
    """An engine's report on its tensors."""

    digests: Mapping[str, int]  # name -> `hone.rollout.servers.inside.hone_worker.digest`
    dtypes: Mapping[str, str]  # name -> as in "bfloat16"; the policy's tensor is rounded to it before comparing
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)  # "qkv_proj" -> ("q_proj", "k_proj", "v_proj")
    adapter: bool = False  # with `layer.lora_A.weight` and `layer.lora_B.weight` (B times alpha / rank) beside the base


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """The properties of the policy's model that a server needs."""

    stop_ids: tuple[int, ...] = ()  # tokens that end a completion
    dtype: str = "float32"
    vocabulary: int | None = None  # number of token ids; None: not known

    @classmethod
    def of(cls, policy: Policy) -> ModelTraits:
        dtype = str(policy.model.dtype).removeprefix("torch.")
        stops = tuple(int(i) for i in policy.stop_ids)
        return cls(stops, dtype, policy.model.config.get_text_config().vocab_size)


def check_tokens(prompts: Sequence[IntArray], vocabulary: int | None) -> None:
    """Raises UserError unless every id of every prompt [P][Lp] is below `vocabulary` (None: not known).

    Servers do not check: an id beyond the embedding table crashes SGLang, and one in the padding between the vocabulary
    and the table's size is answered with noise.
    """
    if vocabulary is None:
        return
    for i, prompt in enumerate(prompts):
        if len(prompt) and not (prompt.min() >= 0 and prompt.max() < vocabulary):
            wrong = int(next(token for token in prompt if not 0 <= token < vocabulary))
            raise UserError(
                f"prompt {i} contains the token id {wrong}, and the model has the ids 0 to {vocabulary - 1}: the "
                "tokenizer has tokens that the model does not know; use the tokenizer of this model"
            )


def check_room(lengths: Sequence[int], max_tokens: int, context: int | None) -> None:
    """Raises UserError unless each prompt ([P] lengths) and its completion fit the context (None: not known)."""
    for i, length in enumerate(lengths):
        if length == 0:
            raise UserError(f"prompt {i} is empty: give it at least one token")
        if context is None or length + max_tokens <= context:
            continue
        if length >= context:
            raise UserError(
                f"prompt {i} has {length} tokens and leaves no room for a completion in the context of {context} "
                "tokens: shorten or drop it"
            )
        raise UserError(
            f"prompt {i} has {length} tokens and may be followed by {max_tokens}: {length + max_tokens} do not fit the "
            f"context of {context} tokens; set sampling.max_tokens to {context - length} or less, or shorten the prompt"
        )
