"""The command line: verbs only. Every body imports what it needs, so that `hone --help` answers at once.

    hone train recipes/demo/recipe.yaml optim.lr=1e-4 --dry-run

What the user can put right is one line on stderr and exit code 2; Ctrl-C is 130; a traceback is a fault of ours.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

import hone

if TYPE_CHECKING:
    from hone.recipe import Pipeline, Recipe
    from hone.tasks.base import TracedTask

# rich is left out of help and error texts: importing it takes longer than everything else here.
STYLE = {"no_args_is_help": True, "rich_markup_mode": None, "add_completion": False}
app = typer.Typer(
    help="Reinforcement-learning post-training for reasoning language models.",
    pretty_exceptions_enable=False,
    **STYLE,  # type: ignore[arg-type]
)
data = typer.Typer(help="Look at problems and at data files.", **STYLE)  # type: ignore[arg-type]
config = typer.Typer(help="Look at recipes.", **STYLE)  # type: ignore[arg-type]
app.add_typer(data, name="data")
app.add_typer(config, name="config")

Target = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file or its folder, a run folder, a preset.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False, help="As in optim.lr=1e-5.")
]
Checkpoint = Annotated[Path | None, typer.Option(help="A checkpoint folder; default: the last one of the run.")]


def main() -> None:
    # Read when torch is loaded. Threads that wait for long by spinning make a busy machine several times slower,
    # and threads that sleep at once take longer to wake than most operations of a small model.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        try:
            app(prog_name="hone")
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        from hone.config import UserError

        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            print(f"the disk is full: {error}. Free some space; with --resume the run goes on", file=sys.stderr)
        elif isinstance(error, UserError):
            print(error, file=sys.stderr)
        else:
            raise
        sys.exit(2)


def _load(target: str, overrides: list[str] | None) -> Recipe | Pipeline:
    from hone.recipe import load, notices

    recipe = load(target, overrides or ())
    for line in notices(recipe):
        print(f"note: {line}", file=sys.stderr)
    return recipe


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hone {hone.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it, exit.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: Target,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of this run.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show two prompts, start nothing.")
    ] = False,
) -> None:
    """Run a recipe: all its stages, into its run folder."""
    loaded = _load(recipe, overrides)
    from hone import pipeline

    if dry_run:
        pipeline.dry_run(loaded)
    else:
        pipeline.run(loaded, resume=resume)


@app.command()
def explain(recipe: Target, overrides: Overrides = None) -> None:
    """Print what a recipe computes: formulas, what is counted, what clips, what has no effect."""
    from hone.explain import explain as text
    from hone.recipe import load

    print(text(load(recipe, overrides or ())))


@app.command("eval")
def evaluate(
    recipe: Target,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL | KEY=VALUE]...",
            show_default=False,
            help="Runs, checkpoints, Hugging Face folders or ids, URL#model of an OpenAI-compatible endpoint; "
            "default: the recipe's own model. And settings, as in eval.samples=32.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random streams; another one is an independent sample.")] = 0,
    k: Annotated[str, typer.Option(help="The k of pass@k, as in 1,8,32; default: powers of two.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder to append to; default: evaluations in the run.")] = None,
) -> None:
    """Evaluate models on the same held-out problems, with intervals; settings are the recipe's eval section.

    Every sample is kept, and what was drawn before is not drawn again: the same command goes on after a cut.
    """
    from hone.config import UserError

    given = models or []
    overrides = [one for one in given if "=" in one and not one.startswith((".", "/", "~")) and "://" not in one]
    loaded = _load(recipe, overrides)
    if not all(part.strip().isdigit() for part in k.split(",") if k):
        raise UserError(f"--k {k}: give whole numbers, as in 1,8,32")
    from hone.evals.run import cli_eval

    ks = [int(part) for part in k.split(",") if part]
    cli_eval(loaded, [one for one in given if one not in overrides], seed=seed, ks=ks, out=out)


@app.command()
def sample(
    recipe: Target,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    problems: Annotated[int, typer.Option(min=1, help="How many problems.")] = 2,
) -> None:
    """Show what a model answers to a few problems, and how it is graded."""
    loaded = _load(recipe, overrides)
    from hone.evaluate import cli_sample

    cli_sample(loaded, checkpoint=checkpoint, problems=problems)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or the folder that hone eval wrote.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder, or file ending in .html; default: RUN/report, or comparison beside.")
    ] = None,
) -> None:
    """Write the report of a run, or the comparison of several: one HTML page, its figures and tables as files."""
    from hone.report.build import build

    print(build(runs, out))


@app.command()
def verify(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="The folder of a recipe with results.json, a preset.")
    ],
    seed: Annotated[int | None, typer.Option(min=0, help="Default: one that was not recorded.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a measurement that was cut.")] = False,
) -> None:
    """Train a recipe again and say whether the results lie in its recorded band; exit code 1 if one does not."""
    from hone.reproduce import verify as check

    raise typer.Exit(0 if all(one.inside for one in check(recipe, seed, resume)) else 1)


@data.command("show")
def data_show(
    source: Annotated[str, typer.Argument(metavar="RECIPE|TASK", help="A recipe, or the name of a task.")],
    overrides: Overrides = None,
    split: Annotated[Literal["train", "validation", "test"], typer.Option()] = "train",
    problems: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    style: Annotated[str | None, typer.Option(help="Show worked answers of this style too.")] = None,
) -> None:
    """Show problems of a task with their answers."""
    from hone.config import UserError
    from hone.recipe import load_for_task, stages
    from hone.tasks import make_task

    recipe = stages(load_for_task(source, overrides or ()))[0]
    task = make_task(recipe.task, recipe.seed)
    styles = getattr(task, "trace_styles", ())
    if style is not None and style not in styles:
        raise UserError(f"--style {style}: task {task.name} writes {', '.join(styles) or 'no worked answers'}")
    for problem in task.problems(split)[:problems]:
        print(f"--- {problem.id}  level {problem.level or '-'}")
        print("\n".join(message["content"] for message in problem.messages))
        print(f"answer: {problem.answer}")
        if style is not None:
            print(cast("TracedTask", task).trace(problem, style, recipe.seed).text)


@data.command("check")
def data_check(files: Annotated[list[Path], typer.Argument(help="Knights rows, .jsonl or .parquet.")]) -> None:
    """Solve every row of knights files again; exit code 1 if one is not as recorded."""
    from hone.tasks.knights_rows import check_rows
    from hone.tasks.rows import read_rows

    faults = 0
    for file in files:
        rows = read_rows(file)
        found = check_rows(rows)
        print("\n".join([f"{file}: {len(rows)} rows, {len(found)} faulty", *(f"  {fault}" for fault in found)]))
        faults += len(found)
    raise typer.Exit(1 if faults else 0)


@data.command("overlap")
def data_overlap(
    a: Annotated[Path, typer.Argument(help="Knights rows.")],
    b: Annotated[Path, typer.Argument(help="Knights rows to look for them in.")],
) -> None:
    """Count the puzzles of A that are also in B under other names or in another order."""
    from hone.tasks.knights_rows import overlap
    from hone.tasks.rows import read_rows

    print("people  rows of A  rows of B  of A in B  with operands in order too")
    for row in overlap(read_rows(a), read_rows(b)):
        print(f"{row.people:6} {row.rows_a:10} {row.rows_b:10} {row.shared:10} {row.shared_exactly:27}")


@config.command("show")
def config_show(
    recipe: Target,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of YAML.")] = False,
) -> None:
    """Print every value of a recipe, defaults included."""
    import json

    from ruamel.yaml import YAML

    from hone.recipe import resolved

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

    from hone.recipe import schema

    print(json.dumps(schema(), indent=2))


@config.command("presets")
def config_presets() -> None:
    """List the recipes that come with hone; their names can be given to every verb."""
    from hone.recipe import presets

    for name, file in presets().items():
        print(f"{name:16} {file}")


@app.command()
def doctor() -> None:
    """Check this machine: versions, device, speed, disk, memory; exit code 1 if something cannot work."""
    from hone.doctor import examine

    raise typer.Exit(examine())


if __name__ == "__main__":
    main()
