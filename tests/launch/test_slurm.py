"""The batch file, read as Slurm reads it and run by bash where stand-ins of Slurm's commands are in the path.

No real Slurm was at hand: what the stand-ins do is what the manual pages of sbatch, srun and scontrol say.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hone.base.settings import UserError
from hone.launch import slurm
from hone.launch.job import Job
from hone.recipe.sections.launch import LaunchConfig, SlurmConfig

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
    env = {{**os.environ, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n % (size // nodes))}}
    with open(out.replace("%t", str(n)).replace("%%", "%"), "a") as log:
        tasks.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))
signal.signal(signal.SIGTERM, lambda n, _: [task.send_signal(n) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""

SCONTROL = """#!/bin/bash
case "$1 $2" in
  "show hostnames") echo node-a; echo node-b;;
  "requeue 77") touch requeued;;
  *) exit 1;;
esac
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
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
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
    text = slurm.script(job()).replace(f"{python} -m hone", f"{python} worker.py")
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
    text = slurm.script(job(partition="gpu", memory="200G", cpus=8, options=("--qos=high",), setup=("module load x",)))
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
    assert "gpus" not in slurm.script(job(gpus=0))


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


def test_a_failure_ends_the_job_with_its_code_and_is_not_queued_again(folder: Path) -> None:
    _, err = (process := begin(folder, CODE="3")).communicate(timeout=60)
    assert process.returncode == 3
    assert err == "the end of 0\n"
    assert not (folder / "requeued").exists()


@pytest.mark.parametrize("before, code", [("0", 0), ("99", 0), ("100", 75)])
def test_before_the_time_ends_the_run_saves_and_is_queued_again(folder: Path, before: str, code: int) -> None:
    (folder / "wait").touch()
    process = begin(folder, SLURM_RESTART_COUNT=before)
    end = time.monotonic() + 60
    while not all((folder / f"{rank}.json").exists() for rank in range(4)):
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)  # to the shell alone, as --signal=B: says
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert [(folder / f"{rank}.saved").read_text() for rank in range(4)] == ["1"] * 4
    assert (folder / "requeued").exists() == (code == 0)
    assert ("Go on with: sbatch" in err) == (code == 75)


def test_it_is_submitted(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(folder / "bin"))
    with pytest.raises(UserError, match=r"no sbatch on this machine. On one that has it: sbatch /.*/slurm.sbatch"):
        slurm.run(job())
    fake = folder / "bin" / "sbatch"
    fake.write_text('#!/bin/bash\n[ -f "$1" ] && echo Submitted batch job 77\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/bin:/usr/bin")
    assert slurm.run(job()) == 0
    assert "Submitted batch job 77: runs/mine/slurm.sbatch" in capsys.readouterr().err
    fake.write_text("#!/bin/bash\necho 'sbatch: error: invalid partition specified: gpu' >&2\nexit 1\n")
    with pytest.raises(UserError, match=r"sbatch refuses runs/mine/slurm.sbatch: .*invalid partition specified: gpu"):
        slurm.run(job())
