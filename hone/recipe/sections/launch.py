"""Where the processes of a run are started; how many there are is `parallel`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from hone.base.settings import Section

#: How often a run is begun again by itself where `restarts` is null. On one machine a worker that is lost was mostly
#: killed for memory, and would be again; on a cluster machines fail, and jobs end with their time.
RESTARTS = {"local": 0, "ray": 3, "slurm": 100}


class RayServerConfig(Section):
    """The actor that starts the recipe's rollout server (`rollout.engine` vllm or sglang), and is its parent."""

    cpus: PositiveFloat = 1.0
    gpus: NonNegativeInt | None = None  # as many as its arguments ask for; null: 1 if the cluster has any
    # cluster: at its machine's address, where that is not the first worker's. It asks nobody for a password.
    listen: Literal["loopback", "cluster"] = "loopback"


class RayConfig(Section):
    """Workers as actors of a Ray cluster that already runs."""

    # host:port; auto: RAY_ADDRESS, or the cluster of this machine
    address: Annotated[str, Field(min_length=1)] = "auto"
    cpus: PositiveFloat = 1.0  # reserved for each worker
    gpus: Annotated[int, Field(ge=0, le=1)] | None = None  # for each worker; null: 1 if the cluster has any
    start_timeout: PositiveFloat = 120.0  # seconds to connect, and for the actors to come up
    placement_timeout: PositiveFloat = 600.0  # seconds until the cluster has room for all workers, and the server
    server: RayServerConfig = RayServerConfig()


class SlurmConfig(Section):
    """One batch job; what is null is left to the cluster's defaults."""

    nodes: PositiveInt = 1
    partition: Annotated[str, Field(pattern=r"^[\w.,-]+$")] | None = None
    account: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d\d){0,2}$")] | None = None  # days-hours:minutes:seconds
    cpus: PositiveInt | None = None  # of each worker
    gpus: Annotated[int, Field(ge=0, le=1)] | None = None  # of each worker; null: 1 if the partition has any
    memory: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None  # of each node, as in 200G
    notice: PositiveInt = 120  # seconds before the end of `time` at which the run is asked to save and stop
    options: tuple[Annotated[str, Field(pattern=r"^--?\w[^\n]*$")], ...] = ()  # more of sbatch's: ["--qos=high"]
    setup: tuple[str, ...] = ()  # lines of shell before the start: ["module load cuda"]


class LaunchConfig(Section):
    kind: Literal["local", "ray", "slurm"] = "local"
    restarts: NonNegativeInt | None = None  # from the last checkpoint; null: 0 local, 3 ray, 100 slurm
    ray: RayConfig = RayConfig()
    slurm: SlurmConfig = SlurmConfig()

    @property
    def max_restarts(self) -> int:
        return RESTARTS[self.kind] if self.restarts is None else self.restarts

    def idle_settings(self, processes: int) -> list[str]:
        """Settings that have no effect, in words."""
        others = [name for name in ("ray", "slurm") if self.kind != name and getattr(self, name).changed()]
        found = [f"{name}: no effect while kind is {self.kind}" for name in others]
        if self.restarts is not None and self.kind == "local" and processes == 1:
            found.append("restarts: no effect on a single process, which nothing watches; give parallel, ray or slurm")
        return found
