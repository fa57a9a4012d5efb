"""Mutation testing by hand: does a changed sign, bound or operator make a test fail? (`make mutants`)

    python benchmarks/mutants.py                       every module of MODULES
    python benchmarks/mutants.py learn/losses ...      some of them

Each module is mutated by mutmut (https://mutmut.readthedocs.io) in a copy of the repository and judged by the tests
beside it only: a fault that is caught only by a test far away costs an afternoon. A mutant has a time limit (15 times
what its tests take). mutmut runs mutants in forks of one process, which matters where importing torch takes seconds.

Not counted: mutants in the wording of an error (lines of a `raise` statement), and those that survive and are of
`EQUIVALENT`, each with the reason why no test can or should tell them apart. What else survives is printed as a
diff; exit code 1 if it is 3 % of the mutants or more in any module. The counts of each module take the place of its
row in benchmarks/results/mutants.json.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
LIMIT = 0.03
SECONDS = 3600  # for one module

#: Module below hone/ -> the tests beside it.
MODULES: dict[str, tuple[str, ...]] = {
    "learn/advantages": ("tests/learn/test_advantages.py", "tests/learn/test_value.py"),
    "learn/losses": ("tests/learn/test_losses.py", "tests/learn/test_value.py"),
    "learn/kl": ("tests/learn/test_kl.py",),
    "learn/reduce": ("tests/learn/test_reduce.py",),
    "learn/objective": ("tests/learn/test_objective.py",),
    "learn/pack": ("tests/learn/test_pack.py",),
    "learn/batches": ("tests/learn/test_batches.py",),
    "learn/samples": ("tests/learn/test_samples.py", "tests/environments/test_conversation.py"),
    "tasks/curriculum": ("tests/tasks/test_curriculum.py",),
    "base/stats": ("tests/measure/test_stats.py",),
    "measure/stats/ability": ("tests/measure/test_ability.py",),
    "measure/stats/passk": ("tests/measure/test_passk.py",),
    "measure/stats/reflection": ("tests/measure/test_reflection.py",),
    "rewards/rules": ("tests/rewards/test_rules.py",),
    "rewards/numeric": ("tests/rewards/test_numeric.py",),
    "rewards/thinking": ("tests/rewards/test_thinking.py",),
    "rewards/perplexity": ("tests/rewards/test_perplexity.py",),
    "grade/extract": ("tests/grade/test_extract.py",),
    "grade/kinds": ("tests/grade/test_kinds.py",),
    "grade/parse": ("tests/grade/test_parse.py",),
    "rollout/native/sampler": ("tests/rollout/test_sampler.py",),
}

#: Module ("": all) -> what a mutated line looks like -> why it may stay.
EQUIVALENT: dict[str, dict[str, str]] = {
    "": {
        r"dim=\+1|, dim=1\b|sort\(descending|topk\([^()]*, \)": "tensors are [B, N]: the last dimension is dimension 1",
        r"device=None|(int64|log_ratio.dtype|rows|-math.inf|len\(logits\)), \)": "on a CPU the same device anyway",
        r"stable=(None|False)|stable\b, \)|descending=True, \)": "sorting so few numbers is stable anyway",
    },
    "learn/advantages": {
        r"strict=(None|False)\)|\bzip\(.*, \)": "lengths that differ were refused before, by `_check`",
        r"totals = \[np\.asarray\(group, (dtype=None)?\)": "the penalties, or returns, that come to them are float64",
        r"value\.astype\(None\)": "float64 is numpy's default",
        r"np\.zeros\(n, (None)?\) if kl is None": "zeros of another precision",
        r"kl is None and not coef": "0 times the penalty is 0, too",
        r"\(coef \* kl\[p\]\[g\]\)\.astype\(None\)": "advantages are rounded to float32 in the end",
        r"is_zero_variance\(np\.asarray\(raw, (dtype=None)?\)\)": "equal numbers are equal in any precision",
        r"or \[np\.zeros\(1\)\]": "of a group in which nothing is graded: one zero has no variance either",
        r"max\(count, 2\.0\)": "a single value is its own mean",
    },
    "learn/reduce": {r"np.asarray\(lengths, (dtype=None)?\)": "whole numbers are divided to the same fractions"},
    "learn/losses": {
        r"samples.max\(\)\) \+ 2|len\(samples\) else 1": "a sum more, which no token reads",
        r"bincount\(samples, \)": "as long as the largest sample, which is the last",
    },
    "rollout/native/sampler": {
        r"width = (2|1) <<|n / width": "how wide a block is changes the speed only",
        r"before\[:, 0\] = -2\.0": "any negative number",
        r"0 < sampling.top_k <= scores": "keeping all of them, in another order",
    },
}

CONFIG = """\
[tool.mutmut]
source_paths = ["hone"]
only_mutate = ["hone/{module}.py"]
also_copy = ["tests", "recipes", "hone"]
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = ["-p", "no:randomly", "-p", "no:random_order", "-m", "not slow and not gpu"]
"""


class Mutant(NamedTuple):
    name: str
    status: str  # mutmut's word: survived, "no tests", timeout, suspicious, ...
    before: tuple[str, ...]  # the lines that it changed
    after: tuple[str, ...]


def main(chosen: list[str]) -> int:
    if unknown := sorted(set(chosen) - MODULES.keys()):
        print(f"unknown: {', '.join(unknown)}; allowed: {', '.join(MODULES)}", file=sys.stderr)
        return 2
    worst = 0.0
    for module in chosen or MODULES:
        with tempfile.TemporaryDirectory() as folder:
            worst = max(worst, _judge(module, Path(folder)))
    return int(worst >= LIMIT)


def _judge(module: str, folder: Path) -> float:
    """Runs one module's mutants in `folder`, prints what survives and returns its share."""
    counts, alive = _mutate(module, folder)
    wording = _raised(ROOT / "hone" / f"{module}.py")
    named = [m for m in alive if not set(m.before) <= wording]
    reasons = [_reason(module, mutant) for mutant in named]
    open_ = [mutant for mutant, reason in zip(named, reasons, strict=True) if reason is None]
    total = sum(counts.values()) - (len(alive) - len(named))
    share = len(open_) / total if total else 1.0
    _record(
        module,
        {
            "mutants": total,
            "killed": total - len(named),
            "equivalent": dict(Counter(reason for reason in reasons if reason is not None)),
            "survived": len(open_),
            "in_the_wording_of_errors": len(alive) - len(named),
        },
    )
    print(
        f"{module}: {total} mutants, {total - len(named)} killed, {len(named) - len(open_)} equivalent, "
        f"{len(open_)} survived ({100 * share:.1f} %); besides, {len(alive) - len(named)} in the wording of errors",
        flush=True,
    )
    for mutant in open_:
        print(f"  {mutant.name}: {mutant.status}")
        print(
            "".join(f"    - {line}\n" for line in mutant.before) + "".join(f"    + {line}\n" for line in mutant.after)
        )
    return share


def _reason(module: str, mutant: Mutant) -> str | None:
    """Why no test tells this mutant from the original; None if none is known."""
    patterns = EQUIVALENT.get("", {}) | EQUIVALENT.get(module, {})
    return next((why for p, why in patterns.items() if any(re.search(p, line) for line in mutant.after)), None)


def _record(module: str, row: dict[str, object]) -> None:
    modules = json.loads(RESULTS.read_text())["modules"] if RESULTS.exists() else {}
    modules[module] = {"tests": MODULES[module], **row}
    results = {"command": "make mutants", "modules": {name: modules[name] for name in MODULES if name in modules}}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def _mutate(module: str, folder: Path) -> tuple[Counter[str], list[Mutant]]:
    """How many mutants have which status, and those that no test killed."""
    for name in ("hone", "tests", "recipes", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "data", "results"))
    settings = (ROOT / "pyproject.toml").read_text()
    tests = "[" + ", ".join(f'"{path}"' for path in MODULES[module]) + "]"
    (folder / "pyproject.toml").write_text(settings + "\n" + CONFIG.format(module=module, tests=tests))
    done = _python(folder, "-m", "mutmut", "run", "--max-children", os.environ.get("JOBS", "2"))
    listed = re.findall(
        r"^\s*(hone\.\S+): (.+)$", _python(folder, "-m", "mutmut", "results", "--all", "true").stdout, re.M
    )
    counts = Counter(status for _, status in listed)
    if not counts or not counts["killed"]:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        raise SystemExit(f"{module}: mutmut judged nothing (exit code {done.returncode}), see above")
    # A mutant that never ends is caught.
    alive = {name: status for name, status in listed if status not in ("killed", "timeout")}
    return counts, [Mutant(name, alive[name], *lines) for name, lines in _changed(folder, list(alive)).items()]


#: `mutmut show` for many mutants at once: each call of the command takes seconds.
SHOW = """
import sys
from mutmut.__main__ import get_diff_for_mutant
for name in sys.argv[1:]:
    print("# " + name)
    print(get_diff_for_mutant(name))
"""


def _changed(folder: Path, names: list[str]) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Of each mutant, the lines before and after."""
    if not names:
        return {}
    changed: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    shown = _python(folder, "-c", SHOW, *names).stdout
    for block in re.split(r"^# (?=hone\.)", shown, flags=re.M)[1:]:
        name, *lines = block.splitlines()
        removed = [line[1:].strip() for line in lines if line.startswith("-") and not line.startswith("---")]
        added = [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
        changed[name] = tuple(removed), tuple(added)
    return changed


def _python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def _raised(source: Path) -> set[str]:
    """The lines of `raise` statements: in them only the wording of an error can change."""
    text = source.read_text()
    spans = [(n.lineno, n.end_lineno or n.lineno) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Raise)]
    lines = text.splitlines()
    return {line.strip() for first, last in spans for line in lines[first - 1 : last]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
