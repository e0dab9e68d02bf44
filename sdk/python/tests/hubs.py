"""Real hubs for the tests, and what tests of the client share."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import inspect
import json
import os
import subprocess
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from eventhub_client import Client, Event, EventHubError, HttpHub, connect, replay

SECRET = "a secret of more than thirty-two bytes"
#: Pauses that are too short to wait for.
FAST: Any = {"min_pause_ms": 5, "max_pause_ms": 20}


@dataclass
class Hub:
    websocket: str
    http: str
    ops: str
    token: str

    @property
    def reads(self) -> HttpHub:
        return HttpHub(self.http, self.token)

    def open(self, **options: Any) -> Any:
        return connect(self.websocket, **{"token": self.token, **options})

    async def stored(self, topic: str) -> list[Event[Any]]:
        return [event async for event in replay(self.reads, topic)]

    async def request(self, method: str, path: str, body: object = None) -> Any:
        """Asks the operations port."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.ops + path, data, {"Authorization": f"Bearer {self.token}"}, method=method)

        def answer() -> Any:
            with urllib.request.urlopen(request, timeout=30) as response:
                text = response.read()
            return json.loads(text) if text else None

        return await asyncio.to_thread(answer)

    async def unsettled(self, topic: str, group: str) -> int:
        """How many events of a group are not settled."""
        figures = await self.request("GET", f"/groups/{topic}/{quote(group)}")
        return int(figures["pending"] + figures["inflight"])

    async def settled(self, topic: str, group: str, left: int = 0) -> None:
        """Waits until a group has settled all events but some.

        An event that was just published may not be in the figures yet: wait for its handler first.
        """

        async def as_many() -> bool:
            return await self.unsettled(topic, group) == left

        await eventually(f"all but {left} events of {group} are settled", as_many)


@contextlib.contextmanager
def start_hub(env: Mapping[str, str]) -> Iterator[Hub]:
    """A hub in memory on free ports. It ends with this process, however that comes about."""
    process = subprocess.Popen(
        [os.environ["EVENTHUB"], "serve", "--ephemeral", "--log-level=error"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "EVENTHUB_LIMIT_NEW_TOPICS": "10000", **env},
    )
    with process:  # closes its input, and waits for it
        assert process.stdout is not None
        at = json.loads(process.stdout.readline())
        yield Hub(at["websocket"], at["http"], at["ops"], at["token"])


class DurableHub:
    """A hub with a directory, which can be killed and started again on the same ports."""

    def __init__(self, directory: object) -> None:
        self._directory = directory
        self._ports = [0, 0, 0]
        self._process: asyncio.subprocess.Process | None = None
        self.token = "a token of at least sixteen bytes"
        self.websocket = self.http = ""

    async def __aenter__(self) -> DurableHub:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end(lambda process: process.terminate())

    async def start(self) -> None:
        ws, http, ops = self._ports
        self._process = await asyncio.create_subprocess_exec(
            os.environ["EVENTHUB"],
            "serve",
            f"--data={self._directory}/data",
            "--log-level=error",
            f"--ws-port={ws}",
            f"--http-port={http}",
            f"--ops-port={ops}",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, "WS_TOKEN": self.token, "EVENTHUB_LIMIT_NEW_TOPICS": "10000"},
        )
        assert self._process.stdout is not None
        at: dict[str, str] = {}
        while "token" not in at:
            line = (await self._process.stdout.readline()).decode()
            assert line, f"the hub ended with {await self._process.wait()}"
            name, _, value = line.strip().partition(" ")
            at[name] = value.strip()
        self.websocket, self.http = at["websocket"], at["http"]
        self._ports = [urlsplit(at[name]).port or 0 for name in ("websocket", "http", "ops")]

    async def kill(self) -> None:
        await self._end(lambda process: process.kill())

    async def _end(self, how: Callable[[asyncio.subprocess.Process], None]) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                how(process)
            await process.communicate()


def new_topic() -> str:
    """A topic that no other test uses."""
    return f"t.{uuid.uuid4()}"


async def eventually(what: str, condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)


def jwt(scopes: list[str], seconds: float = 3600, **more: object) -> str:
    """A JWT of these scopes that lives for some seconds."""

    def part(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    now = int(time.time())
    claims = {"sub": "tester", "iat": now, "exp": now + seconds, "scopes": scopes, **more}
    body = ".".join(part(json.dumps(value).encode()) for value in ({"alg": "HS256", "typ": "JWT"}, claims))
    return f"{body}.{part(hmac.new(SECRET.encode(), body.encode(), hashlib.sha256).digest())}"


@contextlib.contextmanager
def fails(code: str, retryable: bool | None = None) -> Iterator[pytest.ExceptionInfo[EventHubError]]:
    """The block raises an EventHubError with this code."""
    with pytest.raises(EventHubError) as raised:
        yield raised
    assert raised.value.code == code, raised.value
    if retryable is not None:
        assert raised.value.retryable is retryable


@contextlib.asynccontextmanager
async def closing(client: Client) -> AsyncIterator[Client]:
    """Gives a client up at the end."""
    try:
        yield client
    finally:
        await client.close(0)
