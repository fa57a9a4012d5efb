"""A batch job of Slurm: a readable file in the run folder, submitted with sbatch.

    hone train RECIPE launch=slurm launch.slurm.nodes=2 launch.slurm.time=12:00:00 parallel.shard=16

The job asks for a signal before its time ends: the run saves and ends with an exit code of its own, on which the job
puts itself into the queue again and goes on where it was. Each task of srun is one worker.
Sources: https://slurm.schedmd.com/sbatch.html, https://slurm.schedmd.com/srun.html (signals are forwarded to the tasks)
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from hone.base.settings import UserError
from hone.launch.job import Job
from hone.launch.supervise import PREEMPTED, SAVING

#: Seconds for sbatch to answer.
SUBMIT = 60.0

SCRIPT = """\
#!/bin/bash
# Written by hone. Submit it again, by hand too, and the run goes on from its last checkpoint: sbatch {path}
{options}

cd {working}
{setup}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

# One task is one worker; Slurm tells each which one it is.
worker='
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE={per_node}
exec {command}
'
# When one has ended the others have --wait seconds: to save, where they were asked to, else to see that it is gone.
srun --kill-on-bad-exit=0 --wait={saving} --output={tasks} --open-mode=append bash -c "$worker" &
workers=$!

# Slurm's signal before the end of the time comes to this shell alone, and srun hands it on.
trap 'kill -TERM "$workers"' TERM
wait "$workers"; code=$?
while kill -0 "$workers" 2> /dev/null; do  # the signal has ended the wait, and the workers are saving
  wait "$workers"; code=$?
done

if [ "$code" -eq {preempted} ]; then  # it has saved, and is to go on
  if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
  fi
  echo "saved; not queued again (launch.restarts {restarts}). Go on with: sbatch {path}" >&2
fi
[ "$code" -eq 0 ] || tail -n 40 {first} >&2
exit "$code"
"""


def check(job: Job) -> None:
    """Before anything is written: nothing is needed for that."""


def run(job: Job) -> int:
    """Write the file and submit it; returns 0. Raises UserError if that cannot be done."""
    path = job.folder / "slurm.sbatch"
    path.write_text(script(job))
    if shutil.which("sbatch") is None:
        raise UserError(f"launch: there is no sbatch on this machine. On one that has it: sbatch {path.resolve()}")
    try:
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, timeout=SUBMIT)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"sbatch did not answer within {SUBMIT:g} s; look with squeue whether the job is there, else: sbatch {path}"
        ) from None
    if done.returncode:
        raise UserError(f"sbatch refuses {path}: {done.stderr.strip() or done.stdout.strip()}")
    print(f"{done.stdout.strip()}: {path}. What it says: {job.folder / 'logs'}", file=sys.stderr)
    return 0


def script(job: Job) -> str:
    """The batch file of a job. Paths are those of this machine, which the nodes share."""
    config = job.launch.slurm
    per_node = job.processes // config.nodes
    logs = job.folder.resolve() / "logs"
    given = {
        "job-name": job.folder.name,
        "nodes": config.nodes,
        "ntasks-per-node": per_node,
        "cpus-per-task": config.cpus,
        "gpus-per-node": per_node * config.gpus or None,
        "mem": config.memory,
        "time": config.time,
        "partition": config.partition,
        "account": config.account,
        "signal": f"B:TERM@{config.notice}",
        "output": _for_sbatch(logs, "slurm-%j.log"),
        "open-mode": "append",
    }
    options = [f"--{key}={value}" for key, value in given.items() if value is not None] + ["--requeue"]
    command = " ".join(shlex.quote(part) for part in job.command())
    return SCRIPT.format(
        path=shlex.quote(str(job.folder.resolve() / "slurm.sbatch")),
        options="\n".join(f"#SBATCH {option}" for option in [*options, *config.options]),
        working=shlex.quote(os.getcwd()),
        setup="\n".join(config.setup),
        per_node=per_node,
        # the whole stands within single quotes
        command=command.replace("'", "'\\''"),
        tasks=shlex.quote(str(logs).replace("%", "%%") + "/rank_%t.log"),
        first=shlex.quote(str(logs / "rank_0.log")),
        saving=round(SAVING),
        preempted=PREEMPTED,
        restarts=job.launch.max_restarts,
    )


def _for_sbatch(folder: Path, name: str) -> str:
    """A path in an #SBATCH line, where a blank ends the word, and a percent sign begins a pattern."""
    text = f"{str(folder).replace('%', '%%')}/{name}"
    return f'"{text}"' if " " in text else text
