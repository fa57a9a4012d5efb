"""The run folder: everything a run leaves behind, append-only, readable with ordinary tools.

    config.resolved.json   the recipe as validated
    manifest.json          code version, seed, versions, hardware, command
    metrics.jsonl          one row per step, the same for the same seed
    timings.jsonl          one row per step, seconds
    costs.jsonl            one row per step whose reward asked a server: calls, tokens, answers from the cache
    evals.jsonl            one row per evaluation; evals/LABEL.jsonl its samples
    events.jsonl           whatever was out of the ordinary
    rollouts/step_N.jsonl  every sample: text, parts, verdict, advantage, lengths
    tokens/step_N.safetensors   its tokens: ids, advantages, entropies, log-probs of sampler and trainer
    skipped/               batches whose update was not finite: see hone.train.guard
    checkpoints/           see hone.train.checkpoint
    resets/reset_001/      the model at each hard reset, an ordinary Hugging Face checkpoint: see hone.train.reset
    model/                 the final weights, an ordinary Hugging Face checkpoint
    adapter/               of LoRA: the adapter alone, in peft's format; its base is that of the last reset

A row of metrics.jsonl: {"step": 3, "phase": "rl", "loss": 0.01, "reward/mean": 0.42, ...}
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

import hone
from hone.algo.curriculum import Course
from hone.config import UserError
from hone.dist.world import ALONE, World
from hone.train import checkpoint, jsonl
from hone.train.config import CheckpointConfig
from hone.train.policy import Policy
from hone.train.reset import drop_resets, reset_folder
from hone.types import FloatArray, Group, Sample, StepStats
from hone.verify.targets import source_of


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop and has saved; `--resume` goes on from there. Exit code 130, as for any Ctrl-C."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped before step {step}, saved")
        self.step = step


class Run:
    """Writer of one run folder. Of several processes the first writes it; the others know what it says."""

    def __init__(self, folder: Path, checkpoints: CheckpointConfig, world: World = ALONE) -> None:
        self.folder, self.world = folder, world
        self.config = checkpoints
        self.history: list[dict[str, Any]] = []  # rows of metrics.jsonl
        self._stop = False  # this process was asked to
        self._stopping = False  # one of them was, and the step is saved
        self._unsynced: set[Path] = set()  # written since the last checkpoint

    @classmethod
    def open(
        cls, folder: Path, config: Mapping[str, Any], checkpoints: CheckpointConfig, seed: int, world: World = ALONE
    ) -> Run:
        """Create the folder, or continue in it; says so if its settings were other ones."""
        run = cls(folder, checkpoints, world)
        if not world.main:
            return run
        folder.mkdir(parents=True, exist_ok=True)
        jsonl.keep(folder / "events.jsonl", lambda row: True)
        resolved = folder / "config.resolved.json"
        text = json.dumps(config, indent=1)
        if resolved.exists() and resolved.read_text() != text:
            run.event(
                "config_changed", "resumed with other settings than before; config.resolved.json has the new ones"
            )
        jsonl.replace(resolved, text)
        files = user_files(config)
        if not (folder / "manifest.json").exists():
            jsonl.replace(folder / "manifest.json", json.dumps({**manifest(seed), "files": files}, indent=1))
        elif (before := json.loads((folder / "manifest.json").read_text()).get("files", {})) != files:
            other = ", ".join(sorted(name for name in {*before, *files} if before.get(name) != files.get(name)))
            run.event("file_changed", f"resumed with other contents of {other} than at the start of the run")
        return run

    # --- rows ---------------------------------------------------------------------------------

    def log(self, step: int, metrics: Mapping[str, float | str], seconds: Mapping[str, float]) -> None:
        self.history.append({"step": step, **metrics})
        self._append("metrics.jsonl", self.history[-1])
        self._append("timings.jsonl", {"step": step, **{k: round(v, 4) for k, v in seconds.items()}})

    def log_costs(self, step: int, costs: Mapping[str, float]) -> None:
        every = self.world.gather([dict(costs)], "costs")  # each process asked for its own groups
        costs = {key: sum(c.get(key, 0.0) for c in every) for key in dict.fromkeys(key for c in every for key in c)}
        if costs:
            self._append("costs.jsonl", {"step": step, **costs})

    def event(self, kind: str, message: str, step: int | None = None, **details: Any) -> None:
        """Something out of the ordinary: recorded, and said once on the terminal."""
        self._append("events.jsonl", {"step": step, "kind": kind, "message": message, **details})
        if self.world.main and kind not in ("checkpoint",):
            print(f"[{kind}] {message}", file=sys.stderr, flush=True)

    def log_eval(self, step: int, label: str, row: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        name = f"evals/{label}.jsonl" if label in ("before", "after") else f"evals/{label}_{step:06d}.jsonl"
        self._write_rows(name, samples)
        self._append("evals.jsonl", {"step": step, "label": label, **row, "samples_file": name})

    def log_rollouts(
        self,
        step: int,
        groups: Sequence[Group],
        prompts: Sequence[str],
        samples: Sequence[Sample],
        stats: StepStats,
        piece: Callable[[int], str],
    ) -> None:
        """Every sample of a step, as text and as tokens; `piece` decodes one token id.

        `samples` [S] are those of the groups in order.
        """
        if not self.world.main:
            return
        rows = []
        rest = iter(samples)
        for group, prompt in zip(groups, prompts, strict=True):
            for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
                rows.append(
                    {
                        "problem_id": rollout.problem_id,
                        "index": rollout.index,
                        "level": group.problem.level,
                        "prompt": prompt,
                        "text": rollout.text,
                        "parts": dict(reward.parts),
                        "total": reward.total,
                        "verdict": reward.verdict,
                        "extracted": reward.extracted,
                        "advantage": _mean_advantage(next(rest)),
                        "tokens": rollout.num_tokens,
                        "finish": rollout.finish,
                        **({"note": reward.note} if reward.note else {}),
                        "policy_version": rollout.turns[-1].policy_version,
                    }
                )
        self._write_rows(f"rollouts/step_{step:06d}.jsonl", rows)
        _write_tokens(self.path(f"tokens/step_{step:06d}.safetensors"), samples, stats, piece)

    def rows(self, name: str) -> list[dict[str, Any]]:
        return jsonl.read(self.folder / name)

    # --- checkpoints --------------------------------------------------------------------------

    def checkpoint(self, step: int, policy: Policy, course: Course | None = None, now: bool = False) -> None:
        """Save what is needed to begin step `step`, if it is due, if `now`, or if the user asked to stop."""
        self._stopping = self.world.any(self._stop, "whether to stop")
        if step % self.config.every == 0 or self._stopping or now:
            self.save(step, policy, course)

    def save(self, step: int, policy: Policy, course: Course | None = None) -> None:
        """What was written about the steps before comes to the disk first: a resumed run does not write it again."""
        for path in self._unsynced if self.world.main else ():
            checkpoint.fsync(path)
        self._unsynced.clear()
        state = None if course is None else course.state()
        if self.world.main:
            checkpoint.save(self.folder / "checkpoints", step, policy, self.config.keep, state)
        else:
            policy.save(self.folder)  # its part of the weights, for the first process to write
        self._append("events.jsonl", {"step": step, "kind": "checkpoint", "message": f"saved before step {step}"})

    def resume(self, policy: Policy, course: Course | None = None) -> int:
        """The step to begin with: that of the newest good checkpoint, 0 if none was written yet.

        Rows of steps that will be done again are removed, so that the files read as if the run had
        never been cut.
        """
        good = self.world.on_main(self._newest_checkpoint, "the checkpoint to go on from")
        step = resets = 0
        if good is not None:
            state = checkpoint.read_state(good)
            step, resets = int(state["step"]), len(state["policy"].get("resets", ()))
            if resets:
                policy.restore(good, state["policy"], reset_folder(self.folder, resets))
            else:
                policy.restore(good, state["policy"])
            if course is not None and state.get("course") is not None:
                course.restore(state["course"])
        self.history = self.world.on_main(lambda: self._back_to(step, resets), "the rows so far")
        return step

    def _newest_checkpoint(self) -> Path | None:
        """The one to go on from; damaged ones after it are removed."""
        folder = self.folder / "checkpoints"
        there = checkpoint.found(folder)
        good = checkpoint.newest_good(folder, lambda message: self.event("checkpoint_damaged", message))
        if there and good is None:
            raise UserError(
                f"{folder}: none of its {len(there)} checkpoints is whole; nothing was changed. Restore one, or move "
                f"{self.folder} away to begin anew"
            )
        checkpoint.drop_newer(folder, good)
        return good

    def _back_to(self, step: int, resets: int) -> list[dict[str, Any]]:
        """Remove what was written of `step` and later ones; the rows of the steps before."""
        drop_resets(self.folder, resets)
        started = (self.folder / "metrics.jsonl").exists() or (self.folder / "evals.jsonl").exists()
        for name in ("metrics.jsonl", "timings.jsonl", "costs.jsonl", "evals.jsonl"):
            jsonl.keep(self.folder / name, lambda row: row["step"] < step)
        for name in ("rollouts", "tokens", "skipped"):
            for path in (self.folder / name).glob("*"):
                # A kill leaves files half written: step_000007.jsonl.writing, and .tmpXXXXXX of safetensors.
                torn = path.suffix == ".writing" or not path.name.startswith("step_")
                if torn or int(path.name.removeprefix("step_").split(".")[0]) >= step:
                    path.unlink()
        if started:
            self.event("resumed", f"going on with step {step}", step)
        return self.rows("metrics.jsonl")

    def finish(self, policy: Policy, steps: int) -> None:
        """Export the final model; a stage with a `model` folder is complete."""
        if policy.lora is not None:
            policy.export_adapter(self.folder / "adapter")
        aside = self.folder / ".model"
        if self.world.main:
            shutil.rmtree(aside, ignore_errors=True)
        policy.export(aside)
        if self.world.main:
            if policy.lora is not None:
                checkpoint.sync(self.folder / "adapter")
            checkpoint.sync(aside)
            os.replace(aside, self.folder / "model")
        self.world.barrier("the final model")
        self._append("events.jsonl", {"step": steps, "kind": "finished", "message": "all steps are done"})

    # --- stopping -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """The first Ctrl-C (or SIGTERM) asks the loop to save and stop; a second one stops at once."""

        def ask(number: int, _: Any) -> None:
            if self._stop:
                raise KeyboardInterrupt
            self._stop = True
            if self.world.main:
                print("\nstopping after this step, then saving (again: stop at once)", file=sys.stderr, flush=True)

        before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop_if_asked(self, step: int) -> None:
        """Called between steps, after `checkpoint`: raises `Interrupted` if the user asked to stop."""
        if self._stopping:  # asked for since then: the next step saves first
            raise Interrupted(step)

    # --- files --------------------------------------------------------------------------------

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        if self.world.main:
            jsonl.append(self.path(name), row)

    def _write_rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if self.world.main:
            jsonl.write(self.path(name), rows)

    def path(self, name: str) -> Path:
        """Where to write a file of this run; the next checkpoint sees to it that it is on the disk."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        self._unsynced |= {path, path.parent}
        return path


def _mean_advantage(sample: Sample) -> float:
    values = sample.advantages[sample.trained]
    return float(values.mean()) if len(values) else 0.0


def _write_tokens(path: Path, samples: Sequence[Sample], stats: StepStats, piece: Callable[[int], str]) -> None:
    """Completion tokens of all samples, one after the other; `lengths` tells them apart.

    The trainer's log-prob and entropy are NaN where it had no reason to look: no gradient in that sample.
    """
    lengths = [int(s.trained.sum()) for s in samples]
    ids = np.concatenate([s.token_ids[s.trained] for s in samples]).astype(np.int32)

    def of_trainer(values: Mapping[int, FloatArray]) -> FloatArray:
        return np.concatenate([values.get(i, np.full(n, np.nan, np.float32)) for i, n in enumerate(lengths)])

    arrays = {
        "lengths": np.asarray(lengths, np.int32),
        "ids": ids,
        "sampled_logprobs": np.concatenate([s.logprobs[s.trained] for s in samples]),
        "trainer_logprobs": of_trainer(stats.logprobs),
        "entropies": of_trainer(stats.entropies),
        "advantages": np.concatenate([s.advantages[s.trained] for s in samples]),
    }
    pieces = {str(i): piece(i) for i in np.unique(ids).tolist()}
    save_file(arrays, path, metadata={"pieces": json.dumps(pieces, ensure_ascii=False)})


def manifest(seed: int) -> dict[str, Any]:
    """What one needs to know to run this again."""
    packages = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "pydantic")
    return {
        "code_version": code_version(),
        "seed": seed,
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in packages}},
        "hardware": {
            "machine": platform.machine(),
            "system": platform.system(),
            "cpus": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def user_files(config: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the files of the user's functions, by their names in the recipe."""
    sources = {name: source_of(name) for name in config.get("reward", {}).get("parts", {}) if ":" in name}
    return {name: hashlib.sha256(source).hexdigest() for name, source in sources.items() if source is not None}


def code_version() -> str:
    """The package version, with the commit when run from a checkout."""
    root = Path(hone.__file__).parent.parent
    if not (root / ".git").exists() or shutil.which("git") is None:
        return hone.__version__
    answer = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=10
    )
    return f"{hone.__version__}+{answer.stdout.strip() or 'unknown'}"
