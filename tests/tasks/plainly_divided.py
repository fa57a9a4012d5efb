"""The rules by which rows become splits, written plainly: with lists, sets of forms and no numpy."""

from collections.abc import Callable, Mapping, Sequence

from hone.tasks.rows.corpus import MOST, SHARE, rank
from hone.types import Problem

Form = Callable[[Problem], str]


def build(
    name: str,
    rows: Mapping[str, Sequence[Problem]],
    form: Form,
    *,
    train: int | None = None,
    validation: int | None = None,
    test: int | None = None,
) -> tuple[dict[str, list[Problem]], tuple[str, ...]]:
    """(problems by split, what there is to say)."""
    lines: list[str] = []
    own = {split: _distinct(name, split, rows[split], form, lines) for split in rows}
    pool = [*own.get("train", ()), *own.get("all", ())]
    held: dict[str, list[Problem]] = {}
    wanted = {"test": test, "validation": validation}
    for split, most in wanted.items():
        if split in own:
            source = _without(own[split], held, form, f"{name}: {split}", lines)
            held[split] = source if most is None else _lowest(source, most, form)
    pool = _without(pool, {**held, **{s: own[s] for s in wanted if s in own}}, form, f"{name}: train", lines)
    for split, most in wanted.items():
        if split not in own and pool:
            share = min(MOST, int(len(pool) * SHARE)) if most is None else min(most, len(pool))
            held[split] = _lowest(pool, share, form)
            gone = {problem.id for problem in held[split]}
            pool = [problem for problem in pool if problem.id not in gone]
            if held[split]:
                lines.append(f"{name}: {split}: {len(held[split])} problems cut from train")
    pool = pool if train is None else _lowest(pool, train, form)
    splits = {"train": pool, "validation": held.get("validation", []), "test": held.get("test", [])}
    sizes = ", ".join(f"{split} {len(problems)}" for split, problems in splits.items())
    return splits, (*lines, f"{name}: {sizes}")


def _distinct(name: str, split: str, problems: Sequence[Problem], form: Form, lines: list[str]) -> list[Problem]:
    seen: dict[str, Problem] = {}
    for problem in problems:
        seen.setdefault(form(problem), problem)
    if len(seen) < len(problems):
        more = len(problems) - len(seen)
        lines.append(f"{name}: {split}: {more} of {len(problems)} problems left out as duplicates")
    return list(seen.values())


def _without(
    problems: Sequence[Problem], others: Mapping[str, Sequence[Problem]], form: Form, label: str, lines: list[str]
) -> list[Problem]:
    left = list(problems)
    for split, theirs in others.items():
        forms = {form(problem) for problem in theirs}
        kept = [problem for problem in left if form(problem) not in forms]
        if len(kept) < len(left):
            lines.append(
                f"{label}: {len(left) - len(kept)} of {len(left)} problems left out, since they are in {split}"
            )
        left = kept
    return left


def _lowest(problems: Sequence[Problem], count: int, form: Form) -> list[Problem]:
    chosen = {p.id for p in sorted(problems, key=lambda p: rank(form(p)))[:count]}
    return [problem for problem in problems if problem.id in chosen]
