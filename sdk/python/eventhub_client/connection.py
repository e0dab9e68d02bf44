"""Keeps one connection to the hub, as the table in machine.py says."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import ssl as ssl_module
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from . import sockets
from .errors import EventHubError, gives_up
from .frames import Frame, caps, dumps, loads
from .machine import Action, Input, State, step
from .tokens import Tokens, TokenSource, expiry, refresh_delay

log = logging.getLogger("eventhub_client")

#: The hub answers within 15 seconds.
ANSWER_MS = 20_000.0
#: A connection that lasted this long was good: the pauses begin again.
GOOD_MS = 5_000.0
#: A provider whose tokens are refused this often in a row has no better one.
MAX_REFUSALS = 3
_AUTH_CORR = "auth"
_RETRY_AFTER = re.compile(r" retry_after_ms=([0-9]{1,5})$")
_PING_CORR = "ping"
# Has no effect, and is answered at once.
_PING_FRAME = dumps({"op": "UNSUBSCRIBE", "topic": "ping", "group": "ping", "corr": _PING_CORR})


class Owner(Protocol):
    """What a connection reports to the client."""

    def resume(self) -> None: ...

    def suspend(self) -> None: ...

    def ended(self, error: EventHubError) -> None: ...

    def changed(self, state: State, error: EventHubError | None) -> None: ...

    def frame(self, frame: Frame, size: int) -> None: ...

    def unanswered(self) -> float:
        """How long the oldest unanswered frame has waited, in milliseconds."""


class Connection:
    def __init__(
        self,
        owner: Owner,
        url: str,
        token: TokenSource | None,
        ssl: ssl_module.SSLContext | None,
        min_pause_ms: float,
        max_pause_ms: float,
        attempt_timeout_ms: float,
        ping_ms: float,
    ) -> None:
        self.state: State = "idle"
        self._owner = owner
        self._url = url
        self._tokens = Tokens(token)
        self._ssl = ssl
        self._min_pause_ms = min_pause_ms
        self._max_pause_ms = max_pause_ms
        self._attempt_timeout_ms = attempt_timeout_ms
        self._ping_ms = ping_ms
        self._loop = asyncio.get_running_loop()
        self._socket: sockets.Socket | None = None
        #: The attempt whose socket is heard; 0 for none.
        self.dialled = 0
        self._token = ""
        # Counts connections and attempts. What belongs to an earlier one is not acted upon.
        self._epoch = 0
        self._failures = 0
        self._rest_ms = 0  # how long the hub that ended asks to wait
        self._refusals = 0
        self._error: EventHubError | None = None
        self._ready_since = 0.0
        self._heard = False
        self._pinged = False
        self._timers: dict[str, asyncio.TimerHandle] = {}
        # Questions for tokens, and sockets that close.
        self._questions: set[asyncio.Task[None]] = set()
        self._goners: set[asyncio.Task[None]] = set()
        self._actions: dict[Action, Callable[[], None]] = {
            "fetch": self._fetch,
            "dial": self._dial,
            "auth": self._auth,
            "resume": self._resume,
            "suspend": self._suspend,
            "drop": self._drop,
            "pause": self._pause,
            "end": self._end,
        }

    def send(self, text: str) -> None:
        """Sends a frame, if the socket is open."""
        if self._socket is not None:
            self._socket.send(text)

    def start(self) -> None:
        self._input("start")

    def close(self) -> None:
        self._error = EventHubError("closed", "The client is closed.")
        self._input("close")

    async def wait_closed(self) -> None:
        """Waits for the tasks of a closed connection."""
        await self._tokens.close()
        for task in self._questions:
            task.cancel()  # of a provider that does not hear
        while tasks := self._questions | self._goners:
            await asyncio.wait(tasks)

    def _spawn(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = self._loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _timer(self, name: str, ms: float, run: Callable[[], None]) -> None:
        self._cancel(name)
        self._timers[name] = self._loop.call_later(ms / 1000, run)

    def _cancel(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _cancel_all(self) -> None:
        for name in list(self._timers):
            self._cancel(name)

    def _input(self, given: Input) -> None:
        transition = step(self.state, given)
        if transition is None:
            return
        self._epoch += 1
        self.state, actions = transition
        state = self.state
        for action in actions:
            self._actions[action]()
        self._owner.changed(state, self._error)

    def _lost(self, error: EventHubError) -> None:
        self._error = error
        self._input("lost")

    def _refused(self, error: EventHubError) -> None:
        self._error = error
        self._input("refused")

    # -- actions

    def _fetch(self) -> None:
        self._spawn(self._ask(self._epoch), self._questions)

    async def _ask(self, epoch: int) -> None:
        try:
            token = await self._tokens.ask()
        except Exception as cause:  # whatever the provider raises
            if self._epoch == epoch:
                error = EventHubError("connection_lost", f"The token provider failed: {cause}", True)
                self._lost(error.caused_by(cause))
            return
        if self._epoch == epoch:
            self._token = token
            self._input("token")

    def _dial(self) -> None:
        late = EventHubError("connect_timeout", "The hub did not answer in time.")
        self._timer("attempt", self._attempt_timeout_ms, lambda: self._lost(late))
        self.dialled = self._epoch
        self._socket = sockets.open_socket(self._url, _Heard(self, self._epoch), self._ssl)

    def _auth(self) -> None:
        self.send(dumps({"op": "AUTH", "token": self._token, "caps": caps, "corr": _AUTH_CORR}))

    def _resume(self) -> None:
        self._cancel("attempt")
        self._ready_since = self._loop.time()
        self._refusals = 0
        self._error = None
        self._plan_refresh(0)
        self._watch()
        self._owner.resume()

    def _suspend(self) -> None:
        if (self._loop.time() - self._ready_since) * 1000 >= GOOD_MS:
            self._failures = 0
        self._owner.suspend()

    def _drop(self) -> None:
        self._cancel_all()
        self.dialled = 0
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.drop()
            self._spawn(socket.gone(), self._goners)

    def _pause(self) -> None:
        pause = min(self._max_pause_ms, self._min_pause_ms * 2 ** min(self._failures, 30))
        self._failures += 1
        # Clients of a hub that died do not all come at once.
        rest, self._rest_ms = self._rest_ms, 0
        self._timer("pause", rest + pause * (0.5 + random.random() / 2), lambda: self._input("wake"))

    def _end(self) -> None:
        self._cancel_all()
        self._owner.ended(self._error or EventHubError("closed", "The client is closed."))

    # -- news of the socket

    def heard_end(self, code: int, reason: str) -> None:
        text = f"The connection ended: {code} {reason}".rstrip() + "."
        if gives_up(code):
            self._refused(EventHubError("gave_up", text))
        else:
            asked = _RETRY_AFTER.search(reason)
            self._rest_ms = min(int(asked[1]), 60_000) if asked else 0
            self._lost(EventHubError("connection_lost", text))

    def heard_unusable(self, cause: Exception) -> None:
        self._refused(EventHubError("gave_up", f"The address is not usable: {cause}").caused_by(cause))

    def heard_open(self) -> None:
        self._input("open")

    def heard(self, data: str) -> None:
        self._heard = True
        try:
            frame = loads(data)
        except json.JSONDecodeError:
            return  # the hub sends JSON only
        except RecursionError:
            # The lease of such an event runs out, and it becomes a dead letter.
            log.error("cannot read a frame that is nested too deeply for Python: %.200s", data)
            return
        if not isinstance(frame, dict):
            return
        op = frame.get("op")
        if op != "EVENT":
            corr = frame.get("corr")
            if corr == _AUTH_CORR:
                self._auth_answer(None if op == "OK" else EventHubError(frame["code"], frame["msg"], frame.get("retryable")))
                return
            if corr == _PING_CORR:
                return
        self._owner.frame(frame, len(data))

    def _auth_answer(self, error: EventHubError | None) -> None:
        if error is None:
            if self.state == "ready":
                self._refusals = 0
                self._plan_refresh(0)
            else:
                self._input("accepted")
            return
        # A hub that is at its limits may take the token later. Another token may be better.
        hopeful = error.retryable
        if not hopeful and self._tokens.changes:
            self._refusals += 1
            hopeful = self._refusals < MAX_REFUSALS
        if hopeful:
            self._lost(error)
        else:
            self._refused(error)

    def _plan_refresh(self, at_least_ms: float) -> None:
        """Replaces the token before it expires.

        A fresh token that comes when its connection has gone is not used.
        """
        self._cancel("refresh")
        expires = expiry(self._token)
        if expires is None or not self._tokens.changes:
            return
        epoch = self._epoch
        delay_ms = refresh_delay(expires, time.time()) * 1000
        self._timer("refresh", max(at_least_ms, delay_ms), lambda: self._spawn(self._refresh(epoch), self._questions))

    async def _refresh(self, epoch: int) -> None:
        try:
            token = await self._tokens.ask()
        except Exception as cause:  # the hub says when the old token has expired
            log.warning("the token provider failed; asking again: %s", cause)
            token = self._token
        if self._epoch != epoch or self.state != "ready":
            return
        if token == self._token:
            self._plan_refresh(1_000)
            return
        self._token = token
        self._auth()

    def _watch(self) -> None:
        """Notices a connection that is dead without having ended."""
        self._heard = self._pinged = False
        last = self._loop.time()

        def look() -> None:
            nonlocal last
            now = self._loop.time()
            # A process that was stopped, or computed, has to listen first.
            late = (now - last) * 1000 > 2 * self._ping_ms
            last = now
            silent = self._pinged and not self._heard
            if not late and (silent or self._owner.unanswered() > ANSWER_MS):
                self._lost(EventHubError("connection_lost", "The hub does not answer."))
                return
            self._pinged = not self._heard
            if self._pinged:
                self.send(_PING_FRAME)
            self._heard = False
            self._timer("watch", self._ping_ms, look)

        self._timer("watch", self._ping_ms, look)


class _Heard:
    """Passes on what a socket tells, while it is the connection's own."""

    def __init__(self, connection: Connection, epoch: int) -> None:
        self._connection = connection
        self._attempt = epoch

    def _mine(self) -> bool:
        return self._connection.dialled == self._attempt

    def opened(self) -> None:
        if self._mine():
            self._connection.heard_open()

    def text(self, data: str) -> None:
        if self._mine():
            self._connection.heard(data)

    def ended(self, code: int, reason: str) -> None:
        if self._mine():
            self._connection.heard_end(code, reason)

    def unusable(self, cause: Exception) -> None:
        if self._mine():
            self._connection.heard_unusable(cause)
