"""hone: reinforcement-learning post-training for reasoning language models.

    import hone

    run = hone.train("demo", "stages.rl.steps=20")
    run.metrics, run.samples(step=12), hone.evaluate(run, samples=8).accuracy

and the parts for a loop of your own: see docs/python.md. A name is imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from hone.cli.api import TrainedRun as TrainedRun
    from hone.cli.api import evaluate as evaluate
    from hone.cli.api import load_run as load_run
    from hone.cli.api import sample as sample
    from hone.cli.api import train as train
    from hone.environments.base import Environment as Environment
    from hone.environments.base import Observation as Observation
    from hone.environments.play import Episodes as Episodes
    from hone.learn.batches import prepare as prepare
    from hone.learn.pack import Packer as Packer
    from hone.learn.policy import Policy as Policy
    from hone.rewards import make_reward as make_reward
    from hone.rewards.base import reward_groups as reward_groups
    from hone.rollout.native.engine import NativeEngine as NativeEngine
    from hone.rollout.prompts import Renderer as Renderer
    from hone.tasks import make_task as make_task

_HOMES = {
    "train": "hone.cli.api",
    "evaluate": "hone.cli.api",
    "sample": "hone.cli.api",
    "load_run": "hone.cli.api",
    "TrainedRun": "hone.cli.api",
    "Policy": "hone.learn.policy",
    "NativeEngine": "hone.rollout.native.engine",
    "Renderer": "hone.rollout.prompts",
    "make_task": "hone.tasks",
    "make_reward": "hone.rewards",
    "Episodes": "hone.environments.play",
    "Environment": "hone.environments.base",
    "Observation": "hone.environments.base",
    "reward_groups": "hone.rewards.base",
    "prepare": "hone.learn.batches",
    "Packer": "hone.learn.pack",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hone' has no attribute {name!r}; it offers {', '.join(sorted(_HOMES))}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
