"""The batch file, read as Slurm reads it and run by bash where stand-ins of Slurm's commands are in the path.

The stand-ins behave as Slurm 22.05 was seen to; Slurm itself is driven by test_slurm_real.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hone import launch
from hone.base.settings import UserError
from hone.launch import slurm
from hone.launch.job import Job
from hone.recipe.load import load
from hone.recipe.sections.launch import LaunchConfig, SlurmConfig
from hone.runs import lock

pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="the batch file is for bash")

#: Python and a shell read the first lines differently: the path of an interpreter in `#!` may have no blank.
SRUN = f"""#!/bin/sh
'''exec' "{sys.executable}" "$0" "$@"
' '''
import os, signal, subprocess, sys
out = next(a.partition("=")[2] for a in sys.argv if a.startswith("--output="))
command = sys.argv[next(i for i, a in enumerate(sys.argv) if i and not a.startswith("--")):]
tasks = []
size, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_NNODES"])
for n in range(size):
    env = {{**os.environ, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n % (size // nodes)), "SLURM_STEP_ID": "0"}}
    with open(out.replace("%t", str(n)).replace("%%", "%"), "a") as log:
        tasks.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))
open("tasks.aside", "w").write(" ".join(str(task.pid) for task in tasks))
os.rename("tasks.aside", "tasks")
# "srun: forcing job termination": the real one hands SIGTERM on to no task, and has all killed at once.
signal.signal(signal.SIGTERM, lambda n, _: [task.kill() for task in tasks])
codes = [task.wait() for task in tasks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""

SCONTROL = """#!/bin/bash
case "$1 $2" in
  "show hostnames") echo node-a; echo node-b;;
  "requeue 77") touch requeued;;
  *) exit 1;;
esac
"""

#: The state of the job is what the file `state` says. One that is not there: RUNNING.
SQUEUE = """#!/bin/bash
[ "$*" = "--noheader --jobs=77 --format=%T" ] || exit 1
cat state 2> /dev/null || echo RUNNING
"""

#: The signal reaches the tasks, and not the batch shell; no job that is not RUNNING.
SCANCEL = """#!/bin/bash
case "$*" in
  "--signal=TERM 77") ;;
  "--signal=KILL 77.0") exec setsid bash -c 'for pid in $(cat tasks); do kill -KILL -- "-$pid"; done' 2> /dev/null;;
  *) exit 1;;
esac
[ ! -e state ] || { echo "scancel: error: Kill job error on job id 77: Invalid job id specified" >&2; exit 1; }
for pid in $(cat tasks); do kill -TERM -- "-$pid"; done  # every process of the step, not only its first
"""

WORKER = """
import json, os, signal, sys, time
came = []
signal.signal(signal.SIGTERM, lambda *_: came.append(1))
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
rank = os.environ["RANK"]
aside = f"{rank}.aside"
open(aside, "w").write(json.dumps([sys.argv[1:], {name: os.environ[name] for name in names}]))
os.rename(aside, f"{rank}.json")
while not came and os.path.exists("wait"):
    time.sleep(0.01)
if came:
    time.sleep(0.3 if rank == "0" else 0.0)  # it saves
    open(f"{rank}.saved", "w").write(str(len(came)))
    sys.exit(75)
print("the end of", rank)
sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a blank, and a percent sign, which sbatch and srun replace; the folder that hone is started in."""
    here = tmp_path / "a 100% b"
    (here / "bin").mkdir(parents=True)
    (here / "runs" / "mine" / "logs").mkdir(parents=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("squeue", SQUEUE), ("scancel", SCANCEL)):
        (here / "bin" / name).write_text(text)
        (here / "bin" / name).chmod(0o755)
    (here / "worker.py").write_text(WORKER)
    monkeypatch.chdir(here)
    return here


def job(**settings: object) -> Job:
    config = SlurmConfig(**{"nodes": 2, "time": "2-12:00:00", **settings})  # type: ignore[arg-type]
    arguments = ("train", "r.yaml", "task.people=[2,3]", "name='it is'")
    return Job(Path("runs/mine"), arguments, 4, 1, LaunchConfig(kind="slurm", slurm=config))


def begin(folder: Path, **more: str) -> subprocess.Popen[str]:
    """The batch file with a stand-in for hone, in the environment of a job."""
    python = shlex.quote(sys.executable).replace("'", "'\\''")  # within single quotes
    text = slurm.script(job(), 1).replace(f"{python} -m hone", f"{python} worker.py")
    assert f"{python} worker.py" in text
    (folder / "runs" / "mine" / "slurm.sbatch").write_text(text)
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_NTASKS": "4",
        "SLURM_NNODES": "2",
        **more,
    }
    command = ["bash", "runs/mine/slurm.sbatch"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_what_sbatch_is_asked_for(folder: Path) -> None:
    text = slurm.script(
        job(partition="gpu", memory="200G", cpus=8, options=("--qos=high",), setup=("module load x",)), 1
    )
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.M))
    logs = folder / "runs" / "mine" / "logs"
    assert asked == {
        "job-name": "mine",
        "nodes": "2",
        "ntasks-per-node": "2",
        "cpus-per-task": "8",
        "gpus-per-node": "2",
        "mem": "200G",
        "time": "2-12:00:00",
        "partition": "gpu",
        "signal": "B:TERM@120",
        "output": f'"{logs}/slurm-%j.log"'.replace("100%", "100%%"),
        "open-mode": "append",
        "requeue": "",
        "qos": "high",
    }
    assert text.index("#SBATCH --qos") < text.index("\ncd ") < text.index("\nmodule load x\n") < text.index("\nsrun ")
    assert "gpus" not in slurm.script(job(), 0)


def test_each_task_is_told_which_worker_it_is(folder: Path) -> None:
    _, err = (process := begin(folder)).communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]
    for rank, (arguments, told) in enumerate(found):
        assert arguments == ["train", "r.yaml", "task.people=[2,3]", "name='it is'", "--resume"]
        assert told == {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank % 2),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "node-a",
            "MASTER_PORT": "20077",
        }
    assert (folder / "runs" / "mine" / "logs" / "rank_3.log").read_text() == "the end of 3\n"
    assert not (folder / "requeued").exists()


def test_a_failure_ends_the_job_with_its_code_and_is_not_queued_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that fails is named, and the others, who may wait for it for long, are ended."""
    monkeypatch.setattr(slurm, "GRACE", 0.5)
    (folder / "wait").touch()
    lines = (
        'if rank == "0":',
        "    sys.exit(76)  # has lost its peer",
        'if rank == "2":',
        '    print("why 2 failed")',
        "    sys.exit(3)",
        "while not came",
    )
    (folder / "worker.py").write_text(WORKER.replace("while not came", "\n".join(lines)))
    _, err = (process := begin(folder)).communicate(timeout=60)
    assert process.returncode == 3
    assert f"rank 2 (on {socket.gethostname()}) ended with exit code 3; the end of its output:\nwhy 2 failed\n" in err
    assert not (folder / "requeued").exists()
    assert not list((folder / "runs" / "mine" / "logs").glob("failed*"))


def wait_for_workers(folder: Path) -> None:
    end = time.monotonic() + 60
    while not (folder / "tasks").exists() or not all((folder / f"{rank}.json").exists() for rank in range(4)):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("before, code", [("0", 0), ("99", 0), ("100", 75)])
def test_before_the_time_ends_the_run_saves_and_is_queued_again(folder: Path, before: str, code: int) -> None:
    (folder / "wait").touch()
    process = begin(folder, SLURM_RESTART_COUNT=before)
    wait_for_workers(folder)
    process.send_signal(signal.SIGTERM)  # to the shell alone, as --signal=B: says
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert [(folder / f"{rank}.saved").read_text() for rank in range(4)] == ["1"] * 4
    assert (folder / "requeued").exists() == (code == 0)
    assert ("Continue with: sbatch" in err) == (code == 75)


def test_a_notice_that_finds_nothing_to_save_queues_the_job_again(folder: Path) -> None:
    """As while a model is loaded, when SIGTERM ends a worker as any other program."""
    (folder / "wait").touch()
    (folder / "worker.py").write_text(WORKER.replace("signal.signal(signal.SIGTERM, lambda *_: came.append(1))", ""))
    process = begin(folder)
    wait_for_workers(folder)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, (folder / "requeued").exists()) == (0, True), err


def test_a_cancelled_job_saves_and_is_not_queued_again(folder: Path) -> None:
    """Slurm gives the signal to the workers and to the shell, and the job is no longer RUNNING."""
    (folder / "wait").touch()
    process = begin(folder)
    wait_for_workers(folder)
    (folder / "state").write_text("COMPLETING\n")
    for pid in (folder / "tasks").read_text().split():
        os.killpg(int(pid), signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "saved; not queued again: Slurm says COMPLETING. Continue with: sbatch" in err
    assert [(folder / f"{rank}.saved").read_text() for rank in range(4)] == ["1"] * 4
    assert not (folder / "requeued").exists()


@pytest.mark.parametrize(
    "partition, answer, gpus, reason",
    [
        (None, "main* (null)", 0, "the partition has none"),
        (None, "main* gpu:h200:8(S:0-1)", 1, "the partition has GPUs"),
        (None, "cpu* (null)\ngpu shard:4,gpu:4", 0, "the partition has none; others have: launch.slurm.partition"),
        ("gpu", "gpu shard:4,gpu:4", 1, "the partition has GPUs"),
        ("cpu", "cpu (null)", 0, "the partition has none"),
        (None, "a (null)\nb gpu:1", 1, "the partition has GPUs"),  # no default partition: options may name one
    ],
)
def test_gpus_are_asked_for_where_there_are_any(
    folder: Path, monkeypatch: pytest.MonkeyPatch, partition: str | None, answer: str, gpus: int, reason: str
) -> None:
    sinfo = folder / "bin" / "sinfo"
    sinfo.write_text(f'#!/bin/sh\necho "$@" > arguments\necho "{answer}"\n')
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/bin:/usr/bin")
    assert slurm._gpus(SlurmConfig(partition=partition)) == (gpus, reason)
    where = "" if partition is None else f" --partition={partition}"
    assert (folder / "arguments").read_text() == f"--noheader --format=%P %G{where}\n"
    assert slurm._gpus(SlurmConfig(gpus=1 - gpus)) == (1 - gpus, "it is set")


def test_it_is_submitted(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(folder / "bin"))
    with pytest.raises(UserError, match=r"no sbatch on this machine. On one that has it: sbatch /.*/slurm.sbatch"):
        slurm.run(job())
    fake = folder / "bin" / "sbatch"
    fake.write_text('#!/bin/bash\n[ -f "$1" ] && echo Submitted batch job 77\n')
    fake.chmod(0o755)
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None if name == "sinfo" else f"/bin/{name}")
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/bin:/usr/bin")
    assert slurm.run(job()) == 0
    err = capsys.readouterr().err
    assert "Submitted batch job 77: runs/mine/slurm.sbatch" in err
    assert "launch.slurm.gpus: 1 for each worker, since there is no sinfo here to tell" in err
    fake.write_text("#!/bin/bash\necho 'sbatch: error: invalid partition specified: gpu' >&2\nexit 1\n")
    with pytest.raises(
        UserError, match=r"sbatch refuses runs/mine/slurm.sbatch: .*: gpu. On a cluster without GPUs, .*slurm.gpus=0"
    ):
        slurm.run(job())


def test_a_job_does_not_inherit_the_lock_of_the_process_that_submits_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch hands its environment on to the job, which begins when that process has ended and its lock is gone."""
    (folder / "bin" / "sbatch").write_text("#!/bin/bash\nenv > submitted\necho Submitted batch job 77\n")
    (folder / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    (folder / "r.yaml").write_text("name: sent\ntask: {name: knights, people: [2], train: 3}\n")
    recipe = load("r.yaml", ["launch=slurm", "launch.slurm.gpus=0", "parallel.replicate=2"])
    run = folder / "runs" / "sent"
    assert launch.start(recipe.stages, run, ("train", "r.yaml"), False, lambda: lock.owner_of(run) is not None) == 0
    assert lock.owner_of(run) is None
    assert lock.SHARED not in (folder / "submitted").read_text()
