"""The report of a run folder: `build(Path("runs/demo"))` writes runs/demo/report/report.html.

Beside the page: every figure as .svg and .png, every table as .csv and .md, and the picture for a
README (`key.svg`, `key.png`). Needs no GPU, no network and no torch; two builds give the same bytes.
"""

from __future__ import annotations

from pathlib import Path

from hone.analysis import reflection
from hone.report import curves, page, story, tables
from hone.report.figures import Panel, key_figure, level_figure, panel_figure
from hone.report.read import Run, load_run, stream
from hone.report.svg import Rendered, render
from hone.report.tables import Table
from hone.report.text import escape, plain_ascii_key

#: Rollout text read in search of first occurrences; they come early, or the search has gone on long enough.
FIRST_SEEN_BYTES = 48 * 2**20
_LEVEL_UNITS = {"knights": "number of people", "countdown": "count of numbers"}


def build(folder: Path, out: Path | None = None) -> Path:
    """Write the report of a run or pipeline folder; returns the page.

    `out` is the folder to write to (default: `report` in the run folder), or a name ending in .html.
    """
    run = load_run(Path(folder))
    target = Path(out) if out is not None else Path(folder) / "report"
    path = target if target.suffix == ".html" else target / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    report = _Report(run, path.parent)
    _write(path, report.html())
    return path


def _write(path: Path, text: str) -> None:
    """Whole or not at all: somebody may have the page open while a run goes on."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(text, encoding="utf-8", newline="\n")
    aside.replace(path)


class _Report:
    """One page in the making; figures and tables are written as they are placed."""

    def __init__(self, run: Run, out: Path) -> None:
        self.run, self.out = run, out
        self.story = story.tell(run)
        self.line = curves.course(run.of_kind("rl") or [s for s in run.stages if s.kind == "rl" and s.evals])

    def html(self) -> str:
        sections = [
            ("training", "Training", self.training()),
            ("evaluation", "Evaluation", self.evaluation()),
            ("samples", "Before and after", self.samples()),
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
            "Figures and tables stand beside this page as .svg, .png, .csv and .md; every number comes from the "
            "run folder’s metrics.jsonl, evals.jsonl and samples.</p></footer>"
        )
        return page.document(
            f"{self.run.name}: {story.headline(self.run, self.story)}", "\n".join(p for p in body if p)
        )

    def top(self) -> str:
        task = next(
            (s.config["task"].get("name") for s in self.run.stages if isinstance(s.config.get("task"), dict)), None
        )
        eyebrow = f"Run {self.run.name}" + (f" · task {task}" if task else "")
        said = list(story.sentences(self.run, self.story))
        return (
            f"<header>{page.paragraph(eyebrow, 'eyebrow')}<h1>{escape(story.headline(self.run, self.story))}</h1>"
            f"{page.paragraph(' '.join(said[:2]), 'lead')}{page.paragraph(' '.join(said[2:]))}"
            f"{page.unfinished(self.run)}</header>{page.tiles(self.story)}"
        )

    def key(self) -> str:
        """The figure that tells the story, as panels that flow on a page and as one picture."""
        panels = curves.key_panels(self.line)
        if not panels:
            return ""
        about = " ".join(panel.description() for panel in panels)
        self.save(render(key_figure(panels), "key", f"{self.run.name}: training", about, dpi=200), "key")
        figures = "".join(self.place(panel) for panel in panels)
        note = page.paragraph(curves.smoothing_note(self.run), "quiet")
        return f'<div class="figures">{figures}</div>{note}'

    def training(self) -> str:
        panels = curves.training_panels(self.line)
        for i, stage in enumerate(self.run.of_kind("sft")):
            panels += curves.sft_panels(stage, plain_ascii_key(f"sft {i or ''} {stage.name}"))
        if not panels:
            return ""
        return f'<div class="figures">{"".join(self.place(panel) for panel in panels)}</div>'

    def evaluation(self) -> str:
        """Summary, levels, verdicts and pass@k of the evaluations."""
        sides = [side for side in (self.story.before, self.story.after) if side]
        rows = [
            (
                s.label,
                s.accuracy,
                s.tokens.value if s.tokens else None,
                s.reflects.value if s.reflects else None,
                s.sampling,
            )
            for s in sides
        ]
        parts = [self.table(tables.summary_table(rows))]
        task = (
            next((s.config.get("task") for s in self.run.stages if isinstance(s.config.get("task"), dict)), None) or {}
        )
        unit = _LEVEL_UNITS.get(str(task.get("name")), "level")
        levels = [
            (s.label, s.row["by_level"], s.row.get("accuracy"))
            for s in sides
            if isinstance(s.row.get("by_level"), dict)
        ]
        if any(by_level for _, by_level, _ in levels):
            parts.append(self.levels([(label, by_level) for label, by_level, _ in levels], unit))
            parts.append(
                self.table(tables.level_table([(name, {**cells, "all": whole}) for name, cells, whole in levels], unit))
            )
        verdicts = [(s.label, s.row["verdicts"]) for s in sides if isinstance(s.row.get("verdicts"), dict)]
        parts += [self.pass_at_k(sides), self.table(tables.verdict_table(verdicts))]
        return "\n".join(part for part in parts if part)

    def levels(self, rows: list[tuple[str, dict[str, object]]], unit: str) -> str:
        names = tables.level_order(level for _, by_level in rows for level in by_level)
        if not 2 <= len(names) <= 20:
            return ""
        cells = [(label, label, [tables.to_interval(by_level.get(n)) for n in names]) for label, by_level in rows]
        title = f"Accuracy by {unit}"
        said = "; ".join(
            f"{label} " + ", ".join(f"{n}: {100 * c.value:.0f}%" for n, c in zip(names, row, strict=True) if c)
            for label, _, row in cells
        )
        rendered = render(level_figure(names, cells, title, unit), "levels", title, f"{title}. {said}.")
        self.save(rendered, "levels")
        return f'<div class="wide">{page.figure(rendered.inline)}</div>'

    def pass_at_k(self, sides: list[story.Side]) -> str:
        """Only where problems were sampled more than once."""
        lines = tuple(curve for side in sides for curve in curves.pass_at_k(side))
        if not lines:
            return ""
        note = "Chance that at least one of k samples is correct (unbiased); bands are 95%, over problems."
        panel = Panel("pass-at-k", "pass@k", "k, samples per problem", lines, share=True, note=note)
        return f'<div class="wide">{self.place(panel)}</div>'

    def samples(self) -> str:
        shown = page.samples(self.story)
        note = (
            "Reflection phrases are marked. The problems were chosen by rule, not by hand: up to three that were "
            "mended, and one each that stayed wrong, was lost, and was right both times."
        )
        return page.paragraph(note, "quiet") + shown if shown else ""

    def first_seen(self) -> str:
        files = next((files for stage in self.line.stages if (files := stage.rollout_files())), [])
        found = reflection.first_occurrences(stream(files, FIRST_SEEN_BYTES))
        kinds = f"{len(found)} of {len(reflection.KINDS)} kinds of phrase were found"
        caption = f"The first training samples with each kind of reflection phrase ({kinds})."
        if found and found[0].step == 0:
            caption += " Those of step 0 were there before RL had changed anything."
        return self.table(page.first_seen(found, caption))

    def place(self, panel: Panel) -> str:
        rendered = render(panel_figure(panel), panel.key, panel.title, panel.description())
        self.save(rendered, panel.key)
        return page.figure(rendered.inline, panel.note)

    def save(self, rendered: Rendered, key: str) -> None:
        _write(self.out / f"{key}.svg", rendered.svg)
        (self.out / f"{key}.png").write_bytes(rendered.png)

    def table(self, table: Table | None) -> str:
        if table is None:
            return ""
        _write(self.out / f"{table.key}.csv", table.csv())
        _write(self.out / f"{table.key}.md", table.markdown())
        return table.html()
