"""What happens between the turns of a rollout: environments, tools, and the exact tokens of a conversation."""
