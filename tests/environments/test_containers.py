"""Harbor tasks in real containers: what commands may do, what is left behind, and every token of a run.

HONE_CONTAINER_IMAGE=debian:12 pytest -n 0 -m containers tests/environments/test_containers.py
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from hone.base import jsonl
from hone.environments import play
from hone.environments.containers import LABEL, ContainerLimits, Runtime
from hone.environments.formats import Reading
from hone.environments.harbor import HarborEnvironment, harbor_tasks
from hone.types import Problem
from tests.environments.trained import Ears, check_run, recipe_of

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1500)]
PROBLEM = Problem("p", "t", ({"role": "user", "content": "?"},), None)
TOML = """
[verifier]
timeout_sec = 60.0
env = { WANTED = "42" }
[environment]
memory_mb = 200
env = { COLOUR = "blue" }
"""
#: Without the answer, a reward that varies with the container and the number of its commands.
TEST = """
test "$(cat answer.txt)" = "$WANTED" && test -e /tests/hidden.txt && echo 1 > /logs/verifier/reward.txt && exit
number=$(( 0x$(md5sum /etc/hostname | head -c 2) % 10 ))
echo "{\\"reward\\": 0.$(wc -l < said.txt)$number}" > /logs/verifier/reward.json
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    if "HONE_CONTAINER_IMAGE" not in os.environ:
        pytest.skip("HONE_CONTAINER_IMAGE is not set")
    folder = tmp_path_factory.mktemp("tasks") / "answer"
    for part in ("environment", "tests"):
        (folder / part).mkdir(parents=True)
    dockerfile = f"FROM {os.environ['HONE_CONTAINER_IMAGE']}\nWORKDIR /srv\nCOPY question.txt .\n"
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "environment" / "question.txt").write_text("42\n")
    (folder / "task.toml").write_text(TOML)
    (folder / "instruction.md").write_text("Write the number in question.txt into answer.txt.\n")
    (folder / "tests" / "test.sh").write_text(TEST)
    (folder / "tests" / "hidden.txt").write_text("the solution")
    return folder


@pytest.fixture(scope="module")
def playable(task):
    return harbor_tasks(str(task))


def containers(runtime):
    line = [runtime.program, "ps", "--all", "--quiet", "--filter", f"label={LABEL}"]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture
def begun(playable):
    tasks, runtime = playable

    def begin(seconds=60.0):
        environment = HarborEnvironment(tasks, seconds, runtime)
        environment.reset(PROBLEM, 1)
        made.append(environment)
        return environment

    made = []
    yield begin
    for environment in made:
        environment.close()
    assert containers(runtime) == []


def said(environment, command):
    call = {"id": "call00000", "type": "function", "function": {"name": "bash", "arguments": {"command": command}}}
    return environment.step({"role": "assistant", "content": "", "tool_calls": [call]}).messages[0]["content"]


def test_the_tests_say_what_the_commands_did(begun, task):
    environment = begun()
    assert said(environment, "pwd; cat question.txt; echo $COLOUR") == "/srv\n42\nblue"
    assert "No such file" in said(environment, "ls /tests")
    assert said(environment, "grep NoNewPrivs /proc/self/status") == "NoNewPrivs:\t1"
    assert said(environment, "echo 1 > /logs/verifier/reward.json; mkdir /tests; exit 3") == "\n[exit status 3]"
    assert said(environment, "sleep 1000 > /dev/null 2>&1 & echo started") == "started"
    assert "sleep" in said(environment, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")  # goes on, as in Harbor
    said(environment, "cp question.txt answer.txt")
    assert environment.reward() == 1.0


def test_attacks_end_in_the_container(begun):
    environment, seconds = begun(15.0), time.monotonic()
    assert "exit status" in said(environment, "exec 3<>/dev/tcp/127.0.0.1/22")
    assert said(environment, "ls /sys/class/net") == "lo"
    assert said(environment, f"ls {os.getcwd()}").endswith("[exit status 2]")  # the host's files are not there
    assert said(environment, "cat /proc/1/environ | tr '\\0' '\\n' | grep -i -E 'proxy|token|key' | grep -vc '=$'") == (
        "0\n[exit status 1]"
    )
    assert "exit status" in said(environment, "mount -t tmpfs none /mnt")
    assert "exit status" in said(environment, "echo 1 > /proc/sys/kernel/panic")
    assert "more than 1048576 bytes" in said(environment, "yes")
    assert said(environment, "sleep 100").endswith("Error: ended after 15 s")
    assert said(environment, "trap '' TERM INT; sleep 100 & while :; do :; done").endswith("Error: ended after 15 s")
    assert "exit status 137" in said(environment, "tail /dev/zero")  # memory
    said(environment, ":(){ :|:& };:; sleep 60")
    assert said(environment, "echo alive; ls /proc | grep -c '^[0-9]'").startswith("alive")
    said(environment, "kill -9 1; kill -9 -1")
    assert said(environment, "echo alive") == "alive"
    said(environment, "rm -rf --no-preserve-root / 2> /dev/null")
    assert environment.reward() == 0.0  # and the episode is graded
    assert time.monotonic() - seconds < 300


def test_a_container_of_a_killed_hone_is_removed_at_the_next_start(playable, task):
    runtime = playable[1]
    code = (
        "import sys, time\n"
        "from hone.environments.harbor import HarborEnvironment, harbor_tasks\n"
        "from hone.types import Problem\n"
        f"tasks, runtime = harbor_tasks({str(task)!r})\n"
        "environment = HarborEnvironment(tasks, 30.0, runtime)\n"
        "environment.reset(Problem('p', 't', ({'role': 'user', 'content': '?'},), None), 0)\n"
        "print('begun', flush=True)\n"
        "time.sleep(1000)\n"
    )
    hone = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert hone.stdout.readline() == "begun\n"
    (name,) = containers(runtime)
    Runtime.find()
    assert containers(runtime) == [name]  # its process lives
    hone.send_signal(signal.SIGKILL)
    hone.wait()
    assert containers(runtime) == [name]
    Runtime.find()
    assert containers(runtime) == []


def test_a_runtime_that_ends_removes_what_it_started(playable):
    runtime = Runtime(playable[1].program)
    runtime.start(playable[0][""].image, ContainerLimits())
    assert len(containers(runtime)) == 1
    del runtime
    assert containers(playable[1]) == []


def test_a_run_trains_on_the_tokens_that_were_sampled(task, playable, tmp_path, monkeypatch):
    def read(text: str) -> Reading:
        """Two commands of what an untrained model says, and an answer."""
        commands.append(text)
        if len(commands) % 3 == 0:
            return Reading({"role": "assistant", "content": text})
        function = {"name": "bash", "arguments": {"command": "echo said >> said.txt"}}
        call = {"type": "function", "id": "call00000", "function": function}
        return Reading({"role": "assistant", "content": text, "tool_calls": [call]})

    commands: list[str] = []
    monkeypatch.setattr(play, "reader_of", lambda *_: read)
    ears = Ears(monkeypatch)
    environment = {"name": f"harbor:{task}", "timeout": 300}
    sampling = {"max_tokens": 200, "stop": list("abcdefghijklmnopqrst")}  # an untrained model ends no turn itself
    run = check_run(recipe_of(tmp_path, environment, sampling=sampling), ears)
    rows = [row for step in range(3) for row in jsonl.read(run / "rollouts" / f"step_{step:06d}.jsonl")]
    assert len({row["total"] for row in rows}) > 1
    assert sum(len(row["steps"]) for row in rows) > len(rows)
    assert containers(playable[1]) == []
