"""Which settings are possible, and which process starts what."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hone import launch
from hone.base.settings import PEER_LOST, ConfigError, UserError
from hone.base.world import ProcessLost
from hone.cli import app as cli
from hone.launch import job, local
from hone.launch.job import Job
from hone.recipe.load import load
from hone.recipe.notes import notices
from hone.recipe.recipe import Pipeline
from hone.stages import pipeline

RECIPE = "name: x\ntask: {name: knights, people: [2], train: 3}\nalgo: {updates_per_rollout: 2}\n"
TWO = "stages:\n  - stage: sft\n    sft: {examples: 64, styles: {careful: 1.0}}\n  - stage: rl\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "two.yaml").write_text("name: x\ntask: {name: knights, people: [2]}\n" + TWO)
    return tmp_path


# --- settings --------------------------------------------------------------------------------------------------------


def test_a_word_is_enough_and_a_section_says_more() -> None:
    assert load("r.yaml").launch.kind == "local"
    assert load("r.yaml", ["launch=ray"]).launch.kind == "ray"
    found = load("r.yaml", ["launch.ray.address=head:6379", "launch=ray"]).launch
    assert (found.kind, found.ray.address) == ("ray", "head:6379")
    both = load("two.yaml", ["launch=slurm", "launch.slurm.time=1-00:00:00"])
    assert isinstance(both, Pipeline)
    assert [stage.launch.slurm.time for stage in both.stages] == ["1-00:00:00"] * 2


@pytest.mark.parametrize(
    "kind, restarts, expected", [("local", None, 0), ("ray", None, 3), ("slurm", None, 100), ("ray", 0, 0)]
)
def test_restarts(kind: str, restarts: int | None, expected: int) -> None:
    more = [] if restarts is None else [f"launch.restarts={restarts}"]
    assert load("r.yaml", [f"launch={kind}", *more]).launch.max_restarts == expected


@pytest.mark.parametrize(
    "override, message",
    [
        ("launch=kubernetes", "launch.kind: 'kubernetes' is not allowed; give one of local, ray, slurm"),
        ("launch.slurm.time=soon", "launch.slurm.time: 'soon' is not allowed"),
        ("launch.slurm.options=[qos=high]", "launch.slurm.options.0: 'qos=high' is not allowed"),
        ("launch.ray.gpus=2", "launch.ray.gpus: 2 is not allowed"),
        ("launch.partition=gpu", "launch.partition: unknown key; did you mean launch.slurm.partition?"),
    ],
)
def test_what_is_not_possible(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load("r.yaml", [override])
    assert message in str(error.value)


def test_nodes_have_equal_shares() -> None:
    overrides = ["launch=slurm", "launch.slurm.nodes=2", "parallel.replicate=3"]
    with pytest.raises(ConfigError, match=r"launch.slurm.nodes: 2 nodes cannot hold equal shares of the 3 processes"):
        load("r.yaml", overrides)
    load("r.yaml", [*overrides[:2], "parallel.replicate=4"])
    load("r.yaml", overrides[1:])  # no effect


@pytest.mark.parametrize(
    "override, message",
    [
        ("stages.rl.parallel.replicate=2", "stages.1.parallel: 2 processes, but 1 in stage sft: all stages run in"),
        ("stages.rl.launch=ray", "stages.1.launch: differs from launch in stage sft: all stages run in the same"),
    ],
)
def test_all_stages_run_in_the_same_processes(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load("two.yaml", [override])
    assert message in str(error.value)
    load("two.yaml", ["parallel.shard=2", "stages.rl.parallel.shard=1", "stages.rl.parallel.replicate=2"])


def test_settings_without_effect_are_named() -> None:
    said = notices(load("r.yaml", ["launch.slurm.partition=gpu", "launch.restarts=2"]))
    assert "launch.slurm has no effect while launch.kind is local" in said
    assert any(line.startswith("launch.restarts has no effect on a single process") for line in said)
    said = notices(load("r.yaml", ["launch=slurm", "launch.slurm.partition=gpu", "launch.restarts=2"]))
    assert not [line for line in said if line.startswith("launch")]
    assert not [line for line in notices(load("r.yaml", ["launch.restarts=2", "parallel.shard=2"])) if "launch" in line]


# --- who starts what -------------------------------------------------------------------------------------------------


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    jobs: list[Job] = []

    def run(job: Job) -> int:
        jobs.append(job)
        return 7

    monkeypatch.setattr(local, "run", run)
    return jobs


def start(*overrides: str, resume: bool = False, left: bool = True) -> int | None:
    recipe = load("r.yaml", overrides)
    return launch.start(recipe.stages, Path("runs/x"), ("train", "r.yaml", *overrides), resume, lambda: left)


def test_one_process_trains_itself(begun: list[Job]) -> None:
    assert start() is None
    assert not begun
    assert not Path("runs").exists()


def test_several_are_started_and_go_on_in_the_folder_made_for_them(begun: list[Job]) -> None:
    assert start("parallel.replicate=2") == 7
    assert begun[0].processes == 2
    assert begun[0].command("python") == ["python", "-m", "hone", "train", "r.yaml", "parallel.replicate=2", "--resume"]
    Path("runs/x/metrics.jsonl").write_text("{}\n")
    assert start("parallel.replicate=2") == 7
    old = [path.name for path in Path("runs").iterdir() if path.name != "x"]
    assert len(old) == 1
    assert (Path("runs") / old[0] / "metrics.jsonl").exists()  # set aside, not overwritten
    Path("runs/x/metrics.jsonl").write_text("{}\n")
    assert start("parallel.replicate=2", resume=True) == 7
    assert Path("runs/x/metrics.jsonl").exists()


def test_a_finished_run_is_left_alone(begun: list[Job]) -> None:
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/results.json").write_text("{}")
    assert start("parallel.replicate=2", resume=True, left=False) == 0  # one process could not train it: it is of two
    assert not begun


def test_a_restart_of_torchrun_has_to_go_on(begun: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("TORCHELASTIC_MAX_RESTARTS", "3")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"torchrun --max-restarts=3 would begin .* after a failure: add --resume"):
        start("parallel.replicate=2")
    assert start("parallel.replicate=2", resume=True) is None
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert start("parallel.replicate=2") is None


def test_a_process_of_torchrun_joins(begun: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError, match="RANK is set and WORLD_SIZE is not"):
        start("parallel.replicate=2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert start("parallel.replicate=2") is None
    assert start("parallel.replicate=2", "launch=ray") is None
    with pytest.raises(
        UserError, match="WORLD_SIZE is 2, and `parallel` asks for 4 processes; start as many, or unset"
    ):
        start("parallel.replicate=4")
    assert not begun
    assert job.silent()
    monkeypatch.setenv("RANK", "0")
    assert not job.silent()


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"ray is not installed here; run `pip install 'ray\[default\][^']*'`, on"):
        start("launch=ray")


def test_a_process_that_has_lost_another_ends_with_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By which a launcher knows that the cause is elsewhere."""

    def lost(*_: object, **__: object) -> None:
        raise ProcessLost("process 0 of 2 waited for the others")

    monkeypatch.setattr(pipeline, "run", lost)
    monkeypatch.setattr(sys, "argv", ["hone", "train", "r.yaml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == PEER_LOST == 76
    assert capsys.readouterr().err == "process 0 of 2 waited for the others\n"


# --- the whole way ---------------------------------------------------------------------------------------------------

SMALL = """
name: small
model: {path: tiny, tiny: {vocab_size: 400, hidden_size: 32, layers: 1, heads: 2, kv_heads: 1, mlp_size: 64}}
task: {name: knights, people: [2], quiz: brief, names: 4, train: 20, validation: 5, test: 5, repeats: true}
prompt: {style: raw, system: "", template: "{user}\\n"}
steps: 2
prompts_per_step: 2
samples_per_prompt: 2
sampling: {max_tokens: 16}
eval: {problems: 2, sampling: {max_tokens: 16}}
parallel: {replicate: 2}
algo: {clip_high: 0.3}  # which has a note
"""


#: What a process still has when Python ends, written by `sitecustomize`, which every Python imports.
THREADS = """
import atexit, os
from pathlib import Path

def write():
    tasks = Path("/proc/self/task")
    if "RANK" in os.environ and tasks.is_dir():
        names = [path.read_text().strip() for path in tasks.glob("*/comm")]
        Path(f"threads_{os.environ['RANK']}.txt").write_text("\\n".join(names))

atexit.register(write)
"""


def begin_small(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    (folder / "small.yaml").write_text(SMALL)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(THREADS)
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(
        [sys.executable, "-m", "hone", "train", "small.yaml", *overrides],
        env={**os.environ, "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{root}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def threads_at_the_end(folder: Path) -> list[str]:
    """Of the connection between the workers. None may be left: it could abort the process while Python ends."""
    written = [folder / f"threads_{rank}.txt" for rank in (0, 1)]
    assert sys.platform != "linux" or all(path.is_file() for path in written)
    return [name for path in written if path.exists() for name in path.read_text().splitlines() if "gloo" in name]


@pytest.mark.timeout(600)
def test_hone_train_starts_two_workers_that_train(folder: Path) -> None:
    with begin_small(folder) as process:
        stderr = process.communicate(timeout=540)[1]
    assert process.returncode == 0, stderr
    assert stderr.count("note: ") == 1  # once, not by every worker
    assert "2 workers on this machine" in stderr
    run = folder / "runs" / "small"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert (run / "model" / "model.safetensors").is_file()
    assert (run / "logs" / "rank_1.log").is_file()
    assert list((folder / "runs").iterdir()) == [run]
    assert threads_at_the_end(folder) == []


@pytest.mark.timeout(600)
def test_two_workers_that_are_stopped_end_with_their_exit_code(folder: Path) -> None:
    with begin_small(folder, "steps=500") as process:
        metrics = folder / "runs" / "small" / "metrics.jsonl"
        end = time.monotonic() + 300
        while not metrics.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        stderr = process.communicate(timeout=240)[1]
    assert process.returncode == 75, stderr
    assert threads_at_the_end(folder) == []
