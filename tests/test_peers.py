"""What two processes tell each other: long work, errors, events."""

from __future__ import annotations

from pathlib import Path

from hone.recipe.load import load
from hone.recipe.notes import notices
from tests.test_world import spawn, wait


def test_long_work_errors_and_events_of_one_are_known_to_both(tmp_path: Path) -> None:
    wait(spawn(2, str(tmp_path), module="tests.peers_worker"), timeout=120)
    assert (tmp_path / "events").read_text().splitlines() == [
        "born|the same of all",
        "sampled|from 0 on",
        "born|rank 1: the same of all",
        "sampled|rank 1: from 2 on",
        "policy_mismatch|rank 1: stale",
    ]


def test_settings_of_a_server_that_is_not_started_are_said() -> None:
    def said(*overrides: str) -> list[str]:
        found = notices(load("demo", ["launch.kind=ray", "launch.ray.server.gpus=2", *overrides]))
        return [line for line in found if "server" in line]

    assert said() == ["launch.ray.server has no effect: hone starts no rollout server in any stage"]
    assert said("stages.rl.rollout.engine=vllm") == []
    assert len(said("stages.rl.rollout={engine: sglang, sglang: {url: 'http://10.0.0.1:80'}}")) == 1


def test_a_notice_that_is_shorter_than_saving_is_said() -> None:
    base = ["launch.kind=slurm", "launch.slurm.notice=60"]
    found = [line for line in notices(load("demo", base)) if "notice" in line]
    assert "launch.slurm.notice 60: a run may take 60 s to save (checkpoint.stop_within_seconds), so it" in found[-1]
    assert not [line for line in notices(load("demo", ["launch.kind=slurm"])) if "slurm.notice" in line]
    assert not [line for line in notices(load("demo", ["launch.slurm.notice=60"])) if "slurm.notice 60" in line]
