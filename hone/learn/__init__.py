"""From groups to new weights: advantages, losses, packing, the policy and its checkpoints."""
