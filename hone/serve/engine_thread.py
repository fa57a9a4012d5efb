"""The thread that owns the running batch. Requests of all clients join it; each client gets its outputs.

with EngineThread(engine) as thread:
    async for output in thread.run([Request(...)]): ...
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from hone.base.settings import UserError
from hone.rollout.native.core import Core
from hone.rollout.native.engine import NativeEngine
from hone.rollout.native.requests import Output, Request

#: A message to a waiting client: (index of its request, output), or the error that ends it.
News = tuple[int, Output] | Exception


@dataclass(eq=False)
class _Ticket:
    """Requests submitted together by one client."""

    requests: Sequence[Request]
    tell: Callable[[News], None]  # called in the engine's thread
    numbers: list[int] = field(default_factory=list)  # the core's, consecutive, once submitted
    pending: dict[int, int] = field(default_factory=dict)  # number -> unfinished samples
    cancelled: bool = False


class EngineThread:
    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()  # None: wake up, to cancel or stop
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="hone engine", daemon=True)

    def __enter__(self) -> EngineThread:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        """Stop the thread; clients with unfinished requests get an error."""
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(timeout=60)
        if self._thread.is_alive():
            raise RuntimeError("the engine's thread has not ended within 60 s; a forward pass hangs")

    async def run(self, requests: Sequence[Request]) -> AsyncGenerator[list[tuple[int, Output]], None]:
        """Yield lists of (index of the request, output) until every sample has finished; leaving early cancels them.

        Raises what `Core.submit` raises, and RuntimeError if the engine fails or is stopped meanwhile.
        """
        loop, news = asyncio.get_running_loop(), asyncio.Queue[News]()

        def tell(item: News) -> None:
            with contextlib.suppress(RuntimeError):  # the client's event loop is closed
                loop.call_soon_threadsafe(news.put_nowait, item)

        ticket = _Ticket(requests, tell)
        self._inbox.put(ticket)
        unfinished = sum(request.samples for request in requests)
        try:
            while unfinished:
                items = [await news.get()]
                while not news.empty():
                    items.append(news.get_nowait())
                new = []
                for item in items:
                    if isinstance(item, Exception):
                        unfinished = 0
                        raise item
                    unfinished -= item[1].turn is not None
                    new.append(item)
                yield new
        finally:
            if unfinished:
                ticket.cancelled = True
                self._inbox.put(None)

    # --- in the thread ---

    def _serve(self) -> None:
        """Run a batch until the end; after an error, a new one."""
        while not self._stopping:
            tickets: dict[int, _Ticket] = {}  # request of the core -> its ticket
            try:
                with self._engine.open(others=True) as core:
                    while not self._stopping:
                        self._step(core, tickets)
            except Exception as error:  # of the model or the device: report it to the clients, keep serving
                traceback.print_exc()
                _tell_all(tickets, RuntimeError(f"the engine failed: {type(error).__name__}: {error}"))
            else:
                _tell_all(tickets, RuntimeError("the server is stopping"))
        while not self._inbox.empty():
            if (ticket := self._inbox.get()) is not None:
                ticket.tell(RuntimeError("the server is stopping"))

    def _step(self, core: Core, tickets: dict[int, _Ticket]) -> None:
        wait = not core.busy
        while wait or not self._inbox.empty():
            ticket = self._inbox.get()
            wait = False
            if ticket is not None and not ticket.cancelled:
                self._submit(core, ticket, tickets)
        for number in [number for number, ticket in tickets.items() if ticket.cancelled]:
            core.cancel(number)
            del tickets[number]
        if not core.busy:
            return
        for output in core.step():
            owner = tickets.get(output.request)
            if owner is not None:
                owner.tell((output.request - owner.numbers[0], output))
                if output.turn is not None:
                    owner.pending[output.request] -= 1
                    if not owner.pending[output.request]:
                        del tickets[output.request]

    def _submit(self, core: Core, ticket: _Ticket, tickets: dict[int, _Ticket]) -> None:
        try:
            ticket.numbers = core.submit(ticket.requests)
        except UserError as error:
            ticket.tell(error)
            return
        ticket.pending = {number: request.samples for number, request in zip(ticket.numbers, ticket.requests)}
        tickets.update(dict.fromkeys(ticket.numbers, ticket))


def _tell_all(tickets: dict[int, _Ticket], error: Exception) -> None:
    for ticket in set(tickets.values()):
        ticket.tell(error)
