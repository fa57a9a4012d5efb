"""What to install for an extra of hone, as a command that works wherever hone itself came from.

    needed("view")      # "pip install 'starlette>=0.40' 'uvicorn>=0.30'"

The packages are named, rather than `hone-rl[view]`, since hone may be installed from a checkout or a wheel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires

PACKAGE = "hone-rl"


def needed(extra: str) -> str:
    """The command that installs what the extra brings. Raises ValueError for an unknown extra."""
    try:
        lines = requires(PACKAGE) or []
    except PackageNotFoundError:  # run from a folder that was never installed
        return f"pip install '.[{extra}]' in the checkout of hone"
    packages = sorted(set(_packages(extra, lines)))
    if not packages:
        raise ValueError(f"extra: hone has none of the name {extra!r}")
    return "pip install " + " ".join(
        f"'{package}'" if re.search(r"[<>=\[]", package) else package for package in packages
    )


def _packages(extra: str, lines: list[str]) -> Iterator[str]:
    for line in lines:
        package, _, marker = line.partition(";")
        if not re.search(rf"""extra == ['"]{re.escape(extra)}['"]""", marker):
            continue
        if nested := re.fullmatch(rf"{PACKAGE}\[(.+)\]", package.strip()):
            for name in nested[1].split(","):
                yield from _packages(name.strip(), lines)
        else:
            yield package.strip()
