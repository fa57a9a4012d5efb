"""Harbor task folders: commands and tests in the sandbox, and what is refused before the run."""

import shutil
import sys
from pathlib import Path

import pytest

from hone.base.settings import UserError
from hone.environments.harbor import HarborEnvironment, read_tasks
from hone.environments.sandbox import has_bubblewrap
from hone.types import Problem

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11) or not has_bubblewrap(), reason="needs bubblewrap and Python 3.11"
)
PROBLEM = Problem("p", "t", ({"role": "user", "content": "?"},), None)
TOML = """
version = "1.0"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 20.0
env = { WANTED = "42" }
[agent]
timeout_sec = 20.0
[environment]
cpus = 1
memory_mb = 512
allow_internet = false
"""
TEST = """
echo 0 > /logs/verifier/reward.txt
if [ "$(cat answer.txt)" = "$WANTED" ]; then echo 1 > /logs/verifier/reward.txt; fi
"""


@pytest.fixture
def task(tmp_path):
    folder = tmp_path / "tasks" / "answer"
    for part in ("environment", "tests"):
        (folder / part).mkdir(parents=True)
    (folder / "task.toml").write_text(TOML)
    (folder / "instruction.md").write_text("Write the number in question.txt into answer.txt.\n")
    (folder / "environment" / "question.txt").write_text("42\n")
    (folder / "tests" / "test.sh").write_text(TEST)
    (folder / "tests" / "hidden.txt").write_text("the solution")
    return folder


def call(command):
    return {"id": "call00000", "type": "function", "function": {"name": "bash", "arguments": {"command": command}}}


def play(folder, *commands, seconds=60.0):
    environment = HarborEnvironment(read_tasks(folder), seconds)
    (opening,) = environment.reset(PROBLEM, 1)
    assert opening["content"] == "Write the number in question.txt into answer.txt."
    outputs = []
    for command in commands:
        observation = environment.step({"role": "assistant", "content": "", "tool_calls": [call(command)]})
        outputs.append(observation.messages[0]["content"])
    assert environment.step({"role": "assistant", "content": "Done."}).done
    return outputs, environment.reward(), environment


def test_the_tests_say_what_the_commands_did(task):
    (output, _), reward, environment = play(task, "pwd; cat question.txt", "cp question.txt answer.txt")
    assert output == "/app\n42"
    assert reward == 1.0
    assert not Path(environment._root.name).exists()
    assert play(task, "echo 41 > answer.txt")[1] == 0.0
    assert play(task)[1] == 0.0  # rollouts do not see each other's files


def test_commands_see_neither_tests_nor_network_nor_files(task):
    outputs, reward, _ = play(
        task,
        "ls /tests",
        f"cat {task}/tests/hidden.txt",
        "exec 3<>/dev/tcp/127.0.0.1/22",
        "echo 1 > /logs/verifier/reward.txt; ln -s /etc/passwd /logs/verifier/reward.json",
        "(sleep 60; echo 1 > /logs/verifier/reward.txt) & echo started",
        "yes",
    )
    assert "No such file" in outputs[0]
    assert "No such file" in outputs[1]
    assert "exit status" in outputs[2]
    assert outputs[4] == "started"
    assert "more than 1048576 bytes" in outputs[5]
    assert reward == 0.0  # what the model wrote where the reward goes is removed before the tests


def test_a_command_has_a_limit_of_time(task):
    outputs, _, _ = play(task, "sleep 60", seconds=5.0)
    assert outputs[0].endswith("Error: ended after 4 s")


@pytest.mark.parametrize(
    "change, why",
    [
        (("environment/Dockerfile", "FROM debian"), "needs a container"),
        (("task.toml", TOML.replace("allow_internet = false", "allow_internet = true")), "demands a network"),
        (("task.toml", TOML + 'docker_image = "debian"'), "docker_image, which bubblewrap cannot do"),
        (("task.toml", TOML + "gpus = 1"), "demands 1 GPUs"),
        (("task.toml", TOML + 'workdir = "/usr/lib"'), "workdir is /usr/lib"),
        (("task.toml", TOML + '[[steps]]\nname = "one"'), "several steps"),
        (("task.toml", "[environment"), "task.toml: "),
        (("tests/test.sh", None), "tests/test.sh is missing"),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_run(task, change, why):
    file, text = change
    (task / file).write_text(text) if text is not None else (task / file).unlink()
    with pytest.raises(UserError, match=why):
        read_tasks(task.parent)


def test_a_row_names_its_task(task):
    shutil.copytree(task, task.parent / "other")
    tasks = read_tasks(task.parent)
    assert list(tasks) == ["answer", "other"]
    with pytest.raises(UserError, match="its column folder is ''; there are answer, other"):
        HarborEnvironment(tasks, 5.0).reset(PROBLEM, 1)
