"""One WebSocket, by the package websockets."""

from __future__ import annotations

import asyncio
import ssl as ssl_module
from collections import deque
from typing import Any, Protocol

import websockets
from websockets.exceptions import ConnectionClosed, InvalidURI, WebSocketException

# The asyncio client has moved within the package; this name of it stays.
_connect: Any = getattr(websockets, "connect")

#: NATS stores at most 64 MiB in a message, and a frame adds names and headers. The default of the
#: package, 1 MiB, is less than an event may have.
MAX_MESSAGE = 65 * 2**20
#: How long the closing handshake may take.
CLOSE_SECONDS = 1.0
#: Messages that are read ahead. Acknowledgements of so many leave together.
READ_AHEAD = 128


class SocketEvents(Protocol):
    """What a socket tells. Nothing comes after ``ended`` or ``unusable``."""

    def opened(self) -> None: ...

    def text(self, data: str) -> None: ...

    def ended(self, code: int, reason: str) -> None: ...

    def unusable(self, cause: Exception) -> None:
        """The address is malformed."""


class Socket(Protocol):
    """What the connection needs of a socket."""

    def send(self, text: str) -> None: ...

    def drop(self) -> None:
        """Closes the socket. Nothing is told of it any more."""

    async def gone(self) -> None:
        """Waits until a dropped socket is closed."""


class WebSocket:
    """Opens a socket in a task of its own, which reads. A second task writes."""

    def __init__(self, url: str, events: SocketEvents, ssl: ssl_module.SSLContext | None) -> None:
        self._url = url
        self._events = events
        self._ssl = ssl
        self._over = False
        self._open = False
        self._out: deque[str] = deque()
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def send(self, text: str) -> None:
        if self._open and not self._over:
            self._out.append(text)
            self._wake.set()

    def drop(self) -> None:
        self._over = True
        self._task.cancel()

    async def gone(self) -> None:
        # A close that hangs has been told twice to end; the loop ends the task with itself.
        await asyncio.wait([self._task], timeout=10 * CLOSE_SECONDS)

    def _end(self, code: int, reason: str) -> None:
        if not self._over:
            self._over = True
            self._events.ended(code, reason)

    def _refuse(self, cause: Exception) -> None:
        if not self._over:
            self._over = True
            self._events.unusable(cause)

    async def _run(self) -> None:
        # Compression costs more than it saves here. The client asks by itself whether the hub is
        # there, and limits the time of an attempt.
        options: dict[str, Any] = {} if self._ssl is None else {"ssl": self._ssl}
        try:
            ws: Any = await _connect(
                self._url,
                compression=None,
                max_size=MAX_MESSAGE,
                max_queue=READ_AHEAD,
                ping_interval=None,
                open_timeout=None,
                close_timeout=CLOSE_SECONDS,
                **options,
            )
        except InvalidURI as cause:
            self._refuse(cause)
            return
        except (OSError, EOFError, WebSocketException) as cause:  # certificates among them
            self._end(1006, str(cause) or type(cause).__name__)
            return
        except ValueError as cause:  # of websockets and of the resolver, about the address
            self._refuse(cause)
            return
        writer = asyncio.create_task(self._write(ws))
        try:
            if not self._over:
                self._open = True
                self._events.opened()
            while not self._over:
                data = await ws.recv()
                if isinstance(data, str) and not self._over:
                    self._events.text(data)
        except ConnectionClosed as closed:
            rcvd = closed.rcvd
            self._end(rcvd.code if rcvd else 1006, rcvd.reason if rcvd else "the connection broke")
        finally:
            self._open = False
            writer.cancel()
            await self._shut(ws)
            await asyncio.wait([writer])
            self._end(1006, "the connection broke")  # unless it was told

    async def _write(self, ws: Any) -> None:
        try:
            while True:
                while self._out:
                    await ws.send(self._out.popleft())
                self._wake.clear()
                await self._wake.wait()
        except ConnectionClosed:
            pass  # the reader tells of it

    async def _shut(self, ws: Any) -> None:
        try:
            async with asyncio.timeout(2 * CLOSE_SECONDS):
                await ws.close()
        except (OSError, TimeoutError, WebSocketException):
            pass
        finally:
            ws.transport.abort()
            await ws.wait_closed()


def open_socket(url: str, events: SocketEvents, ssl: ssl_module.SSLContext | None) -> Socket:
    return WebSocket(url, events, ssl)
