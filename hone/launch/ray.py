"""Workers on a Ray cluster: one actor each, in a placement group, supervised from here.

    ray start --head                                   # on one machine; `ray start --address=...` on the others
    hone train RECIPE launch=ray parallel.shard=16

An actor runs its worker as a separate process and forwards its output. All machines have hone installed, and the run
folder is on shared storage: after a restart one machine reads the checkpoints of another. If the recipe starts a
server, one more actor is its parent, controlled by the first worker (`hone.rollout.servers.remote`). Ray restarts a
lost server actor, and the worker then restarts the server.
Sources: https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html and .../ray-core/fault-tolerance.html
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import hone
from hone.base.settings import UserError
from hone.launch.actor import SHARED, ServerActor, WorkerActor
from hone.launch.job import Job, environment
from hone.launch.supervise import Exit, announce, impatient, supervise
from hone.recipe.sections.launch import RayConfig
from hone.rollout.servers.host import ACTOR, CLUSTER, NAMESPACE, OPEN

#: Prefixes of the environment variables that workers take from this process; all others are the cluster's.
PASSED_ON = (
    *("HF_", "HONE_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "TRACKIO_", "NCCL_", "GLOO_", "TORCH_", "OMP_"),
    *("VLLM_", "SGLANG_"),
)
#: Seconds for an actor to answer a call that needs no work, and to kill its worker.
SHORT = 60.0
#: Seconds between two polls of the actors.
LOOK = 0.2


def check(job: Job) -> None:
    """Connect to the cluster. Raises UserError if that fails."""
    config = job.launch.ray
    host, _, port = config.address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=config.start_timeout).close()
        except OSError as error:
            raise _no_cluster(config, str(error)) from error
    path = os.environ.get("PYTHONPATH")
    variables = {"PYTHONPATH": path} if path else {}
    try:
        ray.init(
            address=config.address,
            log_to_driver=False,  # actors print Ray's own messages; the workers' output is read by `poll`
            logging_level=logging.ERROR,
            runtime_env={"env_vars": variables},
        )
    except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
        raise _no_cluster(config, str(error)) from error


def _no_cluster(config: RayConfig, why: str) -> UserError:
    reason = (
        (why.splitlines() or ["no answer"])[0].split(" Please specify")[0].rstrip(".")
    )  # what follows names a flag of Ray's, not hone's
    return UserError(
        f"launch.ray.address: no Ray cluster at {config.address}: {reason}. Start one with `ray start --head`, add "
        "machines with `ray start --address=HOST:6379`, or name another with launch.ray.address=HOST:6379"
    )


def run(job: Job) -> int:
    """Returns the exit code of the first worker that failed, else 0. Raises UserError if the cluster is full."""
    try:
        announce(job, "on the Ray cluster")
        return supervise(job, RayWorkers)
    finally:
        ray.shutdown()


class RayWorkers:
    """Starts an actor with a worker for each rank. See `hone.launch.supervise.WorkerGroup`."""

    def __init__(self, job: Job) -> None:
        self._config = job.launch.ray
        self._actors: list[Any] = []
        self._server: Any = None  # the actor of the server, if there is one
        self._server_name = f"server-{uuid.uuid4().hex}"
        self._abouts: list[dict[str, Any]] = []
        self._exits: dict[int, Exit] = {}
        self._polls: dict[int, Any] = {}  # running calls of `poll`
        self._shown = job.log(0).stat().st_size if job.log(0).exists() else 0  # bytes of rank 0's output
        self._job = job
        self._node = ray.get_runtime_context().get_node_id()  # of this process
        self._cut_off = False  # from the cluster
        with impatient():
            self._group = self._placed(job)
            try:
                self._actors, self._abouts = self._created(job)
                self._check_shared(job)
                self._start(job)
            except BaseException:
                self.close()
                raise

    # --- starting -----------------------------------------------------------------------------

    def _placed(self, job: Job) -> Any:
        """Reserve a bundle for each tensor-parallel group, so that it is on one machine; groups fill few machines."""
        config, each = self._config, job.tensor
        some = int("GPU" in ray.cluster_resources())
        self._gpus = some if config.gpus is None else config.gpus
        self._server_gpus = some if config.server.gpus is None else config.server.gpus
        bundle = _bundle(config.cpus * each, self._gpus * each)
        request = f"{job.processes // each} x {_words(bundle)}"
        bundles = [bundle] * (job.processes // each)
        if job.server:
            bundles.append(_bundle(config.server.cpus, self._server_gpus))
            request += f", and {_words(bundles[-1])} for the server"
        group = placement_group(bundles, strategy="PACK")
        try:
            ray.get(group.ready(), timeout=config.placement_timeout)
        except ray.exceptions.GetTimeoutError:
            remove_placement_group(group)
            raise UserError(
                f"the Ray cluster had no room within {config.placement_timeout:g} s (launch.ray.placement_timeout) for "
                f"{request}. It has {_nodes()}. Ask for fewer processes (parallel), or less for each (launch.ray.cpus, "
                "launch.ray.gpus, launch.ray.server), or add machines"
            ) from None
        except BaseException:
            remove_placement_group(group)
            raise
        return group

    def _created(self, job: Job) -> tuple[list[Any], list[dict[str, Any]]]:
        """Create the actors and return them by rank, those of one machine together; also the server's."""
        kind: Any = ray.remote(WorkerActor)
        actors = [
            kind.options(
                num_cpus=self._config.cpus,
                num_gpus=self._gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, i // job.tensor),
            ).remote()
            for i in range(job.processes)
        ]
        self._actors = actors
        if job.server:
            server: Any = ray.remote(ServerActor)
            self._server = server.options(
                num_cpus=self._config.server.cpus,
                num_gpus=self._server_gpus,
                max_restarts=-1,  # rollout.vllm.restarts bounds the server's restarts
                name=self._server_name,
                namespace=NAMESPACE,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, job.processes // job.tensor),
            ).remote(_passed_on(), os.getcwd())
        calls = [actor.about.remote() for actor in self._everybody()]
        replies = self._get(calls, self._config.start_timeout, "to come up")
        other = next((about for about in replies if about["version"] != hone.__version__), None)
        if other is not None:
            raise UserError(
                f"hone {other['version']} on {other['address']}, and {hone.__version__} here: install the same on all"
            )
        abouts = replies[: len(actors)]
        nodes = list(dict.fromkeys(about["node"] for about in abouts))
        order = sorted(range(len(actors)), key=lambda i: nodes.index(abouts[i]["node"]))
        return [actors[i] for i in order], [abouts[i] for i in order] + replies[len(actors) :]

    def _everybody(self) -> list[Any]:
        return [*self._actors, *([] if self._server is None else [self._server])]

    def _check_shared(self, job: Job) -> None:
        """Check that a file written by rank 0 is visible to every machine and to this one. Raises UserError."""
        token, text = job.folder.resolve() / ".launch", uuid.uuid4().hex
        self._get([self._actors[0].write.remote(token, text)], SHORT, "to write into the run folder")
        calls = [actor.sees.remote(os.getcwd(), token, text) for actor in self._everybody()]
        replies = self._get(calls, SHARED + SHORT, "to look at the run folder")
        wrong = [(about["address"], why) for about, why in zip(self._abouts, replies, strict=True) if why]
        if not wrong and not (token.is_file() and token.read_text() == text):
            wrong = [("this machine", f"{token.parent} is not the folder that rank 0 writes to")]
        if wrong:
            raise UserError(
                f"{wrong[0][0]}: {wrong[0][1]}. The folder that hone is started in and the run folder must be on "
                "storage that all machines of the cluster share, under the same path; see `runs`"
            )
        token.unlink(missing_ok=True)

    def _start(self, job: Job) -> None:
        port = self._get([self._actors[0].free_port.remote()], SHORT, "to find a port")[0]
        abouts = self._abouts[: len(self._actors)]
        size, sizes = len(abouts), Counter(about["node"] for about in abouts)
        devices: dict[str, list[str]] = {}
        for about in abouts:
            devices.setdefault(about["node"], []).extend(about["devices"])
        local: Counter[str] = Counter()
        calls = []
        for rank, (actor, about) in enumerate(zip(self._actors, abouts, strict=True)):
            node = about["node"]
            contract = environment(rank, size, local[node], sizes[node], abouts[0]["address"], port)
            if rank == 0 and self._server is not None:
                contract |= {ACTOR: self._server_name, CLUSTER: about["cluster"]}
                contract |= {OPEN: "1"} if self._config.server.listen == "cluster" else {}
            if devices[node]:  # all of the run's devices on this machine, since LOCAL_RANK is an index into them
                contract["CUDA_VISIBLE_DEVICES"] = ",".join(devices[node])
            local[node] += 1
            log = Path(os.path.abspath(job.log(rank)))
            calls.append(actor.start.remote(job.command()[1:], {**_passed_on(), **contract}, log, os.getcwd()))
        self._get(calls, SHORT, "to start their workers")

    def _get(self, calls: Sequence[Any], seconds: float, what: str) -> list[Any]:
        """Wait for the answers of starting actors. Raises UserError if one takes too long."""
        try:
            return list(ray.get(list(calls), timeout=seconds))
        except ray.exceptions.GetTimeoutError as error:
            raise UserError(f"the actors of Ray took more than {seconds:g} s {what}; see `ray status`") from error
        except ray.exceptions.RayActorError as error:
            raise UserError(f"an actor of Ray was lost when it was {what}: {_reason(error)}") from error
        except OSError as error:  # raised by a method of the actor
            raise UserError(f"a machine of the Ray cluster failed {what}: {_reason(error)}") from error

    # --- watching -----------------------------------------------------------------------------

    def ended(self) -> dict[int, Exit]:
        for rank, actor in enumerate(self._actors):
            if rank not in self._exits and rank not in self._polls:
                self._polls[rank] = actor.poll.remote(None if rank else self._shown)
        due = list(self._polls.values())
        ready = set(ray.wait(due, num_returns=len(due), timeout=LOOK)[0]) if due else set()
        for rank, call in list(self._polls.items()):
            if call in ready:
                del self._polls[rank]
                self._look(rank, call)
        return dict(self._exits)

    def _look(self, rank: int, call: Any) -> None:
        try:
            output, code = ray.get(call)
        except ray.exceptions.ActorUnavailableError:  # it may return; Ray reports a final loss
            return
        except ray.exceptions.RayActorError as error:
            self._check_node()
            self._exits[rank] = Exit(137, f"was lost with its actor: {_reason(error)}", lost=True)
            return
        if output:
            self._shown += len(output)
            sys.stdout.write(output.decode(errors="replace"))
            sys.stdout.flush()
        if code is not None:
            self._exits[rank] = Exit.of(code)

    def _check_node(self) -> None:
        """Raises UserError if the raylet of this machine has ended: Ray then ends all actors that we own."""
        if any(node["NodeID"] == self._node and node["Alive"] for node in ray.nodes()):
            return
        self._cut_off = True
        message = (
            "Ray on this machine, where hone was started, has ended (its raylet was lost), and with it the actors of "
            "all workers; no worker failed. Start Ray here again (`ray start`; see `ray status`), and resume "
            "from the last checkpoint with the same command and --resume"
        )
        self._job.event("launcher_lost", message)
        raise UserError(message)

    def signal(self, number: int) -> None:
        for rank, actor in enumerate(self._actors):
            if rank not in self._exits:
                actor.signal.remote(number)  # `ended` detects a lost one

    def where(self, rank: int) -> str:
        return f"on {self._abouts[rank]['address']}"

    def close(self) -> None:
        """End the workers, the server and the actors."""
        if self._cut_off:  # Ray ends the actors of a lost process, and they end their workers
            return
        stops = [actor.stop.remote() for actor in self._everybody()]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=SHORT)
        for actor in self._everybody():
            ray.kill(actor)
        remove_placement_group(self._group)


def _reason(error: Exception) -> str:
    """Ray's message without its stack and identifiers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(line for line in lines if not line.startswith(("class_name", "actor_id", "pid", "namespace", "ip")))


def _passed_on() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)}


def _bundle(cpus: float, gpus: int) -> dict[str, float]:
    return {"CPU": cpus, **({"GPU": float(gpus)} if gpus else {})}


def _words(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources.get(key, 0):g} {key}" for key in ("CPU", "GPU"))


def _nodes() -> str:
    alive = [node for node in ray.nodes() if node["Alive"]]
    free = ray.available_resources()
    each = "; ".join(f"{node['NodeManagerAddress']}: {_words(node['Resources'])}" for node in alive)
    return f"{len(alive)} machines ({each}); free: {_words(free)}"
