"""The documentation as a site builds without a network, every link leads somewhere, and nothing is loaded."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "make demo" in home
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text()
        )
        assert not loaded, f"{page}: {loaded}"
    settings = (tmp_path / "site" / "reference" / "settings.html").read_text(encoding="utf-8")
    assert "samples_per_prompt" in settings
    assert "hone train" in (tmp_path / "site" / "reference" / "commands.html").read_text(encoding="utf-8")
