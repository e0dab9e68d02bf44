"""Sends events and sees to it that each is answered once.

Every event has an id, so that it can be sent again after its connection broke.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from .errors import EventHubError
from .frames import Frame, PublishOptions, check_names, dump_payload, dumps, wire_options
from .ids import new_id_maker

#: The hub skips longer frames.
MAX_FRAME = 4 * 2**20
SWEEP_SECONDS = 0.25

#: These say that nothing was stored, and that a later attempt may succeed.
_not_now = frozenset({"rate_limited", "overloaded"})


class Pending:
    """A publish without an answer."""

    __slots__ = ("corr", "text", "id", "size", "made", "answer", "sent", "sent_steady", "sent_last", "doubt", "retries", "done")

    def __init__(self, corr: int, text: str, event_id: str, size: int, answer: asyncio.Future[str]) -> None:
        self.corr = corr
        self.text = text
        self.id = event_id
        self.size = size
        self.made = time.monotonic()
        self.answer = answer
        #: When the event was first sent, by the clock of the wall; 0 while it was not.
        self.sent = 0.0
        #: The same by a clock that nobody sets.
        self.sent_steady = 0.0
        #: When it was sent last.
        self.sent_last = 0.0
        #: The hub may have stored the event.
        self.doubt = False
        self.retries = 0
        #: Its caller has its answer, or waits no more.
        self.done = False

    def resolve(self, event_id: str) -> None:
        if not self.answer.done():
            self.answer.set_result(event_id)

    def reject(self, error: EventHubError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Publisher:
    def __init__(
        self,
        send: Callable[[str], None],
        corr: Callable[[], int],
        default: Callable[[Any], Any] | None,
        buffer_events: int,
        buffer_bytes: int,
        window: int,
        duplicate_window_ms: float,
        retry_ms: float,
    ) -> None:
        self._send = send
        self._corr = corr
        self._default = default
        self._buffer_events = buffer_events
        self._buffer_bytes = buffer_bytes
        self._window = window
        # Beyond this, the hub may have forgotten the id. A sixth of its window is left for the way.
        self._known_seconds = duplicate_window_ms / 1000 * 5 / 6
        self._retry_seconds = retry_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._id = new_id_maker()
        # Not sent, or to be sent again; by corr.
        self._queue: deque[Pending] = deque()
        # Sent on this connection and not answered, in this order.
        self._sent: dict[int, Pending] = {}
        # In neither of them: these wait for another try.
        self._resting: dict[Pending, asyncio.TimerHandle] = {}
        self._bytes = 0
        self._ready = False
        self._halted: asyncio.TimerHandle | None = None
        self._halts = 0
        self._sweeper: asyncio.TimerHandle | None = None
        self._over: EventHubError | None = None
        self._idle: list[asyncio.Future[None]] = []

    @property
    def pending(self) -> int:
        """How many publishes have no answer yet."""
        return len(self._queue) + len(self._sent) + len(self._resting)

    def start(self, topic: str, payload: object, options: PublishOptions) -> Pending:
        """Sends an event or puts it into the buffer. Its ``answer`` tells what became of it."""
        if self._over is not None:
            raise self._over
        check_names("publish", options, PublishOptions.__annotations__)
        opts = wire_options(options)
        event_id = opts.setdefault("id", None)
        if event_id is None:
            event_id = opts["id"] = self._id()
        corr = self._corr()
        json = dump_payload(payload, self._default)
        text = f'{{"op":"PUBLISH","topic":{dumps(topic)},"payload":{json},"opts":{dumps(opts)},"corr":{corr}}}'
        size = len(text) - len(json) + byte_length(json)  # the rest is ASCII
        # The hub would answer without a corr.
        if size > MAX_FRAME:
            raise EventHubError("publish_failed", f"The event is larger than {MAX_FRAME} bytes.", False)
        if self.pending >= self._buffer_events or self._bytes + size > self._buffer_bytes:
            raise EventHubError("buffer_full", f"{self.pending} events wait for their answers: wait for some, or use publish_many.")
        p = Pending(corr, text, event_id, size, self._loop.create_future())
        self._bytes += size
        if self._ready and not self._queue and self._halted is None and len(self._sent) < self._window:
            self._transmit(p)
        else:
            self._queue.append(p)
        return p

    def abandon(self, p: Pending) -> None:
        """Nobody waits for the answer. An event that was not sent is taken back."""
        p.done = True  # its place is freed by the answer, or when its turn comes
        p.answer.cancel()

    def _transmit(self, p: Pending) -> None:
        now = time.monotonic()
        if p.sent == 0:
            p.sent = time.time()
            p.sent_steady = now
        p.sent_last = now
        self._sent[p.corr] = p
        self._send(p.text)

    # -- answers

    def ok(self, corr: object, event_id: str | None) -> bool:
        """The hub answered. False if the answer belongs to no publish."""
        p = self._sent.pop(corr, None) if isinstance(corr, int) else None
        if p is None:
            return False
        self._halts = 0
        self._settle(p)
        p.resolve(event_id or p.id)
        if self._queue:
            self._pump()
        else:
            self._tell_idle()
        return True

    def err(self, corr: object, frame: Frame) -> bool:
        p = self._sent.pop(corr, None) if isinstance(corr, int) else None
        if p is None:
            return False
        error = EventHubError(frame["code"], frame["msg"], frame.get("retryable"))
        young = time.monotonic() - p.made < self._retry_seconds
        if p.done:
            self._settle(p)
        elif error.code == "unauthorized":
            self._back(p)  # a new token was refused: the connection ends
        elif error.code in _not_now and young:
            self._back(p)
            self._halt()
        elif error.code == "publish_failed":
            self._unconfirmed(p, error, young)
        else:
            self._fail(p, unknown(error) if p.doubt else error)
        self._pump()
        return True

    def _unconfirmed(self, p: Pending, error: EventHubError, young: bool) -> None:
        """The hub refuses the event, or does not know whether it is stored. Repeating the publish tells."""
        p.doubt |= error.retryable
        if not (young and error.retryable):
            self._fail(p, error)
            return
        self._resting[p] = self._loop.call_later(backoff(p.retries), self._again, p)
        p.retries += 1

    def _again(self, p: Pending) -> None:
        del self._resting[p]
        if p.done:
            self._settle(p)
        else:
            self._back(p)
        self._pump()

    def _back(self, p: Pending) -> None:
        """Puts a publish where it belongs in the queue."""
        at = next((i for i, other in enumerate(self._queue) if other.corr > p.corr), len(self._queue))
        self._queue.insert(at, p)

    def _halt(self) -> None:
        if self._halted is None:
            self._halted = self._loop.call_later(backoff(self._halts), self._go_on)
            self._halts += 1

    def _go_on(self) -> None:
        self._halted = None
        self._pump()

    def _pump(self) -> None:
        while self._ready and self._halted is None and self._queue and len(self._sent) < self._window:
            p = self._queue.popleft()
            if p.done:
                self._settle(p)
            elif p.doubt and self._late(p):
                self._fail(p, unknown())
            else:
                self._transmit(p)
        self._sweeping()
        self._tell_idle()

    def _late(self, p: Pending) -> bool:
        """Whether the hub may have forgotten the id."""
        return max(time.time() - p.sent, time.monotonic() - p.sent_steady) > self._known_seconds

    def _sweeping(self) -> None:
        """Rejects what has waited too long. Runs while something waits."""
        if self._queue and self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_SECONDS, self._sweep)
        elif not self._queue and self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    def _sweep(self) -> None:
        self._sweeper = None
        late = [p for p in self._queue if p.done or (p.doubt and self._late(p))]
        if late:
            gone = set(late)
            self._queue = deque(p for p in self._queue if p not in gone)
            for p in late:
                self._fail(p, unknown())
        self._pump()

    # -- the connection

    def resume(self) -> None:
        self._ready = True
        self._pump()

    def suspend(self) -> None:
        """The connection has ended. What was sent on it is in doubt."""
        self._ready = False
        self._end_halt()
        for p in self._sent.values():
            p.doubt = True
        self._queue = deque(sorted([*self._sent.values(), *self._queue], key=lambda p: p.corr))
        self._sent.clear()
        self._sweeping()

    def end(self, error: EventHubError) -> None:
        """Fails everything, now and from now on."""
        self._over = error
        self._ready = False
        self._end_halt()
        for timer in self._resting.values():
            timer.cancel()
        waiting = [*self._sent.values(), *self._resting, *self._queue]
        self._sent.clear()
        self._resting.clear()
        self._queue.clear()
        for p in waiting:
            self._fail(p, unknown(error) if p.doubt or p.sent > 0 else error)
        self._sweeping()
        self._tell_idle()

    def _end_halt(self) -> None:
        if self._halted is not None:
            self._halted.cancel()
            self._halted = None

    def _fail(self, p: Pending, error: EventHubError) -> None:
        self._settle(p)
        p.reject(error)

    def _settle(self, p: Pending) -> None:
        p.done = True
        self._bytes -= p.size

    def _tell_idle(self) -> None:
        if self._idle and self.pending == 0:
            for waiter in self._idle:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle.clear()

    def unanswered(self) -> float:
        """How long the oldest frame on its way has waited, in milliseconds."""
        for p in self._sent.values():
            return (time.monotonic() - p.sent_last) * 1000
        return 0

    async def idle(self) -> None:
        """Returns when nothing waits for an answer."""
        if self.pending > 0:
            waiter = self._loop.create_future()
            self._idle.append(waiter)
            await waiter


def unknown(cause: EventHubError | None = None) -> EventHubError:
    error = EventHubError("outcome_unknown", "The event may or may not be stored: the connection broke before the answer came.")
    return error if cause is None else error.caused_by(cause)


def backoff(n: int) -> float:
    """Returns a pause in seconds."""
    longest: float = min(5.0, 0.1 * 2.0 ** min(n, 10))
    return longest * (0.5 + random.random() / 2)


def byte_length(text: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as cause:
        raise EventHubError("invalid", f"The payload has no form in UTF-8: {cause}").caused_by(cause) from None
