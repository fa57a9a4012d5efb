"""matplotlib figures as files and as SVG that lives inside a page.

Inline SVG takes its colours and font from the page (so that it follows dark mode), has unique ids (several figures
share one document) and carries a title and a description for screen readers. The same figure always gives the same
bytes.
"""

from __future__ import annotations

import io
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hone.report.style import LIGHT
from hone.report.text import escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
RC: Any = {  # Any: matplotlib types each of its hundreds of names
    "svg.fonttype": "none",  # text stays text: small, selectable, in the reader's font
    "font.family": ["DejaVu Sans"],  # ships with matplotlib: the layout is the same everywhere
    "font.size": 12.0,
    "text.parse_math": False,  # a run may be called $x$
    "text.usetex": False,
    "axes.unicode_minus": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": LIGHT["grid"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.labelsize": 11.5,
    "axes.titlesize": 13.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": LIGHT["ink"],
    "axes.titlepad": 10.0,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 0.8,
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["grid"],
    "ytick.color": LIGHT["grid"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["muted"],
    "xtick.labelsize": 11.5,
    "ytick.labelsize": 11.5,
    "ytick.major.size": 0.0,
    "lines.linewidth": 2.2,
    "lines.solid_capstyle": "round",
    "path.simplify": True,
    "figure.facecolor": "white",
}


@dataclass(frozen=True)
class Rendered:
    """One figure in its three output forms."""

    inline: str
    svg: str
    png: bytes


def render(figure: Figure, key: str, title: str, description: str, dpi: int = 160) -> Rendered:
    """`key` prefixes every id of the inline form; use each once per page."""
    import matplotlib as mpl

    out, png = io.StringIO(), io.BytesIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with mpl.rc_context({**RC, "svg.hashsalt": key}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)  # a level named in Chinese
        figure.savefig(out, format="svg", transparent=True, metadata=metadata)
        figure.savefig(png, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    body, box = _clean(out.getvalue(), key)
    name, about = escape(title), escape(description)
    label = f'role="img" aria-labelledby="{key}-title {key}-desc"'
    described = f'<title id="{key}-title">{name}</title><desc id="{key}-desc">{about}</desc>'
    inline = f'<svg viewBox="{box}" {label}>{described}{_themed(body)}</svg>'
    width, height = box.split()[2:]
    standalone = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" width="{width}" height="{height}" {label} '
        f'font-family="{FONT}" stroke-linejoin="round">{described}'
        f'<rect width="100%" height="100%" fill="#fff"/>{body}</svg>\n'
    )
    return Rendered(inline, standalone, png.getvalue())


def _clean(source: str, key: str) -> tuple[str, str]:
    """The content of the <svg> element, minified, and its view box."""
    opening = re.search(r'<svg[^>]*viewBox="([^"]+)"[^>]*>', source)
    if opening is None:
        raise ValueError("render: matplotlib wrote an SVG without a viewBox; its format has changed")
    body = source[opening.end() : source.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>|<defs>\s*</defs>", "", body, flags=re.S)
    body = body.replace("xlink:href=", "href=")
    body = re.sub(r'\bid="', f'id="{key}-', body)
    body = re.sub(r'href="#', f'href="#{key}-', body)
    body = re.sub(r"url\(#", f"url(#{key}-", body)
    # font: bold 12px 'DejaVu Sans' -> size and weight only; the family is the page's
    body = re.sub(r"font: (?:(bold|\d{3}) )?([\d.]+)px [^;\"]*", _font, body)
    body = re.sub(r"(?<=[ \"(,])-?\d+\.\d{3,}", lambda m: f"{float(m.group()):.2f}".rstrip("0").rstrip("."), body)
    # Group ids that nothing refers to are matplotlib's book-keeping.
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', body))
    body = re.sub(r' id="([^"]+)"', lambda m: m.group() if m.group(1) in used else "", body)
    return re.sub(r">\s+<", "><", body).strip().replace("\n", " "), opening.group(1)


def _font(match: re.Match[str]) -> str:
    weight = f"font-weight: {match.group(1)}; " if match.group(1) else ""
    return f"{weight}font-size: {float(match.group(2)):g}px"


def _themed(body: str) -> str:
    """Replace literal colours by the page's variables."""
    for name, colour in LIGHT.items():
        body = body.replace(colour, f"var(--{name})")
    return body.replace("#ffffff", "var(--paper)")  # the inside of hollow marks
