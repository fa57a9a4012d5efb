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
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import hone
from hone.base import terminal
from hone.base.visible import visible
from hone.cli.data import STYLE, Overrides, data
from hone.cli.runs import runs

if TYPE_CHECKING:
    from hone.recipe.recipe import Pipeline, Recipe

app = typer.Typer(
    help="Reinforcement-learning post-training for reasoning language models.",
    pretty_exceptions_enable=False,
    **STYLE,  # type: ignore[arg-type]
)
config = typer.Typer(help="Show recipes.", **STYLE)  # type: ignore[arg-type]
app.add_typer(data, name="data")
app.add_typer(config, name="config")
app.add_typer(runs, name="runs")

Target = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file or its folder, a run folder, or a preset.")
]
OptionalTarget = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE", help="A recipe file or its folder, a run folder, or a preset.", show_default=False
    ),
]
Checkpoint = Annotated[Path | None, typer.Option(help="A checkpoint folder; default: the last of the run.")]


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
        problem = terminal.disk_problem(error)
        if problem is None:
            raise
        print(visible(problem), file=sys.stderr)
        sys.exit(2)


def _load(target: str, overrides: list[str] | None) -> Recipe | Pipeline:
    from hone.base import device
    from hone.launch import job
    from hone.recipe.load import load
    from hone.recipe.recipe import stages
    from hone.recipe.rules import notices

    recipe = load(target, overrides or ())
    device.select(stages(recipe)[0].device)
    for line in () if job.silent() else notices(recipe):
        print(visible(f"note: {line}"), file=sys.stderr)
    return recipe


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
    from hone.cli.start import Choices, train_arguments

    target, settings = train_arguments(recipe, overrides or (), Choices(model, data, reward, steps, device))
    _train(target, settings, resume, dry_run, view)


def _train(recipe: str, overrides: list[str], resume: bool, dry_run: bool, view: bool) -> None:
    from hone import launch
    from hone.launch.job import follow_parent, silent
    from hone.recipe.recipe import stages
    from hone.tasks import keeping

    follow_parent()
    loaded = _load(recipe, overrides)
    if dry_run:
        from hone.preflight.check import run as checks

        with keeping():
            code = checks.dry_run(loaded)
        raise typer.Exit(code)
    alone = launch.alone(stages(loaded))
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

            raise typer.Exit(launch.start(stages(loaded), folder, arguments, resume, anything_left) or 0)
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
    """Write a small commented recipe to start from, with example rows and a reward where you have none yet.

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
    loaded = _load(recipe, overrides)
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
    """Predict the memory and time of a step, and suggest settings that fit. Exit code 1 if the recipe does not fit."""
    loaded = _load(recipe, overrides)
    from hone.preflight.plan.show import cli_plan

    raise typer.Exit(cli_plan(loaded, device, memory, calibrate, as_json))


@app.command()
def explain(recipe: Target, overrides: Overrides = None) -> None:
    """Print what a recipe computes (formulas, counts, clipping) and which settings have no effect."""
    from hone.recipe.explain import explain as text
    from hone.recipe.load import load

    print(text(load(recipe, overrides or ())))


@app.command()
def reset(run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/mine.")]) -> None:
    """Ask a run for a hard reset: the current model becomes the reference; adapter and optimizer start afresh."""
    from hone.runs.layout import ask

    print(ask(run))


@app.command("eval")
def evaluate(
    recipe: Target,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL | KEY=VALUE]...",
            show_default=False,
            help="Runs, checkpoints, Hugging Face folders or ids, or URL#model of an OpenAI-compatible endpoint "
            "(default: the recipe's own model), and settings such as eval.samples=32.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; another seed gives an independent sample.")] = 0,
    k: Annotated[str, typer.Option(help="Values of k for pass@k, such as 1,8,32; default: powers of 2.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder to append to; default: `evaluations` in the run.")] = None,
    answerer: Annotated[
        str | None, typer.Option(help="A frozen model that answers, given the evaluated model's reasoning.")
    ] = None,
    gold_perplexity: Annotated[
        bool, typer.Option("--gold-perplexity", help="Also measure the perplexity of the gold answers.")
    ] = False,
) -> None:
    """Evaluate models on the same held-out problems, with intervals.

    Settings come from the recipe's eval section. Every sample is kept and none is drawn twice, so the same command
    continues an interrupted evaluation.
    """
    from hone.base.settings import UserError

    arguments = models or []
    overrides = [one for one in arguments if "=" in one and not one.startswith((".", "/", "~")) and "://" not in one]
    models_ = [one for one in arguments if one not in overrides]
    loaded = _load(recipe, overrides)
    if not all(part.strip().isdigit() for part in k.split(",") if k):
        raise UserError(f"--k {k}: give whole numbers, such as 1,8,32")
    if answerer is not None:
        if len(models_) > 1 or seed or k or gold_perplexity:
            raise UserError("--answerer: takes one model, and no --seed, --k or --gold-perplexity; remove them")
        from hone.measure.two_model import cli_two_model

        cli_two_model(loaded, answerer, checkpoint=Path(models_[0]) if models_ else None, out=out)
        return
    from hone.measure.run import cli_eval

    ks = [int(part) for part in k.split(",") if part]
    cli_eval(loaded, models_, seed=seed, ks=ks, out=out, score_gold=gold_perplexity)


AnyModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="A recipe, a run folder, a checkpoint, a model folder or a hub id.")
]
HowSampled = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings such as eval.sampling.temperature=0.6.")
]


@app.command()
def sample(
    model: AnyModel,
    overrides: HowSampled = None,
    checkpoint: Checkpoint = None,
    problems: Annotated[int | None, typer.Option(min=1, help="Answer this many problems of the recipe's task.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Chat with the model; Ctrl-D ends the chat.")] = False,
    prompt: Annotated[str | None, typer.Option(help="Answer this.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Answer each line (or .jsonl row); continues an existing --out.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The .jsonl file for the answers to --file.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="The run's checkpoint of this step, as in RUN@STEP.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Answers per prompt of --file.")] = 1,
    seed: Annotated[int | None, typer.Option(min=0, help="Default: the recipe's.")] = None,
) -> None:
    """Sample answers from a model: to problems of its task, in a chat, to one prompt, or to a file of prompts."""
    from hone.base.settings import UserError

    ways = [
        name
        for name, value in (("--problems", problems), ("--chat", chat), ("--prompt", prompt), ("--file", file))
        if value not in (None, False)
    ]
    if len(ways) > 1:
        raise UserError(f"{' and '.join(ways)}: give only one of them")
    if (file is None) != (out is None):
        raise UserError("--file (prompts) and --out (answers) go together: give both")
    if samples > 1 and file is None:
        raise UserError("--samples has no effect without --file")
    if step is not None and (checkpoint is not None or "@" in model):
        raise UserError(f"--step {step}: the checkpoint is named already; give it only once")

    from hone.serve import sample as verb
    from hone.serve.model import load_served

    prompts = verb.read_prompts(file) if file is not None else []
    model_ = load_served(model if step is None else f"{model}@{step}", overrides or (), checkpoint)
    seed = model_.stage.seed if seed is None else seed
    if prompt is not None:
        verb.answer_one(model_, prompt, seed)
    elif out is not None:
        verb.answer_file(model_, prompts, out, samples, seed)
    elif chat or (not ways and model_.task is None):
        verb.chat(model_, seed)
    else:
        verb.show_problems(model_, problems or 2)


@app.command()
def serve(
    model: AnyModel,
    overrides: HowSampled = None,
    checkpoint: Checkpoint = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    host: Annotated[str, typer.Option(help="The default is reachable from this machine only.")] = "127.0.0.1",
) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API, until Ctrl-C."""
    from hone.serve.server import serve as run

    run(model, overrides or (), checkpoint, host, port)


@app.command()
def view(
    path: Annotated[
        Path, typer.Argument(metavar="[RUN | FOLDER]", help="A run, which need not exist yet, or a folder of runs.")
    ] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8100,
    host: Annotated[
        str, typer.Option(help="The default is reachable from this machine only; others need the printed token.")
    ] = "127.0.0.1",
) -> None:
    """Show runs in a browser, before, during and after training: charts, every answer, and why it got its reward."""
    from hone.report.live.server import view as serve_page

    serve_page(path, host, port)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or a folder written by hone eval.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="A folder or .html file; default: RUN/report, or comparison beside it.")
    ] = None,
) -> None:
    """Write the report of a run, or a comparison of several: an HTML page, with its figures and tables as files."""
    from hone.report.build import build

    print(build(runs, out))


@app.command()
def verify(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe folder with results.json, or a preset.")],
    seed: Annotated[int | None, typer.Option(min=0, help="Default: a seed that was not recorded.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted measurement.")] = False,
) -> None:
    """Train a recipe again and check that its results lie in the recorded band. Exit code 1 if one does not."""
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


@config.command("show")
def config_show(
    recipe: Target,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of YAML.")] = False,
) -> None:
    """Print every value of a recipe, defaults included."""
    import json

    from ruamel.yaml import YAML

    from hone.recipe.recipe import resolved

    values = resolved(_load(recipe, overrides))
    if as_json:
        print(json.dumps(values, indent=2, ensure_ascii=False))
    else:
        yaml = YAML(typ="safe", pure=True)
        yaml.default_flow_style = False
        yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # declared as None
        yaml.dump(values, sys.stdout)


@config.command("schema")
def config_schema() -> None:
    """Print the JSON schema of recipe files, for editors."""
    import json

    from hone.recipe.load import schema

    print(json.dumps(schema(), indent=2))


@config.command("presets")
def config_presets() -> None:
    """List the recipes that come with hone; every verb accepts their names."""
    from hone.recipe.load import presets

    for name, file in presets().items():
        print(f"{name:20} {file}")


@app.command()
def doctor() -> None:
    """Check this machine: versions, device, speed, disk, memory. Exit code 1 if hone cannot work on it."""
    from hone.preflight.doctor import examine

    raise typer.Exit(examine())


if __name__ == "__main__":
    main()
