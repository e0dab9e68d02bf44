"""Reads over HTTP: the latest record of a key, all keys, and stored events."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl as ssl_module
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote, urlencode, urlsplit

from .errors import EventHubError
from .frames import Event, loads
from .tokens import Tokens, TokenSource


@dataclass(frozen=True)
class HttpHub:
    """Where the hub's HTTP is."""

    #: Such as http://127.0.0.1:8081.
    http: str
    token: TokenSource | None = None
    #: For https. Defaults to that of Python, which checks certificates.
    ssl: ssl_module.SSLContext | None = None
    #: How long the hub may be silent in an answer.
    timeout_ms: float = 30_000


async def latest(hub: HttpHub, topic: str, key: str) -> Event[Any] | None:
    """Returns the latest record of a key of a compacted topic, or None.

    It sees every publish that was answered.
    """
    try:
        record = await _get(hub, f"/snap/{quote(topic, safe='')}/{quote(key)}", {})
    except EventHubError as error:
        if error.code == "not_found":
            return None
        raise
    return Event.from_record(record)


async def snapshot(hub: HttpHub, topic: str, *, page: int = 1_000) -> AsyncIterator[Event[Any]]:
    """Yields the latest records of all keys of a compacted topic.

    Each key that exists throughout comes once.
    """
    following: str | None = ""
    while following is not None:
        answer = await _get(hub, f"/snap/{quote(topic, safe='')}", {"next": following, "limit": page})
        for record in answer["items"]:
            yield Event.from_record(record)
        following = answer.get("next")


async def replay(
    hub: HttpHub,
    topic: str,
    *,
    from_: Literal["earliest", "ts", "afterId"] = "earliest",
    ts: int | None = None,
    after_id: str | None = None,
    key: str | None = None,
    header: str | Sequence[str] | None = None,
    limit: int | None = None,
    page: int = 1_000,
    on_truncated: Callable[[str | None], None] | None = None,
) -> AsyncIterator[Event[Any]]:
    """Yields the stored events of a topic, in their order and without a group.

    ``header`` is NAME:VALUE, or several of them: only events with these headers. ``limit`` is the
    most events, and defaults to all. No more than a ``page`` of events is in memory.
    ``on_truncated`` is told when retention may have removed events from the beginning of the range.
    """
    start: dict[str, Any] = {"from": from_, "ts": ts, "afterId": after_id}
    left = limit
    while left is None or left > 0:
        wanted = page if left is None else min(left, page)
        answer = await _get(hub, "/replay", {"topic": topic, **start, "key": key, "header": header, "limit": wanted})
        if answer.get("truncated") and on_truncated is not None:
            on_truncated(answer.get("first"))
        events = answer["events"]
        for record in events:
            yield Event.from_record(record)
        if len(events) < wanted:
            return
        if left is not None:
            left -= len(events)
        start = {"from": "afterId", "afterId": events[-1]["id"]}


async def _get(hub: HttpHub, path: str, query: Mapping[str, Any]) -> Any:
    address = urlsplit(hub.http)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise EventHubError("bad_options", f"{hub.http!r} is not an address of HTTP, such as http://127.0.0.1:8081.")
    given = urlencode({name: value for name, value in query.items() if value is not None}, doseq=True)
    target = address.path.rstrip("/") + path + (f"?{given}" if given else "")
    token = await Tokens(hub.token).ask()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    seconds = hub.timeout_ms / 1000
    connection: http.client.HTTPConnection
    if address.scheme == "https":
        connection = http.client.HTTPSConnection(address.hostname, address.port, timeout=seconds, context=hub.ssl)
    else:
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=seconds)
    unwanted = threading.Event()
    try:
        status, answer = await asyncio.to_thread(_exchange, connection, target, headers, unwanted)
    except TimeoutError as cause:
        raise EventHubError("connect_timeout", "The hub did not answer in time.").caused_by(cause) from None
    except (OSError, http.client.HTTPException) as cause:
        raise EventHubError("connection_lost", f"The request failed: {cause}").caused_by(cause) from None
    except asyncio.CancelledError:
        # Ends the thread: either it sees the event when it has connected, or it has a socket now.
        unwanted.set()
        sock = connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):  # the thread was quicker
                sock.shutdown(socket.SHUT_RDWR)
        raise
    if status == 200:
        return answer
    known = answer if isinstance(answer, dict) else {}
    code = known.get("code") or ("not_found" if status == 404 else "internal")
    raise EventHubError(code, known.get("error") or f"The hub answered {status}.")


def _exchange(connection: http.client.HTTPConnection, target: str, headers: Mapping[str, str], unwanted: threading.Event) -> tuple[int, Any]:
    """Makes a request. Runs in a thread, where reading the JSON holds up nobody."""
    try:
        connection.connect()
        if unwanted.is_set():
            raise ConnectionAbortedError
        connection.request("GET", target, headers=dict(headers))
        response = connection.getresponse()
        body = response.read()
        try:
            return response.status, loads(body)
        except (ValueError, RecursionError) as cause:
            if response.status == 200:
                raise http.client.HTTPException(f"the answer cannot be read: {cause}") from cause
            return response.status, None
    finally:
        connection.close()
