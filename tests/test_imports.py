"""The direction of imports, and that configuration and the command line answer without the heavy packages."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: The rooms of hone, in the order of a problem's life. Each may import from the rows above it, and from itself.
ROWS = (
    ("types",),
    ("base",),
    ("grade",),
    ("tasks",),
    ("rewards",),
    ("recipe",),
    ("model",),
    ("learn",),
    ("rollout",),
    ("environments",),
    ("runs",),
    ("preflight", "measure", "serve", "launch"),
    ("stages",),
    ("report",),
    ("cli",),
)

HEAVY = (
    "torch",
    "transformers",
    "matplotlib",
    "statsmodels",
    "scipy",
    "pyarrow",
    "pandas",
    "vllm",
    "ray",
    "wandb",
    "starlette",
    "uvicorn",
    "reasoning_gym",
    "sympy",
)


def imports(source: str, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, imported module of hone, without `hone.`), function bodies included, TYPE_CHECKING blocks not."""

    def visit(node: ast.AST) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from visit(other)
            return
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name[5:]) for a in node.names if a.name.startswith("hone."))
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            if module == "hone":
                yield from ((node.lineno, a.name) for a in node.names)
            elif module.startswith("hone."):
                yield node.lineno, module[5:]
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from visit(ast.parse(source))


def wrong_imports(name: str, source: str) -> list[str]:
    """`name` is the path below hone/, as in `learn/policy.py`. `python -m hone` is a door of the command line."""
    path = Path(name)
    own = "cli" if name == "__main__.py" else path.parts[0].removesuffix(".py")
    row = _row(own)
    allowed = {own, *(unit for above in ROWS[:row] for unit in above)}
    found = imports(source, ("hone", *path.parent.parts))
    return [f"hone/{name}:{line} imports hone.{m}" for line, m in found if m.split(".")[0] not in allowed]


def _row(unit: str) -> int:
    return next(i for i, row in enumerate(ROWS) if unit in row)


def test_every_module_imports_only_from_the_rows_above():
    wrong = []
    for file in sorted((ROOT / "hone").rglob("*.py")):
        name = file.relative_to(ROOT / "hone").as_posix()
        if name == "__init__.py":
            assert not list(imports(file.read_text(), ("hone",))), "hone/__init__.py imports nothing"
        else:
            wrong += wrong_imports(name, file.read_text())
    assert not wrong


@pytest.mark.parametrize(
    "name, source, lines",
    [
        ("learn/losses.py", "from hone.types import Group", []),
        ("learn/losses.py", "from hone.learn.kl import x\nfrom hone.learn import y", []),
        ("learn/losses.py", "def f():\n    import hone.rollout.engine", [2]),
        ("tasks/knights.py", "from hone import cli", [1]),
        ("tasks/knights.py", "from ..rewards import base", [1]),
        ("tasks/base.py", "from . import splits", []),
        ("learn/pack.py", "if TYPE_CHECKING:\n    from hone.rollout.engine import Engine", []),
        ("measure/run.py", "from hone.serve.app import app", [1]),  # siblings are not above
        ("learn/policy.py", "from hone.recipe.sections.rollout import x\nfrom hone.rollout.engine import y", [2]),
        ("report/build.py", "from hone.cli.app import main", [1]),
    ],
)
def test_the_check_itself(name, source, lines):
    assert [int(w.split(":")[1].split()[0]) for w in wrong_imports(name, source)] == lines


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "body",
    [
        "import hone.cli.app, hone.preflight.doctor",
        "from hone.recipe import load, notes, recipe\nr = load.load('demo'); notes.notices(r); recipe.resolved(r)",
        "from hone.cli import app; sys.argv = ['hone', 'config', 'presets']\ntry: app.main()\nexcept SystemExit: 0",
        "import hone.types, hone.tasks, hone.rewards",
        "from hone.recipe.explain import explain; from hone.recipe.load import load; explain(load('demo'))",
    ],
)
def test_without_heavy_packages(body):
    code = f"import sys\n{body}\nsys.exit(', '.join(m for m in {HEAVY} if m in sys.modules) or None)"
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_help_answers_at_once():
    """In processor time, which is what the code costs: other processes make the clock on the wall run on."""
    resource = pytest.importorskip("resource", reason="processor time of children is known on Unix only")

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run_python("from hone.cli.app import main; main()", "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(5)) < 0.3


def test_few_files_know_every_setting():
    """Below the stages, functions take the sections that they need, or the settings of one kind of stage."""

    def names(tree: ast.AST) -> set[str]:
        modules = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "hone.recipe.recipe"]
        return {alias.name for module in modules for alias in module.names}

    files = [f for f in (ROOT / "hone").rglob("*.py") if "Recipe" in names(ast.parse(f.read_text()))]
    assert len(files) <= 15, sorted(str(f.relative_to(ROOT)) for f in files)


def test_there_are_no_circles_between_modules():
    """Of imports at the top of a module; one inside a function runs when everything is there."""
    files = {".".join(("hone", *f.relative_to(ROOT / "hone").with_suffix("").parts)).removesuffix(".__init__"): f
             for f in (ROOT / "hone").rglob("*.py")}  # fmt: skip

    def needs(module: str) -> set[str]:
        tree = ast.parse(files[module].read_text())
        top = [n for n in tree.body if not isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.If))]
        imported = {a for n in top if isinstance(n, ast.ImportFrom) and n.module for a in
                 [n.module, *(f"{n.module}.{alias.name}" for alias in n.names)]}  # fmt: skip
        return {name for name in imported if name in files and name != module and not module.startswith(f"{name}.")}

    graph = {module: needs(module) for module in files}
    while ends := [module for module, others in graph.items() if not others]:  # what is left at last is in a circle
        graph = {m: others.difference(ends) for m, others in graph.items() if m not in ends}
    assert not graph
