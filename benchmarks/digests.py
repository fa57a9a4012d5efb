"""Digests of small runs of every kind: what a change that should change nothing must leave equal, bit for bit.

    python benchmarks/digests.py before.json [--demo]
    ... change the code ...
    python benchmarks/digests.py after.json --against before.json [--demo]

The cases: supervised training, generation, RL and on-policy distillation in a pipeline; LoRA with a schedule, refill
and hard resets; two processes that shard; an evaluation; the perplexity reward; with `--demo` the demo too. Digested
are final weights, metrics, evaluations and rollouts. Equal digests are expected on one machine with the same libraries.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHAT = {
    "weights": ("**/model/model.safetensors", "**/adapter_model.safetensors", "**/resets/*/model.safetensors"),
    "metrics": ("**/metrics.jsonl",),
    "evals": ("**/evals.jsonl", "**/evals/*.jsonl", "eval-out/**/*.jsonl"),
    "rollouts": ("**/rollouts/*", "**/tokens/*", "**/dataset.jsonl"),
}
TINY = "{path: tiny, tiny: {vocab_size: 400, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, mlp_size: 64}}"
KNIGHTS = "{name: knights, people: [2, 3], quiz: brief, names: 4, train: 40, validation: 6, test: 6, repeats: true}"
RAW = '{style: raw, system: "", template: "{user}\\n"}'
HEAD = f"task: {KNIGHTS}\nprompt: {RAW}\ntokens_per_microbatch: 512\n"
PIPELINE = f"""
name: pipeline
model: {TINY}
task: {{name: dataset, source: rows.jsonl, grading: exact}}
prompt: {RAW}
tokens_per_microbatch: 1024
samples_per_prompt: 3
sampling: {{max_tokens: 12}}
eval: {{problems: 4, sampling: {{max_tokens: 12}}}}
checkpoint: {{every: 2, keep: 2}}
stages:
  - name: teacher
    stage: sft
    sft: {{examples: 480, examples_per_step: 8, styles: {{answer: 1.0}}}}
    optim: {{lr: 1.0e-2}}
  - {{name: answers, stage: generate, generate: {{problems_per_shard: 7}}}}
  - name: student
    stage: sft
    model: {{path: tiny, tiny: {{layers: 1}}}}
    sft: {{data: stages.answers, epochs: 3, examples_per_step: 4}}
    optim: {{lr: 1.0e-2}}
  - {{name: cold, stage: rl, steps: 3, prompts_per_step: 2, optim: {{lr: 1.0e-3}}, algo: {{updates_per_rollout: 2}}}}
  - {{name: onpolicy, stage: distil, teacher: stages.teacher, steps: 3, prompts_per_step: 2, optim: {{lr: 1.0e-3}}}}
"""
WARMUP = f"""
name: warmup
stage: sft
model: {TINY}
{HEAD}sft: {{examples: 96, examples_per_step: 8, styles: {{hasty: 1.0}}}}
optim: {{lr: 1.0e-2}}
"""
RL = "model: runs/warmup/model\nsampling: {max_tokens: 32}\nreward: {parts: {outcome: 1.0, well_formed: 0.5}}\n"
LORA = f"""
name: lora
{HEAD}{RL}steps: 6
prompts_per_step: 2
samples_per_prompt: 3
lora: {{rank: 2, targets: [q_proj, k_proj]}}
optim: {{lr: 1.0e-2, warmup_steps: 1}}
algo: {{kl: {{coef: 0.01}}, refill_rounds: 2}}
curriculum: {{kind: adaptive}}
eval: {{problems: 6, every: 2, sampling: {{max_tokens: 16}}}}
checkpoint: {{every: 3, keep: 2}}
reset: {{at: [2, 4]}}
schedule:
  - {{at: 1, prompts_per_step: 3, optim: {{lr: 2.0e-2}}}}
  - {{at: reset 1, samples_per_prompt: 4, lora: {{rank: 4, targets: all}}}}
  - {{at: reset 2, sampling: {{temperature: 1.2, max_tokens: 40}}, curriculum: {{kind: uniform}}}}
"""
SHARD = f"""
name: shard
{HEAD}{RL}steps: 3
prompts_per_step: 4
samples_per_prompt: 3
optim: {{lr: 1.0e-2}}
eval: {{problems: 6, sampling: {{max_tokens: 16}}}}
parallel: {{shard: 2}}
"""
PERPLEXITY = f"""
name: perplexity
model: runs/pipeline/teacher/model
task: {{name: dataset, source: rows.jsonl, grading: exact}}
prompt: {RAW}
sampling: {{max_tokens: 12}}
steps: 2
prompts_per_step: 3
samples_per_prompt: 3
optim: {{lr: 1.0e-3}}
reward: {{parts: {{perplexity: 1.0}}}}
eval: {{problems: 4, sampling: {{max_tokens: 12}}}}
"""
CASES = {"pipeline": PIPELINE, "warmup": WARMUP, "lora": LORA, "shard": SHARD, "perplexity": PERPLEXITY}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path, help="digests that these must equal")
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with the hone to look at")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        digests = run_all(Path(folder), arguments.python, arguments.demo)
    arguments.out.write_text(json.dumps(digests, indent=1) + "\n")
    if arguments.against:
        before = json.loads(arguments.against.read_text())
        other = [f"{c} {w}" for c, parts in before.items() for w, d in parts.items() if digests.get(c, {}).get(w) != d]
        print(f"different: {', '.join(other)}" if other else f"all {sum(map(len, before.values()))} digests are equal")
        raise SystemExit(bool(other))


def run_all(folder: Path, python: str, demo: bool) -> dict[str, dict[str, str]]:
    rows = [{"question": f"What is {i} modulo 3?", "answer": str(i % 3), "level": str(i % 2)} for i in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hone = [python, "-m", "hone"]
    digests = {}
    for name, text in CASES.items():
        (folder / f"{name}.yaml").write_text(text)
        call([*hone, "train", f"{name}.yaml"], folder)
        if name == "lora":
            call([*hone, "eval", "lora.yaml", "runs/lora", "eval.samples=2", "--out", "runs/lora/eval-out"], folder)
        digests[name] = digest(folder / "runs" / name)
        print(name, {k: v[:12] for k, v in digests[name].items()}, flush=True)
    if demo:
        call([*hone, "train", "demo"], folder)
        digests["demo"] = digest(folder / "runs" / "demo")
    return digests


def call(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT)  # this tree, whichever is installed
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")


def digest(run: Path) -> dict[str, str]:
    result = {}
    for what, patterns in WHAT.items():
        files = sorted({path for pattern in patterns for path in run.glob(pattern) if path.is_file()})
        whole = hashlib.sha256()
        for path in files:
            if "checkpoints" not in path.parts and "base" not in path.parts:
                whole.update(str(path.relative_to(run)).encode() + b"\0" + path.read_bytes())
        result[what] = whole.hexdigest()
    return result


if __name__ == "__main__":
    main()
