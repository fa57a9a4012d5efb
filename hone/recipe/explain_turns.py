"""The part of `hone explain` on rollouts with several turns."""

from __future__ import annotations

from hone.recipe.recipe import TrainedStage
from hone.recipe.sections.algo import AlgoConfig


def turns(stage: TrainedStage) -> list[str]:
    """The course of an episode, and which of its tokens are trained; empty for tasks that are answered in one turn."""
    if not stage.has_turns:
        return []
    environment, name = stage.environment, stage.environment.name
    what = ", ".join(name.values()) if isinstance(name, dict) else name
    answers = [f"the environment {what}"] if what else []
    if environment.is_program:
        played = f"the program `{' '.join(environment.program)}`" if environment.program else answers[0]
        where = "in bubblewrap" if environment.contained else "with your rights"
        answers = [f"{played}, in a process ({where}) for each rollout,"]
    answers += [f"the tool{'s' * (len(stage.tools) > 1)} {', '.join(stage.tools)}"] if stage.tools else []
    verb = "answer" if len(answers) > 1 or (not what and len(stage.tools) > 1) else "answers"
    rewriter = "the template or the program" if environment.is_program else "the template"
    limit = environment.max_tokens
    room = f"{limit} tokens (environment.max_tokens)" if limit else "the model's context"
    return [
        f"an episode has at most {environment.max_turns} turns of at most {stage.sampling.max_tokens} tokens; "
        f"{' and '.join(answers)} {verb}; prompt, turns and replies together fit {room}",
        "the sampled tokens of every turn are trained; replies, and text that the chat template inserts, are read but "
        f"not trained; if {rewriter} rewrites earlier messages, the following turns are another sample with the same "
        "advantage",
    ]


def turn_advantage(algo: AlgoConfig) -> list[str]:
    """The advantage with `credit: turn`."""
    scale = " / (std + 1e-6)" if algo.advantage == "grpo" else ""
    return [
        f"A_t = sum over the turn k of token t and later turns of (r_k - mean){scale}",
        "r_k: the environment's reward for turn k, weighted; all other parts of the reward belong to the last turn",
        f"mean{' and std' if scale else ''} over all turns of the group's answers (DeepSeekMath, arXiv:2402.03300, "
        "section 4.1.3)",
    ]
