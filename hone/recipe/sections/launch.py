"""Where the processes of a run are started; `parallel` says how many."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from hone.base.settings import Section

#: Number of automatic restarts if `restarts` is null. On one machine, a lost worker was mostly killed for memory and
#: would be again; on a cluster, machines fail and jobs run out of time.
RESTARTS = {"local": 0, "ray": 3, "slurm": 100}


class RayServerConfig(Section):
    """The actor that starts the recipe's rollout server (`rollout.engine` vllm or sglang)."""

    cpus: PositiveFloat = 1.0
    gpus: NonNegativeInt | None = None  # as its arguments require; null: 1 if the cluster has any
    # cluster: at its machine's address, if the first worker runs elsewhere. The server has no authentication.
    listen: Literal["loopback", "cluster"] = "loopback"


class RayConfig(Section):
    """Workers as actors of a Ray cluster that already runs."""

    # host:port; auto: RAY_ADDRESS, or the cluster of this machine
    address: Annotated[str, Field(min_length=1)] = "auto"
    cpus: PositiveFloat = 1.0  # reserved for each worker
    gpus: Annotated[int, Field(ge=0, le=1)] | None = None  # for each worker; null: 1 if the cluster has any
    start_timeout: PositiveFloat = 120.0  # seconds to connect, and for the actors to come up
    placement_timeout: PositiveFloat = 600.0  # seconds until the cluster has room for all workers and the server
    server: RayServerConfig = RayServerConfig()


class SlurmConfig(Section):
    """One batch job; null leaves a setting to the cluster's defaults."""

    nodes: PositiveInt = 1
    partition: Annotated[str, Field(pattern=r"^[\w.,-]+$")] | None = None
    account: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d\d){0,2}$")] | None = None  # days-hours:minutes:seconds
    cpus: PositiveInt | None = None  # of each worker
    gpus: Annotated[int, Field(ge=0, le=1)] | None = None  # of each worker; null: 1 if the partition has any
    memory: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None  # of each node, as in 200G
    notice: PositiveInt = 120  # seconds before the end of `time` at which the run is asked to save and stop
    options: tuple[
        Annotated[str, Field(pattern=r"^--?\w[^\n]*$")], ...
    ] = ()  # further options of sbatch: ["--qos=high"]
    setup: tuple[str, ...] = ()  # shell commands before the start: ["module load cuda"]


class LaunchConfig(Section):
    kind: Literal["local", "ray", "slurm"] = "local"
    restarts: NonNegativeInt | None = None  # automatic, from the last checkpoint; null: 0 local, 3 ray, 100 slurm
    ray: RayConfig = RayConfig()
    slurm: SlurmConfig = SlurmConfig()

    @property
    def max_restarts(self) -> int:
        return RESTARTS[self.kind] if self.restarts is None else self.restarts
