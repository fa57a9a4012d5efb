"""What hone asks of docker, and what it makes of its failures: with a program in docker's place."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from hone.base import owner
from hone.environments import containers
from hone.environments.containers import Container, ContainerLimits, Runtime
from hone.environments.harbor import HarborEnvironment
from hone.environments.harbor_task import HarborTask
from hone.types import Problem

PROBLEM = Problem("p", "t", ({"role": "user", "content": "?"},), None)


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """Makes a `docker` of the branches of a `case` over its subcommand; `asked()` are its command lines so far."""

    def make(branches: str, name: str = "docker") -> Runtime:
        (tmp_path / name).write_text(f"""#!/bin/sh\necho "$*" >> {log}\ncase "$1" in\n{branches}\nesac\n""")
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return Runtime(str(tmp_path / name))

    log = tmp_path / "log"
    make.asked = lambda: log.read_text().splitlines()
    yield make
    make("")  # what the runtimes still hold is removed by one that works


def reads_from(folder) -> str:
    """A branch that runs the command that reads the reward, in a folder of this machine; other commands do nothing."""
    command = f'"$(echo "$command" | sed s,/logs/verifier,{folder},)"'
    return f'exec) for command; do :; done; case "$command" in *head*) bash -c {command};; esac;;'


def task(folder) -> HarborTask:
    (folder / "tests").mkdir()
    limits = ContainerLimits()
    return HarborTask(folder, "Do it.", None, "image", False, 1.0, limits, {}, None, 5.0, {}, None)


def test_containers_of_an_earlier_run_that_cannot_be_removed_stop_nothing(docker, capsys):
    docker("ps) echo storage is busy >&2; exit 1;;")
    assert Runtime.find().program.endswith("/docker")
    assert "containers of an earlier run stay: docker ps failed: storage is busy" in capsys.readouterr().err


def test_a_reward_stands_where_the_container_cannot_be_removed(docker, tmp_path, capsys):
    runtime = docker(f"rm) echo storage is busy >&2; exit 1;;\n{reads_from(tmp_path)}")
    (tmp_path / "reward.txt").write_text("0.5\n")
    environment = HarborEnvironment({"": task(tmp_path)}, 5.0, runtime)
    environment.reset(PROBLEM, 0)
    assert environment.reward() == 0.5
    assert "stays for now: docker rm failed: storage is busy" in capsys.readouterr().err
    assert len(runtime._alive) == 1  # for the end of hone


def test_a_container_that_starts_too_late_is_removed_at_once(docker, tmp_path):
    """The pool has given its episode up, and closed it, while docker was starting it."""
    runtime = docker(f"run) while [ ! -e {tmp_path}/closed ]; do sleep 0.01; done;;")
    environment = HarborEnvironment({"": task(tmp_path)}, 5.0, runtime)
    starting = threading.Thread(target=environment.reset, args=(PROBLEM, 0))
    starting.start()
    environment.close()
    (tmp_path / "closed").touch()
    starting.join()
    assert docker.asked()[-1].startswith("rm --force --volumes hone-")
    assert not runtime._alive  # it is not removed again


def test_a_reward_is_read_beside_warnings_of_docker(docker, tmp_path):
    reads = reads_from(tmp_path).replace("exec)", "exec) echo no cgroups >&2;")
    (tmp_path / "reward.json").write_text('{"reward": 0.5}\n')
    environment = HarborEnvironment({"": task(tmp_path)}, 5.0, docker(reads))
    environment.reset(PROBLEM, 0)
    assert environment.reward() == 0.5


def test_podman_writes_no_warnings_into_what_a_command_prints(docker):
    ran = Container(docker("--log-level=error) echo alive;;\n*) echo level=warning; echo alive;;", "podman"), "name")
    assert ran.run("ls", 5.0).output == "alive"


def test_a_command_that_takes_too_long_is_killed_in_the_container_too(docker, monkeypatch):
    monkeypatch.setattr(containers, "_GONE", 0.2)
    container = Container(docker("exec) sleep 100;;"), "name")
    ran = container.run("sleep 100", 0.2)
    assert (ran.ended, ran.note) == (False, "")
    assert docker.asked()[-2:] == ["kill --signal USR1 name", "rm --force --volumes name"]  # the client has not ended
    ran = Container(docker("exec) yes;;"), "name").run("yes", 10.0)
    assert (ran.ended, ran.note) == (False, "it wrote more than 1048576 bytes of output")
    assert docker.asked()[-1] == "kill --signal USR1 name"


def test_of_earlier_containers_those_of_dead_processes_are_removed(docker, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    living, elsewhere = owner.myself(), replace(owner.myself(), host="another", pid=ended.pid)
    owners = {"living": living, "dead": replace(living, pid=ended.pid), "elsewhere": elsewhere}
    for name, one in owners.items():
        (tmp_path / name).write_bytes(owner.as_bytes(one))
    (tmp_path / "garbled").write_text("hone")
    docker(f'ps) echo living dead elsewhere garbled;;\ncontainer) for name; do :; done; cat "{tmp_path}/$name";;')
    Runtime.find()
    assert [line for line in docker.asked() if line.startswith("rm")] == ["rm --force --volumes dead"]


def test_a_container_that_the_model_has_broken_earns_nothing(docker, tmp_path):
    def reward(branches):
        environment.reset(PROBLEM, 0)
        docker(branches)
        return environment.reward()

    environment = HarborEnvironment({"": task(tmp_path)}, 5.0, docker(""))
    broken = "exec|cp) echo no such container; exit 1;;"
    assert reward(broken) == 0.0
    docker("")
    with pytest.raises(RuntimeError, match="docker info failed"):  # not the model's fault
        reward(f"info) exit 1;;\n{broken}")


def test_the_tests_are_copied_over_a_folder_of_the_model(docker, tmp_path):
    Container(docker(""), "name").copy_in(tmp_path / "tests", "/tests")
    assert docker.asked() == [f"cp {tmp_path}/tests/. name:/tests"]


def test_a_container_gets_neither_proxies_nor_rights_that_tasks_do_not_need(docker, tmp_path, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy")
    # It is kept, since one that is gone removes its containers.
    runtime = docker(f"*) echo $1 $HTTPS_PROXY >> {tmp_path}/proxies;;")
    container = runtime.start("image", ContainerLimits())
    (line,) = docker.asked()
    container.run("ls", 5.0)
    runtime.pull("image", 5.0)
    assert (tmp_path / "proxies").read_text().splitlines() == ["run", "exec", "pull http://me:secret@proxy"]
    for option in (
        "--rm ",
        "--network none ",
        "--memory 2048m --memory-swap 2048m ",
        "--env HTTPS_PROXY= ",
        "--env no_proxy= ",
        "--cap-drop NET_RAW",
        "--security-opt no-new-privileges",
    ):
        assert option in line
    runtime.start("image", ContainerLimits(network=True))
    assert "--network" not in docker.asked()[-1]


def test_one_container_that_is_gone_hides_no_failure_of_another(docker):
    runtime = docker(
        'rm) case "$*" in *first*) echo no such container: first >&2;; *) echo storage is busy >&2;; esac; exit 1;;'
    )
    with pytest.raises(RuntimeError, match="storage is busy"):
        containers._remove(runtime.program, {"first", "second"})


def test_a_build_that_takes_too_long_ends_with_all_its_processes(docker, tmp_path):
    runtime = docker(f"build) sleep 300 & echo $! > {tmp_path}/pid; wait;;")
    with pytest.raises(RuntimeError, match="did not end within 1 s"):
        runtime.build(tmp_path / "nothing", 1.0)
    pid, until = int((tmp_path / "pid").read_text()), time.monotonic() + 5.0
    while owner.started(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert owner.started(pid) is None
