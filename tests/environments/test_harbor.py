"""Harbor task folders: commands and tests in the sandbox, and what is refused before the run."""

import shutil
import sys
from pathlib import Path

import pytest

from hone.base.settings import UserError
from hone.environments.containers import ContainerLimits
from hone.environments.harbor import HarborEnvironment, harbor_tasks
from hone.environments.harbor_task import read_tasks
from hone.environments.process import Process
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
    assert not Path(environment._place._root.name).exists()
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
    assert outputs[0].endswith("Error: ended after 5 s")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("character", ["\0", "\ud800"])
def test_a_command_that_no_process_can_have_is_an_error_for_the_model(task, tmp_path, character):
    outputs, _, _ = play(task, f"echo {character}", "echo alive")
    assert "the command cannot be run" in outputs[0]
    assert outputs[1] == "alive"
    with pytest.raises(OSError, match="the command cannot be run"):
        Process(["echo", character], {}, tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf /logs/verifier",
        "rm -rf /logs/verifier; ln -s /app /logs/verifier",
        "rm -rf /logs/verifier; touch /logs/verifier",
        "echo 1 > /logs/verifier/reward.json; mkdir -p /logs/verifier/a/b; chmod 0 /logs/verifier/a /logs/verifier",
        "echo 1 > /logs/verifier/reward.json; chmod 555 /logs/verifier /logs",
    ],
)
def test_a_model_cannot_void_an_episode_that_went_badly(task, command):
    assert play(task, command)[1] == 0.0


def test_a_link_in_place_of_the_folder_of_the_reward_is_not_followed(task, tmp_path):
    (tmp_path / "reward.txt").write_text("1")
    (task / "tests" / "test.sh").write_text(f"rm -r /logs/verifier; ln -s {tmp_path} /logs/verifier\n")
    with pytest.raises(RuntimeError, match="wrote no reward"):
        play(task)


@pytest.mark.parametrize(
    "change, why",
    [
        (("task.toml", TOML.replace("memory_mb = 512", 'memory = "1.2.3G"')), "answer/task.toml: could not convert"),
        (("task.toml", TOML.replace("memory_mb = 512", 'memory_mb = "big"')), "answer/task.toml: invalid literal"),
        (("task.toml", TOML.replace("cpus = 1", "cpus = [1]")), "answer/task.toml: float"),
        (("task.toml", TOML.replace("20.0", "'soon'", 1)), "answer/task.toml: could not convert"),
        (("task.toml", "environment = 3"), "answer/task.toml: 'int' object"),
        (("task.toml", TOML + "env = 3"), "answer/task.toml: 'int' object"),
        (("instruction.md", b"\xff"), "answer/instruction.md: 'utf-8' codec"),
        (("task.toml", TOML + 'docker_image = "--privileged"'), "docker_image is '--privileged'; give the name"),
        (("environment/docker-compose.yaml", "services: {}"), "needs several containers"),
        (("task.toml", TOML.replace("allow_internet = false", "allow_internet = true")), "demands a network"),
        (("task.toml", TOML + 'skills_dir = "/skills"'), "skills_dir, which is not supported"),
        (("task.toml", TOML + 'network_mode = "allowlist"'), "network_mode is .environment. allowlist"),
        (("task.toml", TOML.replace('"42"', '"${HOME}"')), "env WANTED is"),
        (("task.toml", TOML.replace("[agent]", "[agent]\nuser = 'agent'")), "the task needs an image"),
        (("task.toml", TOML.replace("[agent]", "environment_mode = 'separate'\n[agent]")), "for the verifier alone"),
        (("task.toml", TOML + "gpus = 1"), "demands 1 GPUs"),
        (("task.toml", TOML + 'workdir = "/usr/lib"'), "workdir is /usr/lib"),
        (("task.toml", TOML + '[[steps]]\nname = "one"'), "several steps"),
        (("task.toml", "[environment"), "task.toml: "),
        (("tests/test.sh", None), "tests/test.sh is missing"),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_run(task, change, why):
    file, text = change
    if text is None:
        (task / file).unlink()
    else:
        (task / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=why):
        read_tasks(task.parent)


def test_a_row_names_its_task(task):
    shutil.copytree(task, task.parent / "other")
    tasks = read_tasks(task.parent)
    assert list(tasks) == ["answer", "other"]
    with pytest.raises(UserError, match="its column folder is ''; there are answer, other"):
        HarborEnvironment(tasks, 5.0).reset(PROBLEM, 1)


def test_a_task_with_an_image_says_what_its_container_gets(task):
    (task / "environment" / "Dockerfile").write_text("FROM debian")
    built = read_tasks(task.parent)["answer"]
    assert built.is_built
    assert (built.workdir, built.limits) == (None, ContainerLimits(memory_mb=512, cpus=1.0, network=False))
    (task / "environment" / "question.txt").write_text("43")
    assert read_tasks(task.parent)["answer"].image != built.image  # of its contents
    more = TOML.replace("memory_mb = 512", 'memory = "2G"').replace("net = false", "net = true")
    (task / "task.toml").write_text(more + 'docker_image = "debian:12"\nworkdir = "/srv"\n')
    pulled = read_tasks(task.parent)["answer"]
    assert (pulled.image, pulled.is_built, pulled.workdir) == ("debian:12", False, "/srv")
    assert pulled.limits == ContainerLimits(memory_mb=2048, cpus=1.0, network=True)


@pytest.mark.parametrize("name, why", [(None, "podman is not installed"), ("podman", "podman info failed: no daemon")])
def test_without_a_runtime_that_works_a_task_with_an_image_is_refused(task, tmp_path, monkeypatch, name, why):
    (task / "environment" / "Dockerfile").write_text("FROM debian")
    (tmp_path / "bin").mkdir()
    if name is not None:
        (tmp_path / "bin" / name).write_text("#!/bin/sh\necho no daemon >&2; exit 1\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(UserError, match=f"answer needs an image, and containers need docker or podman: docker .*{why}"):
        harbor_tasks(str(task.parent))
