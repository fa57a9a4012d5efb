"""THE reinforcement-learning loop.

    hone train RECIPE            with `stage: rl`

One step: serve the current weights, draw problems, sample a group of answers to each, reward
them, turn rewards into advantages, update. Everything random is keyed by (seed, step), so a run
that was cut continues exactly where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

from hone.base.progress import Clock, Track
from hone.base.settings import UserError
from hone.base.world import World
from hone.learn.advantages import group_rewards, is_zero_variance
from hone.learn.batches import Batch, Packer, prepare
from hone.learn.pack import pack
from hone.learn.policy import Policy
from hone.learn.samples import to_samples
from hone.learn.watch import collapse_warnings
from hone.measure.evaluate import Evaluator
from hone.model.lora import coverage
from hone.preflight.plan.batch import longest_prompt
from hone.preflight.plan.rehearse import rehearse
from hone.recipe.recipe import Recipe
from hone.recipe.schedule import Phases
from hone.recipe.sections.model import ModelConfig
from hone.rewards import make_reward
from hone.rewards.base import RewardFn
from hone.rewards.perplexity import Answerer
from hone.rollout import make_engine
from hone.rollout.answerer import load_answerer
from hone.rollout.collect import rollouts, score
from hone.rollout.engine import Engine
from hone.rollout.exactness import check_policy
from hone.rollout.prompts import Renderer
from hone.runs.writer import Run
from hone.stages.guard import guard, guard_rewards
from hone.stages.record import rollout_metrics
from hone.stages.reset import announce, due, reset
from hone.tasks import make_task
from hone.tasks.curriculum import Course
from hone.types import Group, StepStats


def train(recipe: Recipe, folder: Path, model: ModelConfig) -> None:
    """Train `model` in `folder`, from the beginning or from the last checkpoint there.

    Raises `hone.runs.writer.Interrupted` after saving, if the user asked to stop.
    """
    phases = Phases(recipe)
    now = phases.at(0, 0)  # the settings of a step; a schedule changes them
    world = World.from_env(recipe.parallel)
    task = make_task(recipe.task, recipe.seed)
    course = Course(task.problems("train"), recipe.seed, now.curriculum)
    policy = load_policy(phases, model, course, world)
    renderer = Renderer(policy.tokenizer, recipe.prompt, task.system)
    frozen = load_frozen(phases, model, task.system)
    reward = make_reward(now.reward, task, frozen)
    run = Run.open(folder, recipe.model_dump(mode="json"), recipe.checkpoint, recipe.seed, world)
    if (covered := coverage(policy.model)) is not None:
        run.event("lora", covered)
    engine = make_engine(recipe.rollout, policy, run.folder, run.event)

    first = run.resume(policy, course)
    rehearse(run, recipe, model, policy, longest_prompt(course.problems, renderer))  # the longest first
    with run.interruptible(), closing(engine), run.track("RL", recipe.steps, first) as progress:
        evaluator = Evaluator(recipe, task, renderer, engine, progress, world)
        for step in range(first, recipe.steps + 1):
            clock = Clock()
            synced = engine.sync(policy, version=step)  # the only weight sync, verified
            clock.lap("sync")
            for label in evaluator.due(step):
                run.log_eval(step, label, *evaluator.evaluate(label))
            if step == recipe.steps:
                break
            before, now = now, phases.at(step, len(policy.resets))
            if now != before:
                announce(run, step, phases, len(policy.resets))
                policy.configure(now.optim, now.layers)
                course.configure(now.curriculum)
                reward = make_reward(now.reward, task, frozen) if now.reward != before.reward else reward
            clock.rest()
            groups, replaced = collect(now, step, course, renderer, engine, reward, progress, clock, world)
            course.observe([*groups, *replaced])
            packer = make_packer(now, world)
            batch = prepare(groups, policy, policy.reference, now.algo, now.sampling, packer)
            stats = policy.update(batch.minibatches, now.algo, now.sampling.temperature)
            clock.lap("train")
            state = {**synced, "reset": float(len(policy.resets)), **course.metrics()}
            run.log_prompts(step, course.taken(step), groups, replaced)
            note = record(run, now, step, groups, replaced, batch, stats, renderer, clock, state)
            run.log_costs(step, reward.costs())
            if why := due(recipe.reset, step + 1, recipe.steps, run, policy.resets):
                reset(run, step + 1, why, policy, phases, batch.minibatches)  # merge, new reference, new optimizer
            run.checkpoint(step + 1, policy, course, now=why is not None)
            progress.advance(note)
            run.stop_if_asked(step + 1)
    run.finish(policy, recipe.steps)


def load_policy(phases: Phases[Recipe], model: ModelConfig, course: Course, world: World) -> Policy:
    """The policy that a run starts with; a reference is kept if any of its phases has a KL penalty.

    Raises UserError if a later phase asks for layers, targets or levels that are not there.
    """
    start, all_phases = phases.at(0, 0), [phases.merged(lines) for lines in phases.sets()]
    for phase in all_phases:
        course.check(phase.curriculum)
    policy = Policy.load(
        model,
        start.optim,
        start.updates or 0,
        start.algo.value if start.algo.advantage == "gae" else None,
        lora=start.lora,
        layers=start.layers,
        reference=any(phase.algo.kl.coef for phase in all_phases),
        seed=start.seed,
        world=world,
    )
    for phase in all_phases:
        policy.check(phase.layers, phase.lora)
    check_policy(policy)
    return policy


def load_frozen(phases: Phases[Recipe], model: ModelConfig, system: str) -> Answerer | None:
    """The answerer of the perplexity reward, if any phase has that. Raises UserError if they name different ones."""
    rewards = [phases.merged(lines).reward for lines in phases.sets()]
    asking = {r.perplexity.answerer: r for r in rewards if "perplexity" in r.parts}
    if len(asking) > 1:
        raise UserError(
            f"schedule: reward.perplexity.answerer is {' and then '.join(asking)}; one run has one answerer: name the "
            "same in every line, or make two stages"
        )
    return load_answerer(next(iter(asking.values()), rewards[0]), model, phases.recipe.prompt, system)


def collect(
    recipe: Recipe,
    step: int,
    course: Course,
    renderer: Renderer,
    engine: Engine,
    reward: RewardFn,
    progress: Track,
    clock: Clock,
    world: World,
) -> tuple[list[Group], list[Group]]:
    """Sample and score the groups of a step.

    With `algo.refill_rounds`, groups without a reward difference are replaced by groups of other problems, for at most
    so many rounds (dynamic sampling: DAPO, arXiv:2503.14476). Returns what to train on, and what was replaced.
    """
    kept: list[Group] = []
    replaced: list[Group] = []
    for round in range(1 + recipe.algo.refill_rounds):
        if round == 0:
            problems = course.draw(step, recipe.prompts_per_step)
        else:
            drawn = {group.problem.id for group in (*kept, *replaced)}
            problems = course.draw_others(step, round, recipe.prompts_per_step - len(kept), without=drawn)
            if not problems:  # all that the curriculum has to offer now
                break
        answers = rollouts(
            problems,
            renderer,
            engine,
            recipe.sampling,
            samples=recipe.samples_per_prompt,
            seed=step_seed(recipe.seed, step, round),
            progress=progress.inner,
        )
        clock.lap("generate")
        groups = score(problems, answers, reward, world)
        clock.lap("reward")
        if not recipe.algo.refill_rounds:
            return groups, []
        dull = [is_zero_variance(group_rewards(group)) for group in groups]
        kept += [group for group, d in zip(groups, dull, strict=True) if not d]
        replaced += [group for group, d in zip(groups, dull, strict=True) if d]
        if len(kept) == recipe.prompts_per_step:
            break
    return kept, replaced


def make_packer(recipe: Recipe, world: World) -> Packer:
    """`pack` with its settings, for all processes."""
    return partial(
        pack,
        tokens_per_microbatch=recipe.tokens_per_microbatch,
        share_prompts=recipe.share_prompts,
        parts=world.data,
    )


def step_seed(seed: int, step: int, round: int = 0) -> int:
    """Random numbers of a step: no two (seed, step, round) of ordinary size share them."""
    return seed * 1_000_003 + step + (round << 50)


def record(
    run: Run,
    recipe: Recipe,
    step: int,
    groups: list[Group],
    replaced: list[Group],
    batch: Batch,
    stats: StepStats,
    renderer: Renderer,
    clock: Clock,
    state: Mapping[str, float | str],
) -> str:
    """Write down what the step did and warn of what looks wrong; returns a note for the progress line.

    `state`: where the run stood in the step: the check of the sync, hard resets before it, shares of the levels.
    Rewards, verdicts and lengths are those of all groups: without the replaced ones they would be biased.
    """
    everyone = [*groups, *replaced]
    metrics = {
        **rollout_metrics(everyone),
        "groups/replaced": float(len(replaced)),
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        **stats.metrics,
        **state,
    }
    run.log(step, {"phase": "rl", "trained_tokens": stats.num_tokens, **metrics}, clock.seconds())
    prompts = [renderer.prompt_text(group.problem) for group in everyone]
    samples = [*batch.samples, *(sample for group in replaced for sample in to_samples(group))]
    run.log_rollouts(step, everyone, prompts, samples, stats, renderer.piece)
    if replaced and len(groups) < recipe.prompts_per_step:
        found = f"{len(groups)} of {recipe.prompts_per_step} groups have a reward difference"
        run.event("refill_bound", f"after {recipe.algo.refill_rounds} rounds of refill {found}", step)
    if not batch.minibatches:
        run.event("no_signal", "no group had a reward difference: nothing was learned in this step", step)
    guard_rewards(run, step, everyone, recipe.watch)
    guard(run, step, stats, batch.minibatches, batch.samples, recipe.watch)
    for warning in collapse_warnings(run.history, recipe.watch):
        run.event("collapse", str(warning), step, name=warning.name)
    return (
        f"reward {metrics['reward/mean']:.3f}  correct {metrics['accuracy']:.3f}  length {metrics['length/mean']:.0f}"
    )
