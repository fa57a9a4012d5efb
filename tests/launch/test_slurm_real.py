"""Slurm itself, with one node that is this machine: `pytest -m slurm tests/launch`. Debian: slurm-wlm and munge.

The daemons are started by the tests, in a temporary folder, for the user that runs them.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hone.base import jsonl

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
PATH = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"))
ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not all(shutil.which(command, path=PATH) for command in COMMANDS),
        reason="Slurm is not installed: apt-get install slurm-wlm munge",
    ),
]

CONFIG = """\
ClusterName=hone
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
KillWait=60
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

RECIPE = """
name: NAME
model: {path: tiny, tiny: {vocab_size: 400, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, mlp_size: 64}}
task: {name: knights, people: [2], quiz: brief, names: 4, train: 60, validation: 10, test: 20, repeats: true}
prompt: {style: raw, system: "", template: "{user}\\n"}
checkpoint: {every: 5, keep: 2}
tokens_per_microbatch: 2048
steps: 70
prompts_per_step: 4
samples_per_prompt: 4
sampling: {max_tokens: 48}
optim: {lr: 1.0e-3}
reward: {parts: {outcome: 1.0, overlong: 1.0}, overlong: {buffer: 40, max_tokens: 48}}
eval: {problems: 4, every: 35, sampling: {max_tokens: 48}}
parallel: {replicate: 2}
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands reach the cluster."""
    import getpass

    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], other.getsockname()[1]
    host = socket.gethostname().split(".")[0]
    values = {"host": host, "user": getpass.getuser(), "ports": ports, "folder": folder, "cpus": os.cpu_count()}
    (folder / "slurm.conf").write_text(CONFIG.format(**values))
    environment = {
        **os.environ,
        "PATH": PATH,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    munge = ["munged", "--foreground", "--force", *(f"--{x}-file={folder}/munge.{x}" for x in ("key", "pid", "log"))]
    munge += [f"--seed-file={folder}/munge.seed", f"--socket={folder}/munge.socket"]
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        with (folder / f"{command[0]}.out").open("ab") as log:
            daemons.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder, start_new_session=True)
            )

    try:
        start(*munge)
        until(lambda: (folder / "munge.socket").exists(), 30)
        start("slurmctld", "-D", "-c")
        start("slurmd", "-D", "-c")
        until(lambda: "idle" in call(environment, "sinfo", "--noheader", check=False), 60)
        yield environment
        call(environment, "scancel", f"--user={values['user']}", check=False)
        call(environment, "scancel", "--signal=KILL", "--full", f"--user={values['user']}", check=False)
        until(lambda: not call(environment, "squeue", "--noheader", check=False).strip(), 120)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(timeout=60)


def call(environment: dict[str, str], *command: str, check: bool = True) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


def until(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)


class Submitted:
    """One run as a job of the cluster."""

    def __init__(self, environment: dict[str, str], folder: Path, name: str, *overrides: str) -> None:
        (folder / f"{name}.yaml").write_text(RECIPE.replace("NAME", name))
        self.environment, self.run = environment, folder / "runs" / name
        command = [sys.executable, "-m", "hone", "train", f"{name}.yaml", "launch=slurm", *overrides]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
        self.code, self.err = done.returncode, done.stderr
        submitted = re.search(r"Submitted batch job (\d+)", done.stderr)
        self.job = submitted.group(1) if submitted else ""

    def call(self, *command: str) -> str:
        return call(self.environment, *command)

    def shows(self, key: str) -> str:
        """As in JobState, Restarts, ExitCode."""
        shown = re.search(rf"\b{key}=(\S+)", self.call("scontrol", "show", "job", self.job))
        assert shown is not None
        return shown.group(1)

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in sorted((self.run / "logs").glob("*.log")))

    def step(self) -> int:
        return max((row["step"] for row in jsonl.read(self.run / "metrics.jsonl")), default=-1)

    def wait_for(self, true: Callable[[], bool], seconds: float = 400.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            if time.monotonic() > end:
                raise AssertionError(f"{self.call('scontrol', 'show', 'job', self.job)}\n{self.log}")
            time.sleep(0.1)

    def ended(self) -> bool:
        return self.shows("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def bits(run: Path) -> dict[str, bytes]:
    """Everything that must not depend on where a run was interrupted."""
    patterns = ("metrics.jsonl", "evals.jsonl", "evals/*", "rollouts/*", "tokens/*", "model/model.safetensors")
    return {str(p.relative_to(run)): p.read_bytes() for pattern in patterns for p in sorted(run.glob(pattern))}


def test_notices_save_and_queue_the_job_again_until_it_is_done(slurm: dict[str, str], tmp_path: Path) -> None:
    """The first notice is that of a limit of a minute, the others are given as Slurm gives it: to the shell alone."""
    (tmp_path / "whole.yaml").write_text(RECIPE.replace("NAME", "whole"))
    command = [sys.executable, "-m", "hone", "train", "whole.yaml"]
    subprocess.run(command, cwd=tmp_path, env=slurm, check=True, capture_output=True, timeout=600)

    run = Submitted(slurm, tmp_path, "cut", "launch.slurm.time=0:01:00", "launch.slurm.notice=10")
    assert run.code == 0, run.err
    run.wait_for(lambda: run.shows("Restarts") == "1")
    assert run.step() < 69, "the machine is too fast for this test: give it more steps"
    run.call("scontrol", "update", f"JobId={run.job}", "TimeLimit=30")
    for cycle in ("2", "3", "4"):
        step = run.step() + 4
        run.wait_for(lambda step=step: run.shows("JobState") == "RUNNING" and run.step() >= step)  # type: ignore[misc]
        run.call("scancel", "--signal=TERM", "--batch", run.job)
        run.wait_for(lambda cycle=cycle: run.shows("Restarts") == cycle, 100)  # type: ignore[misc]
    run.wait_for(run.ended)
    assert run.shows("JobState") == "COMPLETED", run.log
    rows = jsonl.read(run.run / "events.jsonl")
    assert [row["kind"] for row in rows].count("resumed") in (3, 4)  # a busy machine has nothing to save after a minute
    same = bits(tmp_path / "runs" / "whole")
    assert len(same) > 140
    assert bits(run.run) == same


def test_a_cancelled_job_stays_cancelled_and_can_be_submitted_again(slurm: dict[str, str], tmp_path: Path) -> None:
    run = Submitted(slurm, tmp_path, "cancelled")
    assert run.code == 0, run.err
    assert "launch.slurm.gpus: 0 for each worker, since the partition has none" in run.err
    run.wait_for(lambda: run.step() >= 3)
    run.call("scancel", run.job)
    run.wait_for(lambda: not run.call("squeue", "--noheader").strip())
    assert (run.shows("JobState"), run.shows("Restarts")) == ("CANCELLED", "0")
    assert "not queued again: Slurm says COMPLETING" in run.log
    step = run.step()
    assert f"stopped before step {step + 1}, saved" in run.log
    run.job = re.findall(r"\d+", run.call("sbatch", str(run.run / "slurm.sbatch")))[0]
    run.wait_for(lambda: run.step() > step)
    run.call("scancel", run.job)
    run.wait_for(lambda: not run.call("squeue", "--noheader").strip())


def test_a_step_that_fails_is_reported(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "raise ValueError('of mine')\n\n\ndef reward(prompts, completions, **columns): ...\n"
    )
    refused = Submitted(slurm, tmp_path, "refused", "reward.parts={mine.py:reward: 1.0}")
    assert (refused.code, refused.job) == (2, "")  # seen before anything is submitted
    (tmp_path / "mine.py").write_text(
        "import os\n\nif os.environ.get('SLURM_PROCID') == '1':\n    raise ValueError('of mine')\n\n\n"
        "def reward(prompts, completions, **columns):\n    return [0.0 for _ in completions]\n"
    )
    run = Submitted(slurm, tmp_path, "broken", "reward.parts={mine.py:reward: 1.0}", "parallel.replicate=2")
    assert run.code == 0, run.err
    run.wait_for(run.ended)
    assert run.shows("JobState") == "FAILED"
    assert run.shows("ExitCode") == "2:0"
    (log,) = (run.run / "logs").glob("slurm-*.log")
    assert "rank 1 (on " in log.read_text()
    assert "ValueError: of mine" in log.read_text()
    assert run.shows("Restarts") == "0"


def test_a_worker_that_is_killed_ends_the_job(slurm: dict[str, str], tmp_path: Path) -> None:
    run = Submitted(slurm, tmp_path, "killed")
    run.wait_for(lambda: run.step() >= 1)
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "killed.yaml" in command and "--resume" in command and process.environ().get("RANK") == "1":
            process.kill()
    run.wait_for(run.ended)
    assert (run.shows("JobState"), run.shows("ExitCode")) == ("FAILED", "137:0")
    (log,) = (run.run / "logs").glob("slurm-*.log")
    assert re.search(r"rank 1 \(on \S+\) ended with exit code 137", log.read_text())


def test_gpus_that_the_cluster_does_not_have(slurm: dict[str, str], tmp_path: Path) -> None:
    run = Submitted(slurm, tmp_path, "gpus", "launch.slurm.gpus=1")
    assert run.code == 2
    assert "Invalid generic resource (gres) specification. On a cluster without GPUs" in run.err
    assert "launch.slurm.gpus=0" in run.err
