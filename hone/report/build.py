"""The report of a run folder: `build(Path("runs/demo"))` writes runs/demo/report/report.html.

Next to the page it writes every figure as .svg, .png and .csv, every table as .csv, .md and .tex, and the picture for a
README (`key.svg`, `key.png`). It needs no GPU, no network and no torch; two builds give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hone.base.settings import UserError
from hone.measure.stats import reflection
from hone.measure.store import stored
from hone.report import curves, groups, page, story, tables
from hone.report.compare import assemble, build_evaluations, distinct, evaluations_of, model_sections, run_sections
from hone.report.figures import Panel, key_figure, level_figure
from hone.report.read import RunRecord, load_run, stream
from hone.report.sheet import Sheet, write
from hone.report.svg import render
from hone.report.text import escape, plain_ascii_key

#: Bytes of rollouts searched for first occurrences, which usually come early.
FIRST_SEEN_BYTES = 48 * 2**20


def build(folders: Path | Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of a run or pipeline folder, of several, or of a folder of evaluations; returns the page.

    `out` is the folder to write to (default: `report` in the run folder; with several runs `comparison` beside the
    first), or a name ending in .html.
    """
    paths = [Path(folders)] if isinstance(folders, (str, Path)) else [Path(folder) for folder in folders]
    repeated = {str(folder) for folder in paths if paths.count(folder) > 1}
    if repeated:
        raise UserError(f"report: {', '.join(sorted(repeated))} is given twice")
    evaluations = len(paths) == 1 and bool(stored(paths[0]))
    loaded = [] if evaluations else [load_run(folder) for folder in paths]
    default = paths[0] / "report" if len(paths) == 1 else paths[0].parent / "comparison"
    target = Path(out) if out is not None else default
    path = target if target.suffix == ".html" else target / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet = Sheet(path.parent)
    if evaluations:
        write(path, build_evaluations(paths[0], sheet))
    elif len(loaded) == 1:
        write(path, _Report(loaded[0], sheet).html())
    else:
        write(path, _several(loaded, sheet))
    return path


def _several(runs: Sequence[RunRecord], sheet: Sheet) -> str:
    unit = _unit(runs[0])
    measured = distinct([model for run in runs for model in evaluations_of(run.folder)])
    title, sentences, sections = run_sections(sheet, runs, unit, measured)
    return assemble(f"{len(runs)} runs", title, sentences, sections)


def _unit(run: RunRecord) -> str:
    tasks = [stage.config.get("task") for stage in run.stages]
    names = [str(task.get("name")) for task in tasks if isinstance(task, dict)]
    return page.LEVEL_UNITS.get(names[0] if names else "", "level")


class _Report:
    """A page under construction; figures and tables are written as they are placed."""

    def __init__(self, run: RunRecord, sheet: Sheet) -> None:
        self.run, self.sheet = run, sheet
        self.story = story.tell(run)
        self.line = curves.timeline(run.reinforced() or [s for s in run.line() if s.kind == "rl" and s.evals])
        self.reflects = curves.reflects(self.line)
        if not self.reflects:
            self.story = story.without_reflection(self.story)

    def html(self) -> str:
        sections = [
            ("training", "Training", self.training()),
            ("evaluation", "Evaluation", self.evaluation()),
            *self.models(),
            ("samples", "Before and after", self.samples()),
            ("groups", "Groups from training", self.groups()),
            ("first", "First reflections", self.first_seen()),
            ("made", "How it was made", page.made(self.run)),
            ("events", "Warnings and events", page.events(self.run)),
        ]
        placed = [(key, title, inside) for key, title, inside in sections if inside]
        links = "".join(f'<li><a href="#{key}">{escape(title)}</a></li>' for key, title, _ in placed)
        body = [self.top(), f'<nav aria-label="Sections"><ul>{links}</ul></nav>', self.key()]
        body += [page.section(key, title, inside) for key, title, inside in placed]
        body.append(
            "<footer><p>Intervals are 95%: Wilson’s with one sample per problem, otherwise a bootstrap over problems. "
            "Figures are next to this page as .svg, .png and .csv, tables as .csv, .md and .tex; every number comes "
            "from the run folder’s metrics.jsonl, evals.jsonl and samples.</p></footer>"
        )
        return page.document(
            f"{self.run.name}: {story.headline(self.run, self.story)}", "\n".join(p for p in body if p)
        )

    def top(self) -> str:
        task = next(
            (s.config["task"].get("name") for s in self.run.stages if isinstance(s.config.get("task"), dict)), None
        )
        eyebrow = f"Run {self.run.name}" + (f" · task {task}" if task else "")
        sentences = list(story.sentences(self.run, self.story))
        return (
            f"<header>{page.paragraph(eyebrow, 'eyebrow')}<h1>{escape(story.headline(self.run, self.story))}</h1>"
            f"{page.paragraph(' '.join(sentences[:2]), 'lead')}{page.paragraph(' '.join(sentences[2:]))}"
            f"{page.unfinished(self.run)}</header>{page.tiles(self.story)}"
        )

    def key(self) -> str:
        """The main figure of a run, as panels that flow on a page and as one picture."""
        panels = curves.key_panels(self.line)
        if not panels:
            return ""
        about = " ".join(panel.description() for panel in panels)
        self.sheet.save(render(key_figure(panels), "key", f"{self.run.name}: training", about, dpi=200), "key")
        figures = "".join(self.sheet.place(panel) for panel in panels)
        note = page.paragraph(curves.smoothing_note(self.run), "quiet")
        return f'<div class="figures">{figures}</div>{note}'

    def training(self) -> str:
        panels = curves.training_panels(self.line)
        for i, stage in enumerate(self.run.of_kind("sft")):
            panels += curves.sft_panels(stage, plain_ascii_key(f"sft {i or ''} {stage.name}"))
        if not panels:
            return ""
        return f'<div class="figures">{"".join(self.sheet.place(panel) for panel in panels)}</div>'

    def evaluation(self) -> str:
        """Summary, levels, verdicts and pass@k of the evaluations."""
        sides = [side for side in (self.story.before, self.story.after) if side]
        rows = [
            (
                s.label,
                s.accuracy,
                cut if isinstance(cut := s.row.get("truncation_rate"), (int, float)) else None,
                s.tokens.value if s.tokens else None,
                s.reflects.value if s.reflects else None,
                s.sampling,
            )
            for s in sides
        ]
        parts = [self.sheet.table(tables.summary_table(rows))]
        unit = _unit(self.run)
        levels = [
            (s.label, s.row["by_level"], s.row.get("accuracy"))
            for s in sides
            if isinstance(s.row.get("by_level"), dict)
        ]
        if any(by_level for _, by_level, _ in levels):
            parts.append(self.levels([(label, by_level) for label, by_level, _ in levels], unit))
            parts.append(
                self.sheet.table(
                    tables.level_table([(name, {**cells, "all": whole}) for name, cells, whole in levels], unit)
                )
            )
        verdicts = [(s.label, s.row["verdicts"]) for s in sides if isinstance(s.row.get("verdicts"), dict)]
        parts += [self.pass_at_k(sides), self.sheet.table(tables.verdict_table(verdicts))]
        return "\n".join(part for part in parts if part)

    def levels(self, rows: list[tuple[str, dict[str, object]]], unit: str) -> str:
        names = tables.level_order(level for _, by_level in rows for level in by_level)
        if not 2 <= len(names) <= 20:
            return ""
        cells = [(label, label, [tables.to_interval(by_level.get(n)) for n in names]) for label, by_level in rows]
        title = f"Accuracy by {unit}"
        sentences = "; ".join(
            f"{label} " + ", ".join(f"{n}: {100 * c.value:.0f}%" for n, c in zip(names, row, strict=True) if c)
            for label, _, row in cells
        )
        rendered = render(level_figure(names, cells, title, unit), "levels", title, f"{title}. {sentences}.")
        self.sheet.save(rendered, "levels")
        return f'<div class="wide">{page.figure(rendered.inline)}</div>'

    def pass_at_k(self, sides: list[story.Side]) -> str:
        """Add pass@k, if problems were sampled more than once."""
        lines = tuple(curve for side in sides for curve in curves.pass_at_k(side))
        if not lines:
            return ""
        note = "Chance that at least one of k samples is correct (unbiased); bands are 95%, over problems."
        panel = Panel("pass-at-k", "pass@k", "k, samples per problem", lines, share=True, note=note)
        return f'<div class="wide">{self.sheet.place(panel)}</div>'

    def models(self) -> list[tuple[str, str, str]]:
        """The results of `hone eval` on this run, if there are any."""
        measured = distinct(evaluations_of(self.run.folder))
        return model_sections(self.sheet, measured, _unit(self.run)) if measured else []

    def samples(self) -> str:
        shown = page.samples(self.story)
        marked = "Reflection phrases are marked. " if self.reflects else ""
        note = (
            f"{marked}The problems were chosen by rule, not by hand: up to three that were wrong before and right "
            "after, and one each that stayed wrong, became wrong, and was right both times."
        )
        return page.paragraph(note, "quiet") + shown if shown else ""

    def groups(self) -> str:
        """Add groups of the last stage that has answers: a prompt, two of its answers, and why they got their
        rewards."""
        shown = next((text for stage in reversed(self.line.stages) if (text := groups.html(stage))), "")
        note = "The best and the worst answer to a prompt, with what was read as the answer marked; chosen by rule."
        return page.paragraph(note, "quiet") + shown if shown else ""

    def first_seen(self) -> str:
        if not self.reflects:
            return ""
        files = next((files for stage in self.line.stages if (files := stage.rollout_files())), [])
        occurrences = reflection.first_occurrences(stream(files, FIRST_SEEN_BYTES))
        kinds = f"{len(occurrences)} of {len(reflection.KINDS)} kinds of phrase were found"
        caption = f"The first training samples with each kind of reflection phrase ({kinds})."
        if occurrences and occurrences[0].step == 0:
            caption += " Those of step 0 precede the first update."
        return self.sheet.table(page.first_seen(occurrences, caption))
