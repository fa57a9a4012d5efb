"""Places figures and tables: in the page, and next to it as files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hone.report import page
from hone.report.figures import Panel, panel_figure
from hone.report.svg import Rendered, render
from hone.report.tables import Table, to_csv

_POINTS = ("curve", "x", "y", "low", "high")


def write(path: Path, text: str) -> None:
    """Write a file atomically, because a browser may have the page open during a run."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(text, encoding="utf-8", newline="\n")
    aside.replace(path)


class Sheet:
    """A page under construction; figures are saved as .svg, .png and .csv, tables as .csv, .md and .tex."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def place(self, panel: Panel) -> str:
        rendered = render(panel_figure(panel), panel.key, panel.title, panel.description())
        self.save(rendered, panel.key)
        write(self.out / f"{panel.key}.csv", to_csv(_POINTS, panel.rows()))
        return page.figure(rendered.inline, panel.note)

    def flow(self, panels: Iterable[Panel]) -> str:
        """Place small figures side by side, as many as fit."""
        placed = "".join(self.place(panel) for panel in panels)
        return f'<div class="figures">{placed}</div>' if placed else ""

    def save(self, rendered: Rendered, key: str) -> None:
        write(self.out / f"{key}.svg", rendered.svg)
        (self.out / f"{key}.png").write_bytes(rendered.png)

    def table(self, table: Table | None) -> str:
        if table is None:
            return ""
        write(self.out / f"{table.key}.csv", table.csv())
        write(self.out / f"{table.key}.md", table.markdown())
        write(self.out / f"{table.key}.tex", table.latex())
        return table.html()
