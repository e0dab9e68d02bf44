"""A TCP proxy between a client and the hub, which breaks connections as a network does."""

from __future__ import annotations

import asyncio
import socket
from urllib.parse import urlsplit

from eventhub_client import Client


class Proxy:
    def __init__(self, target: str) -> None:
        address = urlsplit(target)
        self._host, self._port = address.hostname, address.port
        self._server: asyncio.Server | None = None
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        #: What the hub answers does not arrive.
        self.deaf = False
        #: So many bytes of the hub come until the connection is cut; None for no end.
        self.budget: int | None = None
        #: New connections are closed at once.
        self.refusing = False
        self.url = ""

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"ws://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Ends all connections at once, without a closing handshake."""
        for pair in list(self._pairs):
            for writer in pair:
                writer.transport.abort()

    async def cut_once(self, client: Client) -> None:
        """Cuts a client's connection, and waits until it has another."""
        lost = asyncio.Event()
        off = client.on("state", lambda state, _: lost.set() if state == "waiting" else None)
        self.cut()
        await lost.wait()
        off()
        await client.ready()

    async def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.refusing:
            client.transport.abort()
            return
        try:
            from_hub, hub = await asyncio.open_connection(self._host, self._port)
        except OSError:
            client.transport.abort()
            return
        pair = (client, hub)
        self._pairs.add(pair)
        try:
            for writer in pair:
                writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            there = asyncio.create_task(self._pass(reader, hub, False))
            back = asyncio.create_task(self._pass(from_hub, client, True))
            try:
                await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in (there, back):
                    one.cancel()
                await asyncio.wait([there, back])
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            self._pairs.discard(pair)
            for writer in pair:
                writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool) -> None:
        try:
            while data := await reader.read(65536):
                if answers and self.budget is not None:
                    if len(data) >= self.budget:
                        writer.write(data[: self.budget])
                        self.budget = None
                        return
                    self.budget -= len(data)
                if not (answers and self.deaf):
                    writer.write(data)
                    await writer.drain()
        except OSError:
            pass  # the connection was cut
