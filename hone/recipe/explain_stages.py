"""The part of `hone explain` on the stages other than reinforcement learning.

teacher     the model of stage rl
answers     5 to each of all train problems, at temperature 1, of at most 2,048 tokens
kept        of the right answers that are not cut off: the shortest
"""

from __future__ import annotations

from hone.recipe.explain_phases import Entry, count, g, trained
from hone.recipe.recipe import DistilStage, GenerateStage, SFTStage
from hone.recipe.stages import stage_named

KEEP = {
    "first": "the first",
    "random": "one at random (by the seed)",
    "shortest": "the shortest, in tokens",
    "all": "every distinct text",
}
TRAINED = "the answer tokens, including the stop token, but not the prompt tokens"


def where(reference: str | None) -> str:
    """The reference in words: `stage rl` for `stages.rl`, a path unchanged."""
    name = stage_named(reference)
    return f"stage {name}" if name is not None else str(reference)


def teacher(stage: DistilStage | GenerateStage) -> str:
    """The model whose answers or log-probs a stage uses."""
    if stage.teacher is not None:
        return f"the model of {where(stage.teacher)}" if stage_named(stage.teacher) else stage.teacher
    return f"the model of stage {stage.model.stage}" if stage.model.stage else stage.model.path


# --- supervised ---------------------------------------------------------------------------------


def supervised(stage: SFTStage) -> list[Entry]:
    sft = stage.sft
    split = "N = trained tokens of the whole step, not per micro-batch"
    return [
        ("examples", _examples(stage)),
        ("updates", _updates(stage)),
        ("loss", [f"L_t = -log(p_t), the cross-entropy of the {'worked ' if sft.data is None else ''}answer"]),
        ("reduction", ["token_mean: sum over tokens of L_t / N", split]),
        ("trained", [TRAINED]),
        ("validation", _validation(stage)),
        *trained(stage, stage.sft.num_steps),
    ]


def _examples(stage: SFTStage) -> list[str]:
    sft = stage.sft
    if sft.data is not None:
        what = f"the answers that {where(sft.data)} kept" if stage_named(sft.data) else sft.data
        return [f"{what}, without those to problems of the task's validation and test splits"]
    total = sum(sft.styles.values())
    styles = ", ".join(f"{name} {100 * share / total:.3g} %" for name, share in sft.styles.items())
    return [f"{count(sft.examples, 'worked answer')} to training problems: {styles}"]


def _updates(stage: SFTStage) -> list[str]:
    sft = stage.sft
    each = f"on {count(sft.examples_per_step, 'example')} each, in {count(sft.epochs, 'epoch')}"
    if sft.num_steps is None:
        return [
            f"optimizer updates {each}; how many depends on the data",
            "an incomplete step at the end of the last epoch is not used",
        ]
    lines = [f"{count(sft.num_steps, 'optimizer update')} {each}"]
    if unused := sft.epochs * sft.examples - sft.num_steps * sft.examples_per_step:
        lines.append(f"the last {count(unused, 'example')} of the last epoch are not used: they do not fill a step")
    return lines


def _validation(stage: SFTStage) -> list[str]:
    sft = stage.sft
    if sft.validate_every == 0 or (sft.validate_every is None and sft.data is None):
        return []
    when = "after each epoch" if sft.validate_every is None else f"every {count(sft.validate_every, 'step')}"
    whose = "one worked answer to each problem of the task's validation split"
    if sft.data is not None:
        whose = f"the data's own validation split, or all answers to {100 * sft.validation:.3g} % of its problems"
    return [f"the mean of L_t over all tokens of {whose}, {when} and at the end; they are not trained on"]


# --- a teacher ----------------------------------------------------------------------------------


def generated(stage: GenerateStage) -> list[Entry]:
    config = stage.generate
    problems = "all train problems" if config.problems is None else f"the first {count(config.problems, 'problem')}"
    longest = count(stage.sampling.max_tokens, "token")
    filters = {"top_p": stage.sampling.top_p < 1, "top_k": stage.sampling.top_k > 0, "min_p": stage.sampling.min_p > 0}
    cut = "".join(f", {name} {g(getattr(stage.sampling, name))}" for name, used in filters.items() if used)
    how = f"at temperature {g(stage.sampling.temperature)}{cut}, of at most {longest}"
    return [
        ("teacher", [teacher(stage)]),
        ("answers", [f"{stage.samples_per_prompt} to each of {problems}, {how}"]),
        ("kept", [f"of the right answers that are not cut off: {KEEP[config.keep]}"]),
        (
            "files",
            [f"samples/, {count(config.problems_per_shard, 'problem')} per file; dataset.jsonl: the kept answers"],
        ),
    ]


def teacher_advantage(stage: DistilStage) -> list[str]:
    return [
        "A_t = log(teacher_t / old_t)",
        f"teacher_t, old_t: probability of token t under {teacher(stage)} and under the student before the first "
        f"update, both at temperature {g(stage.sampling.temperature)}",
        "its mean over the tokens of a step, times -1, estimates KL(student || teacher) (teacher/kl)",
    ]


def teacher_passes(stage: DistilStage) -> list[str]:
    return [
        "log-probs of the student: one more forward pass before the first update",
        "log-probs of the teacher: one more forward pass, of a second, frozen model",
        "no reward: grades are only recorded",
    ]
