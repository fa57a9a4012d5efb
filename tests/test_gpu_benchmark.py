"""The harness of `make gpu`: what was measured is kept, whatever becomes of a section."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: Stands for `gpu_sections.py`: NAME ROWS RESULTS LIMIT. `hang` starts a process of its own and writes its id first.
SECTION = """
import json, os, subprocess, sys, time
name, rows, results, limit = sys.argv[1:]
def record(**values):
    with open(rows, "a") as file:
        file.write(json.dumps(values) + "\\n")
if name == "fail":
    record(half=1)
    print("and this is why")
    sys.exit(3)
if name == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    record(child=child.pid)
    with open(rows, "a") as file:
        file.write('{"torn": ')
        file.flush()
        time.sleep(600)
record(speed=2.5, before=sorted(json.load(open(results))["sections"]))
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    return gpu


def run(gpu: Any, folder: Path, names: list[str], budget: float = 60.0, limit: float = 20.0) -> dict[str, Any]:
    script, out = folder / "section.py", folder / "results" / "gpu.json"
    script.write_text(SECTION)
    result = gpu.begin(out, rehearse=True, keep=False)
    gpu.run(
        result, out, names, budget, [sys.executable, str(script)], {n: 2.0 if n == "hang" else limit for n in names}
    )
    written: dict[str, Any] = json.loads(out.read_text())
    assert written == {"device": None, **result}
    assert [p.name for p in out.parent.iterdir()] == ["gpu.json"]
    return result


def gone(process: int) -> bool:
    """Within five seconds: whoever inherits an orphan has to notice its end."""
    for _ in range(50):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_a_section_that_fails_or_hangs_keeps_its_rows_and_the_others_go_on(gpu: Any, tmp_path: Path) -> None:
    result = run(gpu, tmp_path, ["fail", "hang", "good"])
    sections = result["sections"]
    assert [sections[n]["state"] for n in ("fail", "hang", "good")] == ["failed", "cut", "done"]
    assert sections["fail"]["values"] == {"half": 1}
    assert sections["fail"]["error"] == "exit code 3; its output ended with: and this is why"
    assert sections["hang"]["error"].startswith("cut after 2 s")
    assert list(sections["hang"]["values"]) == ["child"], "the torn row is no row"
    assert sections["good"]["values"] == {"speed": 2.5, "before": ["fail", "good", "hang"]}
    assert gone(sections["hang"]["values"]["child"]), "what the section had started"
    lines = gpu.report(result, ["fail", "hang", "good"])
    assert lines[0].startswith("1 of 3 sections done in ")
    assert lines[-1] == "not done: fail, hang"


def test_rows_are_in_the_file_while_the_section_still_runs(gpu: Any, tmp_path: Path) -> None:
    section = {"values": {}}
    rows = tmp_path / "rows"
    assert not gpu.take_rows(section, rows)
    rows.write_text('{"a": 1}\n{"b": {"c": 2}}\n{"d": ')
    assert gpu.take_rows(section, rows)
    assert not gpu.take_rows(section, rows)
    assert section["values"] == {"a": 1, "b": {"c": 2}}


def test_without_time_a_section_is_skipped(gpu: Any, tmp_path: Path) -> None:
    result = run(gpu, tmp_path, ["good", "late"], budget=gpu.LEAST - 0.1)
    assert [s["state"] for s in result["sections"].values()] == ["skipped", "skipped"]
    assert gpu.report(result, ["good", "late"])[-1] == "not done: good, late"


def test_every_section_has_a_limit_and_the_time_is_below_nine_minutes(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_sections

    assert gpu_sections.sections().keys() == gpu.LIMITS.keys()
    assert gpu.BUDGET <= 530
    assert next(iter(gpu.LIMITS)) == "ceilings", "the others are shares of these"


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "sees no GPU; --rehearse runs every section on the CPU at toy sizes" in done.stderr
    assert not list(tmp_path.iterdir())


def test_wheels_of_what_is_installed_are_left_alone(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("pydantic", "pydantic_core", "no_such_package"):
        with zipfile.ZipFile(wheels / f"{name}-99.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}/__init__.py", "")
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_install.py"), str(wheels), str(tmp_path / "to")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "unpacked no_such_package-99.0-py3-none-any.whl\n"
    assert [p.name for p in (tmp_path / "to").iterdir()] == ["no_such_package"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--rehearse", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1780)
    assert done.returncode == 0, done.stdout[-3000:]
    sections = json.loads(out.read_text())["sections"]
    assert {section["state"] for section in sections.values()} == {"done"}
    assert sections["tests"]["values"]["passed"] >= 11
    assert sections["checkpoint"]["values"]["restored_to_the_bit"] is True
    assert 0 < sections["train-0.5B"]["values"]["mfu"] < 1
