"""A batch job of Slurm: a readable file in the run folder, submitted with sbatch.

    hone train RECIPE launch=slurm launch.slurm.nodes=2 launch.slurm.time=12:00:00 parallel.shard=16

The job requests a signal before its time ends: the run then saves and ends with a special exit code, and the job
requeues itself and resumes. Each task of srun is one worker.

The batch file relies on this observed behaviour of Slurm 22.05: srun on SIGTERM kills its tasks with SIGKILL at once
and does not forward the signal; `scancel --signal=TERM JOB` reaches the tasks but not the batch shell; after `scancel
JOB` tasks and shell get SIGTERM and run on for KillWait seconds, and the state is no longer RUNNING.
Sources: https://slurm.schedmd.com/sbatch.html, https://slurm.schedmd.com/srun.html, .../scancel.html
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from hone.base.settings import PEER_LOST, UserError
from hone.launch.job import Job
from hone.launch.supervise import GRACE, PREEMPTED, SAVING
from hone.recipe.sections.launch import SlurmConfig

#: Seconds for sbatch to answer.
SUBMIT = 60.0

SCRIPT = """\
#!/bin/bash
# Written by hone. Submitting it again, also by hand, resumes the run from its last checkpoint: sbatch {path}
{options}

cd {working}
{setup}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
# Since Slurm 22.05 srun does not inherit this from sbatch.
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# One task is one worker; Slurm sets its rank.
worker='
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE={per_node}
trap : TERM  # Slurm signals this shell too, but it must see how the worker ends
{command}
code=$?
case $code in
  0 | {preempted} | 130 | 143) ;;  # done, or told to stop
  *)
    echo "$code $RANK $(hostname)" >> {failed_here}."$SLURM_JOB_ID"
    sleep {grace}  # the others lose their peer and report it
    scancel --signal=KILL "$SLURM_JOB_ID.$SLURM_STEP_ID" ;;
esac
exit $code
'
failed={failed}.$SLURM_JOB_ID
rm -f "$failed"

# RUNNING only while the job may continue: not after scancel, preemption or its time limit.
state() {{ squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T; }}

# Only this shell gets Slurm's signal before the time limit. srun would kill the workers on it, so they are signalled by
# scancel. In any other state Slurm itself has signalled them.
notice=
trap 'if [ "$(state)" = RUNNING ]; then notice=1; scancel --signal=TERM "$SLURM_JOB_ID"; fi' TERM

# When one worker has ended without a failure, the others have --wait seconds to save and end.
srun --kill-on-bad-exit=0 --wait={saving} --output={tasks} --open-mode=append bash -c "$worker" &
workers=$!
wait "$workers"; code=$?
while kill -0 "$workers" 2> /dev/null; do  # the signal interrupted the wait; the workers are saving
  wait "$workers"; code=$?
done
# Before training, and in a stage of kind `generate`, a worker has nothing to save, and the signal ends it.
if [ -n "$notice" ] && [ "$code" -eq 143 ]; then code={preempted}; fi

rank=0
if [ -s "$failed" ]; then  # the first that did not fail because of another
  read -r code rank host < <(grep -v "^{peer_lost} " "$failed" || cat "$failed")
  echo "rank $rank (on $host) ended with exit code $code; the end of its output:" >&2
  rm -f "$failed"
fi

if [ "$code" -eq {preempted} ]; then  # it has saved and is to be resumed
  now=$(state)
  if [ "$now" != RUNNING ]; then
    echo "saved; not queued again: Slurm says ${{now:-nothing of the job}}. Continue with: sbatch {path}" >&2
  elif [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
    echo "saved; Slurm refused to queue the job again. Continue with: sbatch {path}" >&2
  else
    echo "saved; not queued again (launch.restarts {restarts}). Continue with: sbatch {path}" >&2
  fi
fi
[ "$code" -eq 0 ] || tail -n 40 {logs}/"rank_$rank.log" >&2
exit "$code"
"""


def check(job: Job) -> None:
    """Does nothing: there is nothing to check before the run folder is written."""


def run(job: Job) -> int:
    """Write the batch file and submit it; returns 0. Raises UserError if that fails."""
    path = job.folder / "slurm.sbatch"
    gpus, reason = _gpus(job.launch.slurm)
    path.write_text(script(job, gpus))
    if job.launch.slurm.gpus is None:
        print(f"launch.slurm.gpus: {gpus} for each worker, since {reason}", file=sys.stderr)
    if shutil.which("sbatch") is None:
        raise UserError(f"launch: there is no sbatch on this machine. On one that has it: sbatch {path.resolve()}")
    try:
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, timeout=SUBMIT)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"sbatch did not answer within {SUBMIT:g} s; check with squeue whether the job was submitted, else: sbatch "
            f"{path}"
        ) from None
    if done.returncode:
        hint = ". On a cluster without GPUs, or that assigns them in another way: launch.slurm.gpus=0" if gpus else ""
        raise UserError(f"sbatch refuses {path}: {done.stderr.strip() or done.stdout.strip()}{hint}")
    print(f"{done.stdout.strip()}: {path}. Its output: {job.folder / 'logs'}", file=sys.stderr)
    return 0


def _gpus(config: SlurmConfig) -> tuple[int, str]:
    """GPUs of each worker, and why: as set, else 1 where the partition (or the default one) has GPUs."""
    if config.gpus is not None:
        return config.gpus, "it is set"
    if shutil.which("sinfo") is None:
        return 1, "there is no sinfo here to tell whether the cluster has GPUs; set 0 for none"
    where = [] if config.partition is None else [f"--partition={config.partition}"]
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%P %G", *where], capture_output=True, text=True, timeout=SUBMIT
        )
    except subprocess.TimeoutExpired:
        return 1, f"sinfo did not tell within {SUBMIT:g} s whether the cluster has GPUs; set 0 for none"
    if done.returncode:
        return 1, f"sinfo failed ({done.stderr.strip()}) and did not tell whether the cluster has GPUs; set 0 for none"
    rows = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    here = [row for row in rows if config.partition is not None or row[0].endswith("*")]  # *: the default partition
    # As in gpu:h200:8(S:0-1),shard:4
    if any(kind.startswith("gpu:") for row in here or rows for kind in row[-1].split(",")):
        return 1, "the partition has GPUs"
    elsewhere = any("gpu:" in row[-1] for row in rows)
    return 0, "the partition has none" + ("; others have: launch.slurm.partition" if elsewhere else "")


def script(job: Job, gpus: int) -> str:
    """The batch file of a job, with `gpus` for each worker. Paths are those of this machine, which the nodes share."""
    config = job.launch.slurm
    per_node = job.processes // config.nodes
    logs = job.folder.resolve() / "logs"
    settings = {
        "job-name": job.folder.name,
        "nodes": config.nodes,
        "ntasks-per-node": per_node,
        "cpus-per-task": config.cpus,
        "gpus-per-node": per_node * gpus or None,
        "mem": config.memory,
        "time": config.time,
        "partition": config.partition,
        "account": config.account,
        "signal": f"B:TERM@{config.notice}",
        "output": _for_sbatch(logs, "slurm-%j.log"),
        "open-mode": "append",
    }
    options = [f"--{key}={value}" for key, value in settings.items() if value is not None] + ["--requeue"]
    command = " ".join(shlex.quote(part) for part in job.command())
    return SCRIPT.format(
        path=shlex.quote(str(job.folder.resolve() / "slurm.sbatch")),
        options="\n".join(f"#SBATCH {option}" for option in [*options, *config.options]),
        working=shlex.quote(os.getcwd()),
        setup="\n".join(config.setup),
        per_node=per_node,
        # inside single quotes
        command=command.replace("'", "'\\''"),
        tasks=shlex.quote(str(logs).replace("%", "%%") + "/rank_%t.log"),
        logs=shlex.quote(str(logs)),
        failed=shlex.quote(str(logs / "failed")),
        failed_here=shlex.quote(str(logs / "failed")).replace("'", "'\\''"),
        grace=f"{GRACE:g}",
        peer_lost=PEER_LOST,
        saving=round(SAVING),
        preempted=PREEMPTED,
        restarts=job.launch.max_restarts,
    )


def _for_sbatch(folder: Path, name: str) -> str:
    """A path in an #SBATCH line, where a blank ends a word and a percent sign begins a pattern."""
    text = f"{str(folder).replace('%', '%%')}/{name}"
    return f'"{text}"' if " " in text else text
