"""`hone data`: verbs that show, check and transform problems and data files.

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

# Help and error texts do not use rich: importing it takes longer than everything else on the command line.
STYLE = {"no_args_is_help": True, "rich_markup_mode": None, "add_completion": False}
data = typer.Typer(help="Show, check and transform problems and data files.", **STYLE)  # type: ignore[arg-type]

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", show_default=False, help="Settings such as optim.lr=1e-5."),
]
SourceArgument = Annotated[
    str, typer.Argument(metavar="SOURCE", help="A task name, a recipe, a data file or a folder of data files.")
]
Ngram = Annotated[int, typer.Option(min=1, help="Length, in words, of a passage that two questions share.")]


def _apart(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Splits arguments into (sources, settings); KEY=VALUE is a setting."""
    settings = [text for text in arguments if re.match(r"[a-z_]+(\.\w+)*=", text)]
    return [text for text in arguments if text not in settings], settings


@data.command("show")
def data_show(
    source: SourceArgument,
    overrides: Overrides = None,
    split: Annotated[Literal["train", "validation", "test"], typer.Option()] = "train",
    problems: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    style: Annotated[str | None, typer.Option(help="Also show worked answers of this style.")] = None,
    model: Annotated[str | None, typer.Option(help="Count lengths in this model's tokens, not in words.")] = None,
) -> None:
    """Show problems and answers, and what the split holds.

    Its lengths, levels and domains.
    """
    from hone.base.settings import UserError
    from hone.preflight import inspect

    opened = inspect.open_source(source, overrides or ())
    task = opened.task
    shown = task.problems(split)
    styles = getattr(task, "trace_styles", ())
    if style is not None and style not in styles:
        raise UserError(f"--style {style}: task {task.name} writes {', '.join(styles) or 'no worked answers'}")
    for problem in shown[:problems]:
        print(visible(f"--- {problem.id}  level {problem.level or '-'}"))
        print(visible("\n".join(message["content"] for message in problem.messages)))
        print(visible(f"answer: {problem.answer}"))
        if style is not None:
            print(visible(cast("TracedTask", task).trace(problem, style, opened.seed).text))
    print(visible(f"\n{split}:"))
    print(visible("\n".join(inspect.counts(shown, *inspect.measure_of(model)))))


@data.command("check")
def data_check(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE... [KEY=VALUE]...", help="Task names, recipes, files or folders, and settings."),
    ],
) -> None:
    """Find invalid rows, unreadable answers and duplicates.

    Exit code 1 if there are any. Knights puzzles are solved again.
    """
    from hone.preflight import inspect
    from hone.tasks.knights.rows import check_rows
    from hone.tasks.rows.files import read_rows

    sources, overrides = _apart(sources)
    faults = 0
    for source in sources:
        if inspect.is_knights_file(source):
            rows = read_rows(source)
            faulty = check_rows(rows)
            print(
                visible(
                    "\n".join(
                        [f"{source}: {len(rows)} rows, {len(faulty)} faulty", *(f"  {fault}" for fault in faulty)]
                    )
                )
            )
            faults += len(faulty)
        else:
            lines, wrong = inspect.check(inspect.open_source(source, overrides))
            print(visible("\n".join([source, *(f"  {line}" for line in lines)])))
            faults += wrong
    raise typer.Exit(1 if faults else 0)


@data.command("overlap")
def data_overlap(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="A [B] [KEY=VALUE]...", help="Problems of A are looked up in B; settings apply to both."
        ),
    ],
    ngram: Ngram = 13,
) -> None:
    """Count the problems of A that are also in B.

    With one source: problems of train that are also in test. Two problems are the same if their questions have the
    same words, or if they are the same puzzle with other names or in another order.
    """
    from hone.base.settings import UserError
    from hone.preflight import inspect
    from hone.tasks.knights.rows import overlap
    from hone.tasks.rows.files import read_rows

    names, overrides = _apart(sources)
    if not 1 <= len(names) <= 2:
        raise UserError(f"{len(names)} sources ({', '.join(names)}) are too many: give one or two")
    a, b = names[0], names[1] if len(names) > 1 else None
    if b is not None and inspect.is_knights_file(a) and inspect.is_knights_file(b):
        print(visible("people  rows of A  rows of B  of A in B  with operands in order too"))
        for row in overlap(read_rows(a), read_rows(b)):
            print(visible(f"{row.people:6} {row.rows_a:10} {row.rows_b:10} {row.shared:10} {row.shared_exactly:27}"))
        return
    ours, *others = (inspect.open_source(s, settings) for s, settings in zip(names, inspect.fitting(names, overrides)))
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
        str | None, typer.Option(help="Also leave out the problems of this source, such as a test set.")
    ] = None,
    ngram: Annotated[
        int | None, typer.Option(min=1, help="With --against: also leave out questions that share this many words.")
    ] = None,
) -> None:
    """Write a file without duplicate problems. The first row of each problem is kept."""
    from hone.base.settings import UserError
    from hone.preflight import inspect

    if ngram is not None and against is None:
        raise UserError(f"--ngram {ngram}: has no effect without --against; remove it, or give --against")
    both = [source, *([against] if against is not None else [])]
    ours, *others = (
        inspect.open_source(s, settings) for s, settings in zip(both, inspect.fitting(both, overrides or ()))
    )
    theirs = [problem for other in others for problem in inspect.problems_of(other)]
    rows = inspect.rows_of(ours, split)
    total, copies, leaked = inspect.dedup(rows, theirs, ngram, out)
    also = f", {leaked} in {against}" if against is not None else ""
    print(visible(f"{out}: {total - copies - leaked} of {total} rows; left out: {copies} duplicates{also}"))


@data.command("label")
def data_label(
    source: Annotated[str, typer.Argument(metavar="RECIPE|TASK", help="A recipe, or the name of a task.")],
    out: Annotated[Path, typer.Option(help="JSONL file of labels; existing labels are kept.")],
    overrides: Overrides = None,
    split: Annotated[Literal["train", "validation", "test"], typer.Option()] = "train",
    labels: Annotated[
        str | None, typer.Option(help="Names, separated by commas; default: subjects of mathematics.")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(metavar="URL#MODEL", help="The model that labels; default: rules on words.")
    ] = None,
) -> None:
    """Label each problem with a subject from a fixed list.

    By a language model or by its words; for `domain_file`.
    """
    from hone.recipe.load import load_for_task
    from hone.rewards.judge.client import Judge
    from hone.rewards.judge.config import JudgeConfig
    from hone.rewards.judge.labels import choose, label
    from hone.tasks import make_task

    names = choose(labels)
    recipe = load_for_task(source, overrides or ()).stages[0]
    config = recipe.eval.judge if judge is None else JudgeConfig.at(judge, recipe.eval.judge)
    judge_client = Judge(config) if config.url is not None else None
    counts, by = label(make_task(recipe.task, recipe.seed).problems(split), names, judge_client, out)
    for name, count in counts.most_common():
        print(visible(f"{count:7}  {name}"))
    print(visible(f"{out}: " + ", ".join(f"{count} by {who}" for who, count in by.most_common())))


@data.command("perturb")
def data_perturb(
    source: Annotated[
        str, typer.Argument(metavar="RECIPE|TASK|FILE", help="A recipe of the task knights, or a data file.")
    ],
    overrides: Overrides = None,
    kind: Annotated[
        Literal["statement", "leaf", "roles", "names", "order"] | None, typer.Option(help="Default: unchanged.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The .jsonl or .parquet file to write.")] = Path("perturbed.jsonl"),
    split: Annotated[
        Literal["train", "validation", "test"], typer.Option(help="The split of a recipe or task.")
    ] = "test",
    seed: Annotated[int, typer.Option(help="Another seed gives other changes of the same kind.")] = 0,
) -> None:
    """Write knights puzzles with a small change each, solved again.

    They tell reasoning from memorization.
    """
    import json

    from hone.base.settings import UserError
    from hone.recipe.load import load_for_task
    from hone.tasks import make_task
    from hone.tasks.knights.perturb import perturbed_rows
    from hone.tasks.knights.task import puzzle_of_problem
    from hone.tasks.rows.files import write_rows

    if Path(source).suffix in (".jsonl", ".parquet"):
        source, overrides, split = "knights", [*(overrides or ()), f"task.test_file={json.dumps(source)}"], "test"
    recipe = load_for_task(source, overrides or ()).stages[0]
    if recipe.task.name != "knights":
        raise UserError(
            f"{source}: its task is {recipe.task.name}, but only puzzles of the task knights can be perturbed"
        )
    problems = make_task(recipe.task, recipe.seed).problems(split)
    rows = perturbed_rows(((puzzle_of_problem(p), p.messages[-1]["content"]) for p in problems), kind, seed)
    write_rows(out, rows)
    rest = len(problems) - len(rows)
    without = f"; {rest} puzzles have no such neighbour with one other solution" if rest else ""
    print(visible(f"{out}: {len(rows)} rows{without}"))
