"""PPO's value head: an estimate of the return at every trained token, from the policy's hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hone.learn.losses import value_loss
from hone.recipe.sections.algo import ValueConfig
from hone.types import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ValueHead(torch.nn.Linear):
    """Hidden states [N, D] -> values [N, 1]; initialised to 0."""

    def __init__(self, model: PreTrainedModel, config: ValueConfig) -> None:
        super().__init__(model.config.get_text_config().hidden_size, 1, device=model.device)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)
        self.config = config

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """Values [N], in float32."""
        column: torch.Tensor = self(hidden.float())
        return column[:, 0]

    def loss(self, batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        """The loss of this micro-batch, a scalar; its gradient reaches the head alone. 0 without targets."""
        if batch.old_values is None or batch.value_targets is None:
            return hidden.new_zeros(())
        losses = value_loss(self.values(hidden.detach()), batch.old_values, batch.value_targets, self.config.clip)
        return (batch.weights * losses).sum()
