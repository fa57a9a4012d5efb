"""World: this process's place among the processes of a run, and their communication. One process is the trivial case.

    world = World.from_env(recipe.parallel)     # reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    part = world.share(problems)                # this process's part; `gather` is the inverse

Every process runs the same loop with the same seed. Slow work (sampling, rewards, forward and backward passes) is
divided and its results are gathered immediately, so that everything else, including what is written, is the same as
with one process. Only the first process writes files.

Ranks count tensor parts first, then shards, then replicas: with replicate 2, shard 2, tensor 2 the ranks 0 and 1 work
on the same samples, 0 and 2 hold different parts of one copy, 0 and 4 the same part of different copies. Processes of
one machine have consecutive ranks, so that those that communicate most are closest.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed as dist

from hone.base.parallel import ParallelConfig
from hone.base.settings import PEER_LOST, UserError
from hone.base.stop import Interrupted, Preempted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

#: Dimensions of the mesh, in the order of the ranks.
DIMS = ("replicate", "shard", "tensor")

#: Addresses that only this machine can reach.
LOOPBACK = ("127.0.0.1", "localhost")

#: Number of elements that one all-reduce sums.
BUCKET = 1 << 25


class ProcessLost(UserError):
    """Another process of the run has ended or did not arrive in time."""

    exit_code = PEER_LOST


@dataclass(frozen=True)
class World:
    """Process `rank` of `size`. The ranks of a tensor-parallel group are consecutive."""

    rank: int = 0
    size: int = 1
    tensor: int = 1  # processes that work on the same samples in the update
    shard: int = 1  # processes that hold one copy of the weights together, each with its own samples
    mesh: DeviceMesh | None = None  # [replicate, shard, tensor]; None: one process
    control: ProcessGroup | None = None  # all processes, on the CPU: objects and barriers
    writing: ProcessGroup | None = None  # likewise, for the thread that writes checkpoints
    timeout: float = 1800.0  # seconds that a process waits for the others at most

    @classmethod
    def from_env(cls, parallel: ParallelConfig) -> World:
        """Connect to the other processes. May be called again for the layout of another stage.

        Raises UserError if the number of processes differs from `parallel` or there are too few devices, ProcessLost if
        they do not all arrive within `parallel.timeout`.
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
        shape = (parallel.replicate, parallel.shard, parallel.tensor)

        def connect() -> tuple[DeviceMesh, ProcessGroup, ProcessGroup]:
            mesh = _mesh(_meet(rank, size, parallel.timeout), shape)
            return mesh, _control(parallel.timeout, "the loop"), _control(parallel.timeout, "checkpoints")

        mesh, control, writing = _interruptible(connect)
        if mesh.device_type == "cuda":
            torch.cuda.set_device(_local_rank())  # of this thread
        return cls(rank, size, parallel.tensor, parallel.shard, mesh, control, writing, parallel.timeout)

    # --- places -------------------------------------------------------------------------------

    @property
    def main(self) -> bool:
        """Whether this process writes the run folder and prints to the terminal."""
        return self.rank == 0

    @property
    def data(self) -> int:
        """Number of parts into which the samples of an update are divided."""
        return self.size // self.tensor

    @property
    def data_rank(self) -> int:
        """The index of this process's part."""
        return self.rank // self.tensor

    @property
    def is_writer(self) -> bool:
        """Whether this is the first of the processes that work on the same samples."""
        return self.rank % self.tensor == 0

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds only part of the weights."""
        return self.shard * self.tensor > 1

    # --- sharing ------------------------------------------------------------------------------

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's contiguous part of `items`; the sizes of parts differ by at most one."""
        cuts = [len(items) * r // self.size for r in (self.rank, self.rank + 1)]
        return list(items[cuts[0] : cuts[1]])

    def gather(self, local: Sequence[T], what: str = "results") -> list[T]:
        """The items of all processes, in the order of the ranks; every process gets them all."""
        if self.size == 1:
            return list(local)
        parts: list[Any] = [None] * self.size
        with self.waiting(what):
            dist.all_gather_object(parts, list(local), group=self.control)
        return [item for part in parts for item in part]

    def on_main(self, call: Callable[[], T], what: str = "the first process", patient: bool = False) -> T:
        """Run `call` on the first process and return its result on all; a UserError or OSError is raised on all.

        `patient`: the call has its own time limit, and the others wait for it beyond `timeout`.
        """
        if self.size == 1:
            return call()
        answer: list[Any] = [None, None]
        if self.main:
            with self._at_work() if patient else nullcontext():
                try:
                    answer[0] = call()
                except (UserError, OSError) as error:  # raised on all: none waits for a process that has ended
                    answer[1] = error
        with self.waiting(what):
            reply = self._tell(answer)
            while reply is None:
                reply = self._tell(answer)
        if reply[1] is not None:
            raise reply[1]
        result: T = reply[0]
        return result

    def _tell(self, answer: list[Any] | None) -> list[Any] | None:
        """Broadcast an answer from the first process; None: not ready yet."""
        message = [answer]
        dist.broadcast_object_list(message, src=0, group=self.control)
        return message[0]

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Context manager in which the waiting processes are told periodically that the answer is still to come."""
        done = threading.Event()

        def say() -> None:
            with contextlib.suppress(RuntimeError):  # a process is gone: sending the answer fails too
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
        """Wait until all processes arrive. Raises ProcessLost, which names `name` and the missing process."""
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
        """Disconnect from the other processes, and end the threads of the connection.

        A thread of gloo that is still at work when Python ends can abort the process, whatever its exit code was to be.
        """
        if self.size > 1 and dist.is_initialized():
            _control.cache_clear()
            _mesh.cache_clear()
            for connection in ("mesh", "control", "writing"):
                object.__setattr__(self, connection, None)
            dist.destroy_process_group()
            gc.collect()  # groups, meshes and models refer to each other; the threads of a group end with it

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Wrap a wait for the other processes, for `what`: raises ProcessLost if torch detects that one is gone."""
        try:
            yield
        except RuntimeError as error:  # torch's error for a closed connection or a time-out
            if self.size == 1:
                raise
            reason = str(error).strip().splitlines()[0]
            raise ProcessLost(
                f"process {self.rank} of {self.size} waited for the others ({what}): {reason}. The process that ended "
                "first says why; where all are alive and slow, raise parallel.timeout. --resume continues from the "
                "last checkpoint"
            ) from error


@contextmanager
def connected(parallel: ParallelConfig) -> Iterator[World]:
    """The processes of a run. The connection is closed when the run ends, or stops as all of them have agreed."""
    world = World.from_env(parallel)
    try:
        yield world
    except (Interrupted, Preempted) as stop:
        error: BaseException | None = stop
        while error is not None:  # their frames hold the policy, which holds the connection
            traceback.clear_frames(error.__traceback__)
            error = error.__context__
        world.close()
        raise
    world.close()


#: One process.
ALONE = World()


def _interruptible(call: Callable[[], T]) -> T:
    """The result of a call that waits in C++, where no signal is handled: it waits in a thread.

    A process that is told to stop while others are still missing would wait for them for `parallel.timeout`.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised again where it is waited for
            future.set_exception(error)

    threading.Thread(target=work, name="hone-connect", daemon=True).start()
    return future.result()


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _meet(rank: int, size: int, timeout: float) -> str:
    """Initialise the process group if needed; returns the type of device. Raises UserError, ProcessLost."""
    cuda, wait = torch.cuda.is_available(), datetime.timedelta(seconds=timeout)
    if not dist.is_initialized():
        local = _local_rank()
        if cuda and local >= torch.cuda.device_count():
            raise UserError(
                f"process {rank} of {size} is number {local} on its machine, which has {torch.cuda.device_count()} "
                "devices: start at most that many processes there, since each needs its own device"
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
        except (RuntimeError, ValueError, OSError) as error:  # wrong host or port, missing processes or variables
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            reason = str(error).strip().splitlines()[0]
            raise ProcessLost(
                f"process {rank} of {size} did not meet the others at {where} (MASTER_ADDR, MASTER_PORT): {reason}"
            ) from error
    return "cuda" if cuda else "cpu"


def _store(rank: int, size: int, wait: datetime.timedelta) -> Any:
    """The store through which the processes connect. Under torchrun it is the agent's; on one machine ours, with the
    first process listening on loopback; else None: torch's default, which listens on every address."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    stores: Any = dist  # torch declares them in its compiled part
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and host and port.isdecimal():
        agents = stores.TCPStore(host, int(port), size, False, wait, wait_for_workers=False)
        return _of_this_attempt(agents, rank, size, wait)
    if host not in LOOPBACK or not port.isdecimal():
        return None
    listener = socket.create_server((LOOPBACK[0], int(port)), backlog=size).detach() if rank == 0 else None
    return stores.PrefixStore(
        "hone", stores.TCPStore(LOOPBACK[0], int(port), size, rank == 0, wait, master_listen_fd=listener)
    )


def _of_this_attempt(store: Any, rank: int, size: int, wait: datetime.timedelta) -> Any:
    """The agent's store with a prefix that is unique to this attempt.

    When torchrun restarts workers, it keeps the store with the addresses of dead ones. TORCHELASTIC_RESTART_COUNT
    cannot be the prefix: an agent counts only failures of its own workers, so machines differ. So the first process
    numbers the attempt, and each other process requests that number under a unique key; replies to dead processes are
    never read.
    Raises RuntimeError, as torch does, if not all processes arrive within `wait`.
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
                raise RuntimeError(f"{ready + 1} of {size} processes arrived within {wait.total_seconds():g} s")
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
    """A separate group per user: collectives of two threads must not mix."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group tensors of one dtype into buckets of about `BUCKET` elements."""
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        bucket: list[torch.Tensor] = []
        for t in (t for t in tensors if t.dtype == dtype):
            bucket.append(t)
            if sum(x.numel() for x in bucket) >= BUCKET:
                yield bucket
                bucket = []
        if bucket:
            yield bucket
