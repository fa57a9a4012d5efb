"""`hone data`: the verbs for looking at problems and at files of rows, and for making one file of another.

hone data overlap train.parquet test.parquet
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from hone.base.visible import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hone.tasks.base import TracedTask
    from hone.types import Problem

# rich is left out of help and error texts: importing it takes longer than everything else on the command line.
STYLE = {"no_args_is_help": True, "rich_markup_mode": None, "add_completion": False}
data = typer.Typer(help="Look at problems and at data files.", **STYLE)  # type: ignore[arg-type]

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False, help="As in optim.lr=1e-5.")
]
SourceArgument = Annotated[
    str, typer.Argument(metavar="SOURCE", help="The name of a task, a recipe, or data: a file or a folder.")
]
Ngram = Annotated[int, typer.Option(min=1, help="Words in a row that two questions share.")]


def _apart(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(sources, settings): what reads KEY=VALUE is a setting."""
    settings = [text for text in arguments if re.match(r"[a-z_]+(\.\w+)*=", text)]
    return [text for text in arguments if text not in settings], settings


@data.command("show")
def data_show(
    source: SourceArgument,
    overrides: Overrides = None,
    split: Annotated[Literal["train", "validation", "test"], typer.Option()] = "train",
    problems: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    style: Annotated[str | None, typer.Option(help="Show worked answers of this style too.")] = None,
    model: Annotated[str | None, typer.Option(help="Count lengths in tokens of this model, not in words.")] = None,
) -> None:
    """Show problems and answers; lengths, levels, domains of the split."""
    from hone.base.settings import UserError
    from hone.preflight import inspect

    opened = inspect.open_source(source, overrides or ())
    task = opened.task
    found = task.problems(split)
    styles = getattr(task, "trace_styles", ())
    if style is not None and style not in styles:
        raise UserError(f"--style {style}: task {task.name} writes {', '.join(styles) or 'no worked answers'}")
    for problem in found[:problems]:
        print(visible(f"--- {problem.id}  level {problem.level or '-'}"))
        print(visible("\n".join(message["content"] for message in problem.messages)))
        print(visible(f"answer: {problem.answer}"))
        if style is not None:
            print(visible(cast("TracedTask", task).trace(problem, style, opened.seed).text))
    print(visible(f"\n{split}:"))
    print(visible("\n".join(inspect.counts(found, *inspect.measure_of(model)))))


@data.command("check")
def data_check(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE... [KEY=VALUE]...", help="Names of tasks, recipes, files, folders; settings."),
    ],
) -> None:
    """Look for rows that are no problems, unreadable answers, duplicates.

    Exit code 1 if there are faults. Knights rows are solved again.
    """
    from hone.preflight import inspect
    from hone.tasks.knights.rows import check_rows
    from hone.tasks.rows.files import read_rows

    sources, overrides = _apart(sources)
    faults = 0
    for source in sources:
        if inspect.is_knights_file(source):
            rows = read_rows(source)
            found = check_rows(rows)
            print(
                visible(
                    "\n".join([f"{source}: {len(rows)} rows, {len(found)} faulty", *(f"  {fault}" for fault in found)])
                )
            )
            faults += len(found)
        else:
            lines, wrong = inspect.check(inspect.open_source(source, overrides))
            print(visible("\n".join([source, *(f"  {line}" for line in lines)])))
            faults += wrong
    raise typer.Exit(1 if faults else 0)


@data.command("overlap")
def data_overlap(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="A [B] [KEY=VALUE]...", help="Whose problems to look for, and where; settings of both."),
    ],
    ngram: Ngram = 13,
) -> None:
    """Count the problems of A that are also in B.

    Of one source, those of train that are in test. The same are questions of the same words, and puzzles under other
    names or in another order.
    """
    from hone.base.settings import UserError
    from hone.preflight import inspect
    from hone.tasks.knights.rows import overlap
    from hone.tasks.rows.files import read_rows

    found, overrides = _apart(sources)
    if not 1 <= len(found) <= 2:
        raise UserError(f"{len(found)} sources ({', '.join(found)}): give one or two")
    a, b = found[0], found[1] if len(found) > 1 else None
    if b is not None and inspect.is_knights_file(a) and inspect.is_knights_file(b):
        print(visible("people  rows of A  rows of B  of A in B  with operands in order too"))
        for row in overlap(read_rows(a), read_rows(b)):
            print(visible(f"{row.people:6} {row.rows_a:10} {row.rows_b:10} {row.shared:10} {row.shared_exactly:27}"))
        return
    ours, *others = (inspect.open_source(s, given) for s, given in zip(found, inspect.fitting(found, overrides)))
    if b is not None:
        (theirs,) = others
        pairs: list[tuple[str, Sequence[Problem], Sequence[Problem]]]
        pairs = [("", inspect.problems_of(ours), inspect.problems_of(theirs))]
    else:
        pairs = inspect.split_pairs(a, ours.problems())
    print(visible("\n".join(inspect.overlap(pairs, ngram))))


@data.command("dedup")
def data_dedup(
    source: SourceArgument,
    overrides: Overrides = None,
    *,
    out: Annotated[Path, typer.Option(help="The new file, .jsonl or .parquet.")],
    split: Annotated[Literal["train", "validation", "test"] | None, typer.Option(help="Default: all rows.")] = None,
    against: Annotated[
        str | None, typer.Option(help="A source whose problems are left out too, such as a test.")
    ] = None,
    ngram: Annotated[int | None, typer.Option(min=1, help="With --against: sharing so many words is enough.")] = None,
) -> None:
    """Write a file with one row of each problem. The first of those that are the same stays."""
    from hone.base.settings import UserError
    from hone.preflight import inspect

    if ngram is not None and against is None:
        raise UserError(f"--ngram {ngram}: has no effect without --against; remove it, or say against what")
    both = [source, *([against] if against is not None else [])]
    ours, *others = (inspect.open_source(s, given) for s, given in zip(both, inspect.fitting(both, overrides or ())))
    theirs = [problem for other in others for problem in inspect.problems_of(other)]
    rows = inspect.rows_of(ours, split)
    total, copies, leaked = inspect.dedup(rows, theirs, ngram, out)
    also = f", {leaked} in {against}" if against is not None else ""
    print(visible(f"{out}: {total - copies - leaked} of {total} rows; left out: {copies} duplicates{also}"))


@data.command("label")
def data_label(
    source: Annotated[str, typer.Argument(metavar="RECIPE|TASK", help="A recipe, or the name of a task.")],
    out: Annotated[Path, typer.Option(help="JSONL file of labels; what it holds already is kept.")],
    overrides: Overrides = None,
    split: Annotated[Literal["train", "validation", "test"], typer.Option()] = "train",
    labels: Annotated[str | None, typer.Option(help="Names, separated by commas; default: subjects of maths.")] = None,
    judge: Annotated[str | None, typer.Option(metavar="URL#MODEL", help="Who chooses; without it words do.")] = None,
) -> None:
    """Label problems with a subject, by a language model or by words. From a fixed list; for `domain_file`."""
    from hone.recipe.load import load_for_task
    from hone.recipe.recipe import stages
    from hone.rewards.judge.client import Judge
    from hone.rewards.judge.config import JudgeConfig
    from hone.rewards.judge.labels import choose, label
    from hone.tasks import make_task

    names = choose(labels)
    recipe = stages(load_for_task(source, overrides or ()))[0]
    config = recipe.eval.judge if judge is None else JudgeConfig.at(judge, recipe.eval.judge)
    asked = Judge(config) if config.url is not None else None
    counts, by = label(make_task(recipe.task, recipe.seed).problems(split), names, asked, out)
    for name, count in counts.most_common():
        print(visible(f"{count:7}  {name}"))
    print(visible(f"{out}: " + ", ".join(f"{count} by {who}" for who, count in by.most_common())))


@data.command("perturb")
def data_perturb(
    source: Annotated[str, typer.Argument(metavar="RECIPE|TASK|FILE", help="A knights recipe, or rows in a file.")],
    overrides: Overrides = None,
    kind: Annotated[
        Literal["statement", "leaf", "roles", "names", "order"] | None, typer.Option(help="Default: left as they are.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The .jsonl or .parquet file to write.")] = Path("perturbed.jsonl"),
    split: Annotated[Literal["train", "validation", "test"], typer.Option(help="Of a recipe or task.")] = "test",
    seed: Annotated[int, typer.Option(help="Other ones of the same kind.")] = 0,
) -> None:
    """Write knights rows with a small change each. Every one is solved again: does a model know, or remember?"""
    import json

    from hone.base.settings import UserError
    from hone.recipe.load import load_for_task
    from hone.recipe.recipe import stages
    from hone.tasks import make_task
    from hone.tasks.knights.perturb import perturbed_rows
    from hone.tasks.knights.task import puzzle_of_problem
    from hone.tasks.rows.files import write_rows

    if Path(source).suffix in (".jsonl", ".parquet"):
        source, overrides, split = "knights", [*(overrides or ()), f"task.test_file={json.dumps(source)}"], "test"
    recipe = stages(load_for_task(source, overrides or ()))[0]
    if recipe.task.name != "knights":
        raise UserError(f"{source}: its task is {recipe.task.name}; only puzzles of the task knights can be perturbed")
    problems = make_task(recipe.task, recipe.seed).problems(split)
    rows = perturbed_rows(((puzzle_of_problem(p), p.messages[-1]["content"]) for p in problems), kind, seed)
    write_rows(out, rows)
    rest = len(problems) - len(rows)
    without = f"; {rest} puzzles have no such neighbour with one other solution" if rest else ""
    print(visible(f"{out}: {len(rows)} rows{without}"))
