"""The listening socket of the HTTP services."""

from __future__ import annotations

import asyncio
import socket

from hone.base.web import listen


def test_small_answers_do_not_wait_for_an_acknowledgement() -> None:
    async def accepted() -> int:
        options: asyncio.Queue[int] = asyncio.Queue()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            own = writer.get_extra_info("socket")
            options.put_nowait(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = listen("127.0.0.1", 0)
        server = await asyncio.start_server(connected, sock=listener)
        async with server:
            _, writer = await asyncio.open_connection(*listener.getsockname())
            option = await options.get()
            writer.close()
            return option

    assert asyncio.run(accepted()) != 0


def test_a_client_may_connect_before_the_server_has_started() -> None:
    listener = listen("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname(), timeout=5) as client:
        listener.settimeout(5)
        accepted, address = listener.accept()  # the server, which starts only now
        accepted.close()
        assert address == client.getsockname()
