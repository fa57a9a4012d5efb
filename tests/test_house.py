"""House rules that a count can check: sizes, parameters of functions, names of variables, whole messages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MOST = 6  # parameters, without self and cls

#: Rooms in which they are counted.
COUNTED = ("environments", "learn", "rollout", "stages")

#: (path, function) -> why it has more.
EXCEPTIONS: dict[tuple[str, str], str] = {}

#: Names that do not say what the thing is. `left` is fine beside a `right` in the same file.
RIDDLES = ("asked", "found", "given", "said")


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return sum(one.arg not in ("self", "cls") for one in every)


def functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def assigned(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of every variable, parameter and function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name


def riddles(source: str) -> list[tuple[int, str]]:
    names = sorted(set(assigned(source)))
    vague = {*RIDDLES, "left"} - ({"left"} if any(name == "right" for _, name in names) else set())
    return [(line, name) for line, name in names if name in vague]


def files(*rooms: str) -> Iterator[tuple[str, str]]:
    """(path below hone/, source)."""
    for room in rooms:
        for path in sorted((ROOT / "hone" / room).rglob("*.py")):
            yield path.relative_to(ROOT / "hone").as_posix(), path.read_text()


def test_functions_have_few_parameters():
    wide = {
        (name, function.name): f"hone/{name}:{function.lineno} {function.name} has {parameters(function)}"
        for name, source in files(*COUNTED)
        for function in functions(source)
        if parameters(function) > MOST
    }
    assert wide.keys() <= EXCEPTIONS.keys(), "\n".join(wide.values())


def test_files_and_functions_are_short():
    long = [
        f"hone/{name} has {len(source.splitlines())} lines"
        for name, source in files(".")
        if len(source.splitlines()) > 400
    ]
    long += [
        f"hone/{name}:{function.lineno} {function.name} has {lines} lines"
        for name, source in files(".")
        for function in functions(source)
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > 60
    ]
    assert not long, "\n".join(long)


def test_variables_are_named_after_the_thing():
    vague = [f"hone/{name}:{line} {word}" for name, source in files(".") for line, word in riddles(source)]
    assert not vague, "\n".join(vague)


def lost_strings(source: str) -> list[int]:
    """Lines of strings that are statements, but not docstrings: ends of messages that were cut off."""
    tree = ast.parse(source)
    owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = {id(node.body[0]) for node in ast.walk(tree) if isinstance(node, owners) and node.body}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and id(node) not in docstrings
        if isinstance(node.value, ast.JoinedStr) or isinstance(getattr(node.value, "value", None), str)
    ]


def test_no_message_is_cut_off():
    lost = [f"hone/{name}:{line}" for name, source in files(".") for line in lost_strings(source)]
    assert not lost, "\n".join(lost)


def test_the_counts_themselves():
    source = "class A:\n    def f(self, a, /, b, *c, d=1, **e): ...\n    async def g(cls): found, x = a\n"
    assert [parameters(f) for f in functions(source)] == [5, 0]
    assert (3, "found") in list(assigned(source))
    assert list(assigned("lambda found: found.left")) == [(1, "found")]
    assert riddles("lambda found: found.left") == [(1, "found")]
    assert riddles("def said(): left = 1") == [(1, "left"), (1, "said")]
    assert riddles("left, right = found") == []
    assert lost_strings('"""Doc."""\nx = "a "\n"b"\ndef f(): "doc"\nf"{x}"\n') == [3, 5]
