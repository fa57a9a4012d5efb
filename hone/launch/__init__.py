"""Start the processes of a run: on this machine, on a Ray cluster or through Slurm.

    code = start(stages, folder, ("train", "demo", "parallel.replicate=2"), resume=False, anything_left=lambda: True)

Each process is an ordinary `hone train` that reads its rank from the environment: see `hone.launch.job`. Under torchrun
the processes exist already, and nothing is started here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hone.base.extras import needed
from hone.base.settings import UserError
from hone.launch.job import Job, joined

if TYPE_CHECKING:
    from hone.recipe.recipe import SampledStage, StageSettings


def alone(stages: Sequence[StageSettings]) -> bool:
    """Whether this process itself trains: it is the only one, or a worker."""
    config, processes = stages[0].launch, stages[0].parallel.processes
    return joined(processes) or (config.kind == "local" and processes == 1)


def check_restarts(resume: bool) -> None:
    """Raises UserError if torchrun restarts failed workers and a restarted one would begin a new run."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and not resume:
        raise UserError(
            f"torchrun --max-restarts={restarts} would begin the run from its start after a failure: add --resume, "
            "which begins a new run if there is none yet"
        )


def start(
    stages: Sequence[SampledStage],
    folder: Path,
    arguments: Sequence[str],
    resume: bool,
    anything_left: Callable[[], bool],
) -> int | None:
    """Start the processes that the recipe configures, and wait for their end. `arguments`: of hone, without --resume.

    `anything_left` returns False if the run is finished, and raises UserError if it cannot succeed. It is called before
    anything is written. The run folder is locked from then until the end; workers that this process waits for share
    the lock.

    Returns the exit code, or None if this process trains itself (see `alone`). Raises UserError if the processes cannot
    be started.
    """
    first = stages[0]
    config, processes = first.launch, first.parallel.processes
    if alone(stages):
        check_restarts(resume)
        return None

    from hone.base.aside import set_aside
    from hone.runs import lock

    names = tuple(stage.name for stage in stages) if len(stages) > 1 else ()
    tensor, server = max(stage.parallel.tensor for stage in stages), any(stage.starts_server for stage in stages)
    job = Job(folder, tuple(arguments), processes, tensor, config, names, server)

    if config.kind == "slurm":
        from hone.launch import slurm as way
    elif config.kind == "ray":
        if find_spec("ray") is None:
            raise UserError(f"launch: ray is not installed here; run `{needed('ray')}`, on every machine")
        from hone.launch import ray as way  # type: ignore[no-redef]
    else:
        from hone.launch import local as way  # type: ignore[no-redef]
    # A Slurm job outlives this process, and inherits its environment through sbatch: it locks the run folder itself.
    with lock.held(folder, share=config.kind != "slurm"):
        if not anything_left():
            return 0
        way.check(job)
        if folder.exists() and not resume:
            set_aside(folder)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        if before := lock.taken_over(folder):
            job.event("lock_taken_over", f"the run folder was still locked by {before}, which had ended")
        return way.run(job)
