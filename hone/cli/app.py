"""The command line: verbs only. Every body imports what it needs, so that `hone --help` answers at once.

    hone train recipes/demo/recipe.yaml optim.lr=1e-4 --dry-run

An error that the user can fix is one line on stderr and exit code 2. Ctrl-C exits with 130, SIGTERM during training
with 75. A traceback is a bug in hone.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

import hone
from hone.base import terminal
from hone.base.visible import visible
from hone.cli import models
from hone.cli.arguments import OptionalTarget, Target, Verbs, load_recipe
from hone.cli.config import config
from hone.cli.data import STYLE, Overrides, data
from hone.cli.runs import runs

app = typer.Typer(
    cls=Verbs,
    help="Reinforcement-learning post-training for reasoning language models.",
    pretty_exceptions_enable=False,
    **STYLE,  # type: ignore[arg-type]
)
app.add_typer(data, name="data")
app.add_typer(config, name="config")
app.add_typer(runs, name="runs")


#: Verbs that finish their work even if their output is no longer read.
LONG = ("train", "eval", "verify")


def main() -> None:
    try:
        _main()
    except KeyboardInterrupt:  # before a verb runs, or a second one while it ends
        terminal.leave_at_once_on_ctrl_c()
        sys.exit(130)
    except SystemExit as ended:
        if ended.code == 130:
            terminal.leave_at_once_on_ctrl_c()
        raise


def _main() -> None:
    # Read when torch is loaded. Threads that spin for long make a busy machine several times slower; threads that
    # sleep at once take longer to wake than most operations of a small model.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    verb = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    if verb == "train":
        terminal.stop_at_once_on_sigterm()
    terminal.prepare_streams(lossy_output=verb in LONG)
    try:
        try:
            app(prog_name="hone")
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        terminal.redirect(sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        from hone.base.settings import UserError

        if isinstance(error, UserError):
            print(visible(error), file=sys.stderr)
            sys.exit(error.exit_code)
        problem = terminal.disk_problem(error, verb)
        if problem is None:
            raise
        print(visible(problem), file=sys.stderr)
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hone {hone.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


ModelOption = Annotated[str | None, typer.Option("--model", help="A hub id, or the folder of a Hugging Face model.")]
DataOption = Annotated[
    str | None, typer.Option("--data", metavar="ROWS", help="A file or folder of rows, or the name of a task.")
]
RewardOption = Annotated[
    str | None,
    typer.Option("--reward", metavar="FILE.py:FUNCTION", help="Your reward; also the name of one of hone's."),
]
DeviceOption = Annotated[
    Literal["cpu", "cuda"] | None, typer.Option("--device", help="Default: a GPU if there is one.")
]
StepsOption = Annotated[int | None, typer.Option("--steps", min=1, help="Training steps.")]


@app.command()
def train(
    recipe: OptionalTarget = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint of this run.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and show two prompts, without training.")
    ] = False,
    model: ModelOption = None,
    data: DataOption = None,
    reward: RewardOption = None,
    steps: StepsOption = None,
    device: DeviceOption = None,
    view: Annotated[bool, typer.Option("--view", help="Show the run in a browser while it trains.")] = False,
) -> None:
    """Run all stages of a recipe and write its run folder.

    Examples: `hone train recipes/demo/recipe.yaml seed=1`, `hone train demo --resume`, and without a recipe
    `hone train --model Qwen/Qwen2.5-0.5B-Instruct --data rows.jsonl --reward my.py:right --steps 50`.
    """
    from hone.base.settings import ConfigError
    from hone.cli.start import Choices, as_options, train_arguments

    choices = Choices(model, data, reward, steps, device)
    target, settings = train_arguments(recipe, overrides or (), choices)
    try:
        _train(target, settings, resume, dry_run, view)
    except ConfigError as error:
        raise as_options(error, choices) from None


def _train(recipe: str, overrides: list[str], resume: bool, dry_run: bool, view: bool) -> None:
    from hone import launch
    from hone.launch.job import follow_parent, silent
    from hone.tasks import keeping

    follow_parent()
    loaded = load_recipe(recipe, overrides)
    if dry_run:
        from hone.preflight.check import run as checks

        with keeping():
            code = checks.dry_run(loaded)
        raise typer.Exit(code)
    alone = launch.alone(loaded.stages)
    if alone:
        launch.check_restarts(resume)
    from hone.stages import pipeline

    with keeping() as kept, contextlib.ExitStack() as page:
        findings = [] if silent() else pipeline.checked(loaded, resume)  # once for all processes of a run
        folder = Path(loaded.runs) / loaded.name
        if view and not silent():
            from hone.report.live.server import beside

            page.enter_context(beside(folder))
        if not alone:
            kept.clear()  # this process only waits for the training processes
            arguments = ("train", recipe, *overrides)

            def anything_left() -> bool:
                return pipeline.prepared(loaded, folder, resume) is not None

            raise typer.Exit(launch.start(loaded.stages, folder, arguments, resume, anything_left) or 0)
        pipeline.run(loaded, resume=resume, findings=findings)


@app.command()
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The folder to write, and the name of the run.")],
    model: ModelOption = None,
    data: DataOption = None,
    reward: RewardOption = None,
    steps: StepsOption = None,
    device: DeviceOption = None,
) -> None:
    """Write a small commented recipe to start from.

    With example rows and a reward where you have none yet.
    Asks on a terminal for what is not given. Example: `hone init sums --data rows.jsonl`.
    """
    from hone.cli import start

    files = start.init(name, start.Choices(model, data, reward, steps, device), start.asker())
    print("\n".join(f"wrote {path}" for path in files))
    print(f"next: hone train {files[0]} --dry-run, then hone train {files[0]}")


@app.command()
def check(
    recipe: Target,
    overrides: Overrides = None,
    checkpoint: Annotated[Path | None, typer.Option(help="The model to start from; default: the recipe's.")] = None,
    problems: Annotated[int, typer.Option(min=1, help="Number of problems to answer.")] = 8,
    model: Annotated[bool, typer.Option("--model/--no-model", help="Load the model and sample answers.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Check the reward, template, data and model before training. Exit code 1 if a check fails."""
    loaded = load_recipe(recipe, overrides)
    from hone.preflight.check.run import cli_check

    raise typer.Exit(cli_check(loaded, problems, model, checkpoint, as_json))


@app.command()
def plan(
    recipe: Target,
    overrides: Overrides = None,
    memory: Annotated[
        float | None, typer.Option(min=0.1, help="GiB of device memory; default: this machine's.")
    ] = None,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Default: the best one available.")] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate/--no-calibrate", help="Time the model's layers on this machine; takes seconds.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Predict the memory and time of a step; suggest settings that fit.

    Exit code 1 if the recipe does not fit.
    """
    loaded = load_recipe(recipe, overrides, runs=False)
    from hone.preflight.plan.show import cli_plan

    raise typer.Exit(cli_plan(loaded, device, memory, calibrate, as_json))


@app.command()
def explain(recipe: Target, overrides: Overrides = None) -> None:
    """Print what a recipe computes, and which settings have no effect.

    Formulas, counts, clipping, the phases of a schedule.
    """
    from hone.recipe.explain import explain as text
    from hone.recipe.load import load

    print(text(load(recipe, overrides or ())))


@app.command()
def reset(run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/mine.")]) -> None:
    """Ask a run for a hard reset.

    The current model becomes the reference; adapter and optimizer start afresh.
    """
    from hone.runs.layout import ask

    print(ask(run))


app.command("eval")(models.evaluate)
app.command()(models.sample)
app.command()(models.serve)


@app.command()
def view(
    path: Annotated[
        Path, typer.Argument(metavar="[RUN | FOLDER]", help="A run, which need not exist yet, or a folder of runs.")
    ] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8100,
    host: Annotated[
        str, typer.Option(help="The default is reachable from this machine only; others need the printed token.")
    ] = "127.0.0.1",
    allow_rescore: Annotated[
        bool, typer.Option("--allow-rescore", help="The page may score past answers again, and sample them again.")
    ] = False,
    reward: Annotated[
        list[Path] | None,
        typer.Option("--reward", metavar="RECIPE", help="With --allow-rescore: a recipe whose reward can be tried."),
    ] = None,
) -> None:
    """Show runs in a browser, before, during and after training.

    Charts, every answer, and why it got its reward.
    """
    from hone.base.settings import UserError
    from hone.recipe.load import load
    from hone.report.live.server import view as serve_page
    from hone.report.live.travel import Travel

    if reward and not allow_rescore:
        raise UserError("--reward names what can be tried: add --allow-rescore")
    for recipe in reward or ():
        load(recipe)  # errors show here, not in the page
    serve_page(path, host, port, Travel(reward or ()) if allow_rescore else None)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or a folder written by hone eval.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="A folder or .html file; default: RUN/report, or comparison beside it.")
    ] = None,
) -> None:
    """Write the report of a run, or a comparison of several.

    An HTML page, with its figures and tables as files.
    """
    from hone.report.build import build

    print(build(runs, out))


@app.command()
def verify(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe folder with results.json, or a preset.")],
    seed: Annotated[int | None, typer.Option(min=0, help="Default: a seed that was not recorded.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted measurement.")] = False,
) -> None:
    """Train a recipe again and compare with its recorded results.

    Exit code 1 if one does not lie in the recorded band.
    """
    from hone.measure.reproduce import verify as check

    raise typer.Exit(0 if all(one.inside for one in check(recipe, seed, resume)) else 1)


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN[@STEP|@best]", help="A run, or one of its checkpoints.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Write only the adapter, in PEFT format.")] = False,
) -> None:
    """Write a model as a Hugging Face folder, its adapter merged. @best: the best on the validation split."""
    from hone.stages.audit import export as write

    print(write(run, out, adapter))


@app.command()
def doctor() -> None:
    """Check this machine: versions, device, speed, disk, memory. Exit code 1 if hone cannot work on it."""
    from hone.preflight.doctor import examine

    raise typer.Exit(examine())


if __name__ == "__main__":
    main()
