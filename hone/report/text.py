"""Makes untrusted text safe for a page: escapes it, and makes invisible characters visible."""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Iterable

from hone.base.visible import visible


def escape(text: object) -> str:
    """Escape text for element content and quoted attributes, and make invisible characters visible."""
    return html.escape(visible(text), quote=True)


def marked(text: str, spans: Iterable[tuple[int, int, str]], limit: int = 6000) -> str:
    """Escaped text with the spans in <mark>; beyond `limit` characters its middle is left out, with a note."""
    if len(text) > limit:
        head, tail = limit * 2 // 3, limit // 3
        cut = (
            f"\n\n[… {len(text) - head - tail:,} characters left out; the whole text is in the file named above …]\n\n"
        )
        kept = list(spans)
        first = _marked(text[:head], [s for s in kept if s[1] <= head])
        shift = len(text) - tail
        last = _marked(text[shift:], [(a - shift, b - shift, kind) for a, b, kind in kept if a >= shift])
        return f'{first}<span class="cut">{escape(cut)}</span>{last}'
    return _marked(text, spans)


def _marked(text: str, spans: Iterable[tuple[int, int, str]]) -> str:
    parts, at = [], 0
    for start, end, kind in spans:
        parts += [escape(text[at:start]), f'<mark title="{escape(kind)}">{escape(text[start:end])}</mark>']
        at = end
    return "".join([*parts, escape(text[at:])])


def percent(value: float, digits: int = 1) -> str:
    """Rounded half up, as readers expect of 48.5%."""
    scale = 10**digits
    return f"{math.floor(100 * value * scale + 0.5 + 1e-9) / scale:.{digits}f}%"


def number(value: float) -> str:
    """About three significant digits, with thousands separators and a true minus sign."""
    if not math.isfinite(value):
        return minus(str(value))
    if value == int(value) and abs(value) < 1e15:
        return minus(f"{int(value):,}")
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return minus(re.sub(r"e([+-])0*(\d+)$", lambda m: f"e{m.group(1).strip('+')}{m.group(2)}", text))


def minus(text: str) -> str:
    """A number's text with true minus signs in place of hyphens."""
    return text.replace("-", "\N{MINUS SIGN}")


def tokens(value: float) -> str:
    """A mean number of tokens."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def p_value(value: float) -> str:
    return "p < 0.0001" if value < 1e-4 else f"p = {value:.2g}"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def plain_ascii_key(text: str) -> str:
    """A file name or an id made from a label."""
    folded = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "-", folded.lower()).strip("-") or "x"
