"""The package as users get it: built from the sources, installed without the checkout and beside its required
libraries only, and used."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hone
from hone.environments.make import MODULES

ROOT = Path(__file__).resolve().parents[1]

#: What is imported under another name than that of its package, or comes with one in a version that this one pins.
PACKAGE = {"ruamel": "ruamel-yaml", "pydantic_core": "pydantic", "pandas": "statsmodels"}

TINY = """\
name: tiny
task: {name: knights, people: [2], train: 8, test: 4}
prompt: {style: raw, system: "", template: "Q {user} A"}
model: {path: tiny, tiny: {layers: 1, hidden_size: 32, heads: 2, max_positions: 512}}
sampling: {max_tokens: 8}
eval: {sampling: {max_tokens: 8}}
"""


def test_it_is_marked_as_typed() -> None:
    assert "Typing :: Typed" in (ROOT / "pyproject.toml").read_text()
    assert (ROOT / "hone" / "py.typed").is_file()


class Installed(NamedTuple):
    wheel: Path
    sdist: Path
    folder: Path  # of the environment

    def run(self, *command: str) -> str:
        """Runs a command of the environment in an empty folder; fails the test with its output."""
        away = self.folder / "away"
        away.mkdir(exist_ok=True)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        done = subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            cwd=away,
            env=environment | {"HOME": str(away)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The source archive, the wheel built from it, and an environment with that wheel."""
    built, folder = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("environment")
    _call(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), str(ROOT))
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    _call(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python3*/site-packages")
    _call(sys.executable, "-m", "pip", "-q", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    libraries = folder / "libraries"
    libraries.mkdir()
    for distribution in _required(wheel):
        for entry in sorted({file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", ".")}):
            source, target = Path(str(distribution.locate_file(entry))), libraries / entry
            if source.exists() and not target.exists() and entry != "__pycache__":
                target.symlink_to(source)
    (site / "libraries.pth").write_text(f"{libraries}\n")
    return Installed(wheel, sdist, folder)


def _call(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def _requirements(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    return [Requirement(line) for line in re.findall(r"^Requires-Dist: (.+)$", text, re.M)]


def _required(wheel: Path) -> Iterator[metadata.Distribution]:
    """The libraries without any extra, and what they require in turn, as installed here."""
    waiting = [(r, "") for r in _requirements(wheel)]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        key = canonicalize_name(requirement.name), extra
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        distribution = metadata.distribution(requirement.name)
        for wanted in ("", *requirement.extras):
            if (key[0], wanted) not in seen:
                seen.add((key[0], wanted))
                waiting += [(Requirement(line), wanted) for line in distribution.requires or ()]
        yield distribution


@pytest.mark.slow
def test_everything_is_inside(installed: Installed) -> None:
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    assert {"hone/py.typed", "hone/rollout/native/decode.cpp", "hone/recipes/demo/recipe.yaml"} <= names
    page = {"index.html", "app.js", "frame.css", "uPlot.js", "uPlot.LICENSE"}
    assert {f"hone/report/live/static/{name}" for name in page} <= names
    tracked = {
        str(p.relative_to(ROOT)) for p in (ROOT / "hone").rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }
    assert tracked <= names
    assert not [name for name in names if not name.startswith(("hone/", "hone_rl-"))]
    with tarfile.open(installed.sdist) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    assert {"hone/py.typed", "recipes/demo/recipe.yaml", "tests/test_package.py", "Makefile", "LICENSE"} <= members


@pytest.mark.slow
def test_every_import_is_a_requirement(installed: Installed) -> None:
    """Of the package or of one of its extras; the other tests run without the extras.

    Programs of environments run in the interpreter of `environment.python`, which has their libraries.
    """
    imported: set[str] = set()
    programs = set((ROOT / "hone" / "environments").glob("*_program.py"))
    assert {path.name.removesuffix("_program.py") for path in programs} == set(MODULES)
    for path in {*(ROOT / "hone").rglob("*.py")} - programs:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add((node.module or "").partition(".")[0])
    others = imported - sys.stdlib_module_names - {"hone"}
    listed = {canonicalize_name(requirement.name) for requirement in _requirements(installed.wheel)}
    assert {name for name in others if canonicalize_name(PACKAGE.get(name, name)) not in listed} == set()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_works_without_the_checkout(installed: Installed) -> None:
    place = installed.run("python", "-c", "import hone; print(hone.__file__)")
    assert Path(place.strip()).is_relative_to(installed.folder)
    assert (Path(place.strip()).parent / "py.typed").is_file()
    assert installed.run("hone", "--version").split()[-1] == hone.__version__
    assert "knights" in installed.run("hone", "config", "show", "demo")
    (installed.folder / "away" / "tiny.yaml").write_text(TINY)
    installed.run("hone", "train", "tiny.yaml", "steps=2", "prompts_per_step=2", "samples_per_prompt=2")
    run = installed.folder / "away" / "runs" / "tiny"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
