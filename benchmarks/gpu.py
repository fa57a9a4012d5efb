"""Everything that only a GPU can show, in one command of at most nine minutes and without a network.

    make gpu-wheels                           # where there is a network: what the GPU machine's Python lacks
    make gpu                                  # on the GPU machine: its own python3, and these wheels
    python benchmarks/gpu.py --rehearse       # every section on the CPU, at toy sizes
    python benchmarks/gpu.py --only ceilings decode-0.5B

Each section (`benchmarks/gpu_sections.py`) is a process of its own with a time limit. What it measures is written at
once to benchmarks/results/gpu.json, so that a section that fails, hangs or is cut off loses nothing that was measured
before, and the others go on. Random weights of Qwen2.5's shapes: nothing is downloaded.

    {"device": "...", "versions": {...}, "seconds": 431.0,
     "sections": {"ceilings": {"state": "done", "seconds": 12.1, "values": {"bf16_flops_per_s": 7.7e14, ...}},
                  "compile":  {"state": "failed", "seconds": 9.8, "error": "the end of its output", "values": {}}}}

`state` is done, failed, cut (its time limit), or skipped (no time was left). The exit code is 1 unless all are done;
what failed is printed last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECTIONS_FILE = Path(__file__).with_name("gpu_sections.py")

#: Seconds that each section may take, in the order in which they run: what matters most first. Together more than the
#: budget: a section that is done early leaves its time to those after it.
LIMITS = {
    "ceilings": 45.0,
    "kernels": 90.0,
    "train-0.5B": 45.0,
    "decode-0.5B": 60.0,
    "tests": 180.0,
    "train-1.5B": 45.0,
    "decode-1.5B": 60.0,
    "trl": 75.0,
    "checkpoint": 45.0,
    "compile": 75.0,
    "memory": 90.0,
    "demo": 240.0,
}
BUDGET = 500.0  # seconds of all sections together: below nine minutes with the start, which imports PyTorch
LEAST = 5.0  # a section that would have less is skipped
SLOWER = 4.0  # times these, for a rehearsal: a busy CPU may be slow, and its clock says nothing
PACKAGES = ("torch", "triton", "transformers", "peft", "trl", "accelerate", "numpy", "pydantic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at toy sizes")
    parser.add_argument("--only", nargs="+", choices=LIMITS, help="these sections; the others stay in the file")
    parser.add_argument("--budget", type=float, help=f"seconds of all sections together; default: {BUDGET:.0f}")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu.json; build/gpu-rehearsal.json")
    arguments = parser.parse_args()
    usual = "build/gpu-rehearsal.json" if arguments.rehearse else "benchmarks/results/gpu.json"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the running section is ended on the way out
    out = arguments.out or ROOT / usual
    chosen = arguments.only or list(LIMITS)
    if not arguments.rehearse and (problem := without_gpu()):
        print(f"gpu.py: {problem}; --rehearse runs every section on the CPU at toy sizes", file=sys.stderr)
        raise SystemExit(2)
    result = begin(out, arguments.rehearse, keep=arguments.only is not None)
    command = [sys.executable, str(SECTIONS_FILE)]
    slower = SLOWER if arguments.rehearse else 1.0
    limits = {name: slower * limit for name, limit in LIMITS.items()}
    budget = arguments.budget or slower * BUDGET
    run(result, out, chosen, budget, command + (["--toy"] if arguments.rehearse else []), limits)
    print("\n".join(report(result, chosen)))
    raise SystemExit(any(result["sections"][name]["state"] != "done" for name in chosen))


def without_gpu() -> str | None:
    """Why nothing can be measured here; None: it can."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of another CUDA version
        return f"torch does not import ({error})"
    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no GPU"


def begin(out: Path, rehearse: bool, keep: bool) -> dict[str, Any]:
    """The record to fill. `keep`: sections of an earlier run stay."""
    sections: dict[str, Any] = {}
    if keep and out.exists():
        sections = json.loads(out.read_text())["sections"]
    there = {}
    for name in PACKAGES:
        try:
            there[name] = version(name)
        except PackageNotFoundError:
            there[name] = None
    python = ".".join(map(str, sys.version_info[:3]))
    return {"rehearsal": rehearse, "versions": {"python": python, **there}, "seconds": 0.0, "sections": sections}


def run(
    result: dict[str, Any],
    out: Path,
    chosen: list[str],
    budget: float,
    command: list[str],
    limits: Mapping[str, float],
) -> None:
    """Run the sections one after another; `result` and the file are up to date at any moment.

    `command` gets the section's name, the file for its rows, and the file of results so far.
    """
    start = time.monotonic()
    for name in chosen:
        left = budget - (time.monotonic() - start)
        section: dict[str, Any] = {"state": "skipped", "seconds": 0.0, "error": "no time was left", "values": {}}
        result["sections"][name] = section
        if left >= LEAST:
            one_section(result, out, name, min(limits[name], left), command)
        result["seconds"] = round(time.monotonic() - start, 1)
        write(out, result)
        print(line(name, result["sections"][name]), flush=True)


def one_section(result: dict[str, Any], out: Path, name: str, limit: float, command: list[str]) -> None:
    """A process of its own, which is ended with all that it started when its time is over."""
    section: dict[str, Any] = {"state": "running", "seconds": 0.0, "values": {}}
    result["sections"][name] = section
    write(out, result)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows.jsonl", Path(folder) / "log"
        call = [*command, name, str(rows), str(out), str(limit)]
        with log.open("wb") as into, ended(call, into) as child:
            code = None
            while code is None and time.monotonic() - start < limit:
                time.sleep(0.2)
                code = child.poll()
                if take_rows(section, rows):
                    write(out, result)
        take_rows(section, rows)
        output = log.read_text(errors="replace")
    section["seconds"] = round(time.monotonic() - start, 1)
    section["state"] = "done" if code == 0 else "cut" if code is None else "failed"
    if code is None:
        section["error"] = f"cut after {limit:.0f} s; its output ended with: {tail(output)}"
    elif code:
        section["error"] = f"exit code {code}; its output ended with: {tail(output)}"


@contextmanager
def ended(call: list[str], into: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The process and everything that it started is gone at the end of the block."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if "--toy" in call:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    child = subprocess.Popen(call, stdout=into, stderr=subprocess.STDOUT, start_new_session=True, env=environment)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and so has everything that it started
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def take_rows(section: dict[str, Any], rows: Path) -> bool:
    """Add what the section has written so far, one JSON object per line; whether anything is new."""
    whole = (
        [text for text in rows.read_text().splitlines(keepends=True) if text.endswith("\n")] if rows.exists() else []
    )
    before = json.dumps(section["values"])
    for text in whole:
        section["values"] |= json.loads(text)
    return json.dumps(section["values"]) != before


def write(out: Path, result: dict[str, Any]) -> None:
    """The file is whole at any moment."""
    out.parent.mkdir(parents=True, exist_ok=True)
    device = result["sections"].get("ceilings", {}).get("values", {}).get("device")
    text = json.dumps({"device": device, **result}, indent=1) + "\n"
    aside = out.with_name(f".{out.name}.writing")
    aside.write_text(text)
    os.replace(aside, out)


def tail(output: str, most: int = 1500) -> str:
    return output.strip()[-most:] or "nothing"


# --- what is printed --------------------------------------------------------------------------------------------------


def line(name: str, section: Mapping[str, Any]) -> str:
    values = section["values"]
    shown = ", ".join(f"{key} {short(values[key])}" for key in values if isinstance(values[key], (int, float)))
    return f"{section['state']:8}{name:14}{section['seconds']:6.0f} s  {shown}"


def short(value: float) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def report(result: Mapping[str, Any], chosen: list[str]) -> list[str]:
    """The sections that are not done, last; with the reason of each."""
    sections = result["sections"]
    bad = [name for name in chosen if sections[name]["state"] != "done"]
    lines = [f"{len(chosen) - len(bad)} of {len(chosen)} sections done in {result['seconds']:.0f} s"]
    for name in bad:
        lines += ["", f"{sections[name]['state']}: {name}", sections[name]["error"]]
    if bad:
        lines += [
            "",
            f"these again, the others stay in the file: --only {' '.join(bad)}",
            "not done: " + ", ".join(bad),
        ]
    return lines


if __name__ == "__main__":
    main()
