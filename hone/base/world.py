"""World: which of the processes of a run this is, and what they share. One process is the trivial case.

    world = World.from_env(recipe.parallel)     # reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    mine = world.share(problems)                # this process's part; `gather` puts the parts together again

Every process runs the same loop on the same seed. Work is divided where it is slow (sampling, rewards, forward and
backward passes) and put together at once, so that everything in between, and everything that is written down, is that
of one process. Only the first process writes files.

Ranks count tensor parts first, then shards, then replicas: with replicate 2, shard 2, tensor 2 the ranks 0 and 1 work
on the same samples, 0 and 2 hold different parts of one copy, 0 and 4 the same part of different copies. Processes of
one machine follow each other, so what talks most is closest.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed as dist

from hone.base.parallel import ParallelConfig
from hone.base.settings import PEER_LOST, UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

#: Dimensions of the mesh, in the order of the ranks.
DIMS = ("replicate", "shard", "tensor")

#: Addresses at which only this machine is heard.
LOOPBACK = ("127.0.0.1", "localhost")

#: Elements that are summed over processes in one call.
BUCKET = 1 << 25


class ProcessLost(UserError):
    """Another process of the run has ended, or does not come within the time allowed."""

    exit_code = PEER_LOST


@dataclass(frozen=True)
class World:
    """`rank` of `size` processes. Ranks of one tensor-parallel group follow each other."""

    rank: int = 0
    size: int = 1
    tensor: int = 1  # processes that work on the same samples in the update
    shard: int = 1  # processes that hold one copy of the weights together, each with its own samples
    mesh: DeviceMesh | None = None  # [replicate, shard, tensor]; None: one process
    control: ProcessGroup | None = None  # all processes, on the CPU: objects and barriers
    writing: ProcessGroup | None = None  # the same for a thread beside the loop, which writes checkpoints
    timeout: float = 1800.0  # seconds that a process waits for the others, at most

    @classmethod
    def from_env(cls, parallel: ParallelConfig) -> World:
        """Meet the other processes. May be called again, for the layout of another stage.

        Raises UserError if there are other processes than `parallel` says, or fewer devices, ProcessLost if they do
        not come within `parallel.timeout`.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size != parallel.processes:
            layout = " x ".join(f"{name} {getattr(parallel, name)}" for name in DIMS)
            raise UserError(
                f"parallel: {layout} is {parallel.processes} process{'es' * (parallel.processes > 1)}, and WORLD_SIZE "
                f"says {size}: start {parallel.processes}, or set parallel to a product of {size}, as in "
                f"parallel.replicate={size} with the others 1"
            )
        if size == 1:
            return cls()
        rank = int(os.environ["RANK"])
        kind = _meet(rank, size, parallel.timeout)
        shape = (parallel.replicate, parallel.shard, parallel.tensor)
        mesh = _mesh(kind, shape)
        control, writing = (_control(parallel.timeout, user) for user in ("the loop", "checkpoints"))
        return cls(rank, size, parallel.tensor, parallel.shard, mesh, control, writing, parallel.timeout)

    # --- places -------------------------------------------------------------------------------

    @property
    def main(self) -> bool:
        """Whether this process writes the run folder and speaks to the user."""
        return self.rank == 0

    @property
    def data(self) -> int:
        """Parts that the samples of an update are divided into."""
        return self.size // self.tensor

    @property
    def data_rank(self) -> int:
        """Which of these parts is this process's."""
        return self.rank // self.tensor

    @property
    def is_writer(self) -> bool:
        """Whether this is the first of the processes that work on the same samples."""
        return self.rank % self.tensor == 0

    @property
    def is_sharded(self) -> bool:
        """Whether a process holds less than all of the weights."""
        return self.shard * self.tensor > 1

    # --- sharing ------------------------------------------------------------------------------

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's part of `items`: a run of neighbours, parts differ by one at most."""
        cuts = [len(items) * r // self.size for r in (self.rank, self.rank + 1)]
        return list(items[cuts[0] : cuts[1]])

    def gather(self, mine: Sequence[T], what: str = "results") -> list[T]:
        """The items of all processes, in the order of the ranks; every process gets them all."""
        if self.size == 1:
            return list(mine)
        parts: list[Any] = [None] * self.size
        with self.waiting(what):
            dist.all_gather_object(parts, list(mine), group=self.control)
        return [item for part in parts for item in part]

    def on_main(self, call: Callable[[], T], what: str = "the first process", patient: bool = False) -> T:
        """What the first process returns, on every one; an error of the user's or of the disk is raised on each.

        `patient`: the call has bounds of its own, and the others wait for longer than `timeout` while it is at work.
        """
        if self.size == 1:
            return call()
        answer: list[Any] = [None, None]
        if self.main:
            with self._at_work() if patient else nullcontext():
                try:
                    answer[0] = call()
                except (UserError, OSError) as error:  # known to all, so that nobody waits for one that has ended
                    answer[1] = error
        with self.waiting(what):
            told = self._tell(answer)
            while told is None:
                told = self._tell(answer)
        if told[1] is not None:
            raise told[1]
        result: T = told[0]
        return result

    def _tell(self, answer: list[Any] | None) -> list[Any] | None:
        """From the first process to all: an answer; None: not yet."""
        told = [answer]
        dist.broadcast_object_list(told, src=0, group=self.control)
        return told[0]

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Meanwhile the others, who wait for an answer, hear that there will be one."""
        done = threading.Event()

        def say() -> None:
            with contextlib.suppress(RuntimeError):  # one is gone: the answer will find the same
                while not done.wait(self.timeout / 3):
                    self._tell(None)

        thread = threading.Thread(target=say, name="at work", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def barrier(self, name: str) -> None:
        """Wait until every process is here. Raises ProcessLost, which names `name` and the missing process."""
        if self.size > 1:
            with self.waiting(name):
                dist.monitored_barrier(self.control, wait_all_ranks=True)

    def sum(self, tensors: Sequence[torch.Tensor], *dims: str) -> None:
        """Replace tensors by their sums over the processes along these dimensions of the mesh."""
        for dim in dims:
            if self.mesh is None or self.mesh[dim].size() == 1:
                continue
            with self.waiting(f"sums over {dim}"):
                for bucket in _buckets(tensors):
                    flat = torch.cat([t.reshape(-1) for t in bucket])
                    dist.all_reduce(flat, group=self.mesh[dim].get_group())
                    for t, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                        t.copy_(part.view_as(t))

    def close(self) -> None:
        """Part from the other processes; then there are none."""
        if self.size > 1 and dist.is_initialized():
            _control.cache_clear()
            _mesh.cache_clear()
            dist.destroy_process_group()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around a wait for the others, for `what`: raises ProcessLost where torch finds that one has gone."""
        try:
            yield
        except RuntimeError as error:  # torch's own, for a connection that closed and for a time-out
            if self.size == 1:
                raise
            reason = str(error).strip().splitlines()[0]
            raise ProcessLost(
                f"process {self.rank} of {self.size} waited for the others ({what}): {reason}. The process that ended "
                "first says why; where all are alive and slow, raise parallel.timeout. --resume goes on from the last "
                "checkpoint"
            ) from error


#: One process.
ALONE = World()


def _meet(rank: int, size: int, timeout: float) -> str:
    """Begin the process group, unless it has begun; returns the kind of device. Raises UserError, ProcessLost."""
    cuda, wait = torch.cuda.is_available(), datetime.timedelta(seconds=timeout)
    if not dist.is_initialized():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if cuda and local >= torch.cuda.device_count():
            raise UserError(
                f"process {rank} of {size} is number {local} on its machine, which has {torch.cuda.device_count()} "
                "devices: start at most so many processes there, each has a device of its own"
            )
        if cuda:
            torch.cuda.set_device(local)
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=_store(rank, size, wait),
                rank=rank,
                world_size=size,
                timeout=wait,
            )
        except (RuntimeError, ValueError, OSError) as error:  # no such host or port, not all came, no variable
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            reason = str(error).strip().splitlines()[0]
            raise ProcessLost(
                f"process {rank} of {size} did not meet the others at {where} (MASTER_ADDR, MASTER_PORT): {reason}"
            ) from error
    return "cuda" if cuda else "cpu"


def _store(rank: int, size: int, wait: datetime.timedelta) -> Any:
    """Where the processes find each other; None: torch's own store, which listens at every address, as it must for
    other machines. Under torchrun the agent's, else on one machine our own: the first process listens on loopback."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    stores: Any = dist  # torch declares them in its compiled part
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and host and port.isdecimal():
        agents = stores.TCPStore(host, int(port), size, False, wait, wait_for_workers=False)
        return _of_this_attempt(agents, rank, size, wait)
    if host not in LOOPBACK or not port.isdecimal():
        return None
    heard = socket.create_server((LOOPBACK[0], int(port)), backlog=size).detach() if rank == 0 else None
    return stores.PrefixStore(
        "hone", stores.TCPStore(LOOPBACK[0], int(port), size, rank == 0, wait, master_listen_fd=heard)
    )


def _of_this_attempt(store: Any, rank: int, size: int, wait: datetime.timedelta) -> Any:
    """The agent's store under a prefix of its own for this attempt.

    torchrun keeps the store when it starts workers again, with the addresses of those that have died. Its
    TORCHELASTIC_RESTART_COUNT cannot be the prefix: an agent counts the failures of its own workers only, so machines
    differ. So the first process numbers the attempt and answers each process that asks under a number of its own;
    answers to processes that have died are never read again.
    Raises RuntimeError, as torch does, if not all processes come within `wait`.
    """
    if rank:
        question = f"hone/questions/{store.add('hone/questions', 1)}"
        store.wait([question], wait)
        attempt = store.get(question).decode()
        store.add(f"{attempt}/ready", 1)
    else:
        attempt = f"hone/attempts/{store.add('hone/attempts', 1)}"
        answered, end = 0, time.monotonic() + wait.total_seconds()
        while (ready := store.add(f"{attempt}/ready", 0)) < size - 1:
            if time.monotonic() > end:
                raise RuntimeError(f"{ready + 1} of {size} processes came within {wait.total_seconds():g} s")
            questions = store.add("hone/questions", 0)
            for number in range(answered + 1, questions + 1):
                store.set(f"hone/questions/{number}", attempt)
            answered = questions
            time.sleep(0.05)
    stores: Any = dist
    return stores.PrefixStore(attempt, store)


@cache
def _mesh(kind: str, shape: tuple[int, ...]) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(kind, shape, mesh_dim_names=DIMS)


@cache
def _control(timeout: float, user: str) -> ProcessGroup:
    """One for each user: collectives of two threads must not meet."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype, about `BUCKET` elements together."""
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        bucket: list[torch.Tensor] = []
        for t in (t for t in tensors if t.dtype == dtype):
            bucket.append(t)
            if sum(x.numel() for x in bucket) >= BUCKET:
                yield bucket
                bucket = []
        if bucket:
            yield bucket
