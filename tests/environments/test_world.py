"""Episodes of several processes are those of one."""

import json
from pathlib import Path

from tests.environments import world_worker
from tests.environments.toy import PROBLEMS, episodes
from tests.test_world import spawn, wait


def test_two_processes_play_the_episodes_of_one(tmp_path: Path) -> None:
    """With an engine in each process, and with one for both, as a server is; the environments are where the rewards
    of their problems are computed."""
    wait(spawn(2, str(tmp_path), module="tests.environments.world_worker"), timeout=120)
    alone = episodes().sample(PROBLEMS, world_worker.engine(), world_worker.SAMPLING, samples=2, seed=5)
    expected = json.loads(json.dumps([[world_worker.row(rollout) for rollout in group] for group in alone]))
    assert max(len(rollout.turns) for group in alone for rollout in group) == 3
    for rank in range(2):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert result["True"] == expected
        assert result["False"] == expected
        assert "leaves no room" in result["refused"] or "do not fit" in result["refused"]
