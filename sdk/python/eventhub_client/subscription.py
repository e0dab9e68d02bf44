"""A member of a group."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, TypeVar

from .delivery import Delivery
from .errors import EventHubError
from .frames import Event, Frame, HubSubscribeOptions, check_names, dumps, wire_options

T = TypeVar("T")

#: Handles an event. A coroutine that it returns is awaited. A plain function runs in the event
#: loop, so one that blocks belongs into ``asyncio.to_thread``.
Handler = Callable[[Delivery[T]], Awaitable[object] | object]


class SubscribeOptions(HubSubscribeOptions, total=False):
    """Options of ``subscribe``."""

    #: "auto", the default, acknowledges when the handler is done, and refuses the event if it
    #: raises.
    ack: Literal["auto", "manual"]
    #: The most handlers that run at a time. Defaults to max_in_flight.
    concurrency: int | None
    #: For how long the lease of an event is prolonged while its handler runs or is to run. Defaults
    #: to 600,000.
    max_lease_ms: float
    #: Called with the topic, all slots and the epoch when the slots of a member of an ordered group
    #: change: before the first event of a new slot, and after the last lease of a lost one. It must
    #: not block.
    on_assign: Callable[[str, Sequence[int], int], object] | None


#: Called once when a frame is answered, with an error if it was refused or the connection ended.
Done = Callable[[EventHubError | None], None]


class Hub(Protocol):
    """What a subscription needs of its client."""

    @property
    def connected(self) -> bool: ...

    def call(self, frame: str, done: Done) -> None:
        """Sends a frame."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a task that the client waits for when it is closed."""

    def remove(self, subscription: Subscription[Any]) -> None: ...

    def report(self, error: EventHubError) -> None: ...


#: So many acknowledgements leave without waiting for more.
ACK_BATCH = 128
#: Events that were handled, and whose acknowledgement may not have arrived.
MAX_HANDLED = 20_000
MAX_REASON = 300
MAX_RETRIES = 30


class Subscription(Generic[T]):
    """A member of a group. It stays one over reconnects, until it is ended.

    As a context manager, it drains at the end of the block.
    """

    def __init__(self, hub: Hub, topic: str, group: str, handler: Handler[T], options: SubscribeOptions) -> None:
        check_names("subscribe", options, SubscribeOptions.__annotations__)
        own: dict[str, Any] = dict(options)
        ack = own.pop("ack", "auto")
        concurrency = own.pop("concurrency", None)
        max_lease_ms = own.pop("max_lease_ms", 600_000)
        self._on_assign = own.pop("on_assign", None)
        if ack not in ("auto", "manual"):
            raise EventHubError("bad_options", 'ack must be "auto" or "manual"')
        if concurrency is not None and not (isinstance(concurrency, int) and concurrency >= 1):
            raise EventHubError("bad_options", "concurrency must be a positive integer")
        if own.get("max_in_flight") is None and concurrency is not None:
            own["max_in_flight"] = min(10_000, max(2 * concurrency, 16))
        self.topic = topic
        self.group = group
        self._hub = hub
        self._handler = handler
        self._manual = ack == "manual"
        self._concurrency: float = concurrency or math.inf
        self._max_lease = max_lease_ms / 1000
        lease_ms = own.get("ack_timeout_ms")
        self._lease_ms = lease_ms if isinstance(lease_ms, int) else 30_000
        self._opts = dumps(wire_options(own))
        self._names = f'"topic":{dumps(topic)},"group":{dumps(group)}'
        self._topics = (topic, *(own.get("topics") or ()))
        self._many = len(self._topics) > 1
        self._loop = asyncio.get_running_loop()
        self._closed: asyncio.Future[EventHubError | None] = self._loop.create_future()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        # Counts connections: a delivery of an earlier one has lost its lease.
        self._connection = 0
        # The hub has accepted the subscription on this connection. What comes before was meant for
        # an earlier subscription of the same name, and has been given back by its end.
        self._live = False
        self._ended = False
        self._draining = False
        self._paused = False
        self._retries = 0
        self._running = 0
        # The tasks of handlers.
        self._tasks: set[asyncio.Task[None]] = set()
        # Wait for a handler.
        self._queue: deque[Delivery[T]] = deque()
        # Wait, are handled, or wait for the user to settle them.
        self._held: dict[str, Delivery[T]] = {}
        self._acks: list[Delivery[T]] = []
        self._ack_calls = 0
        # Handled, but the hub may not know: by key, with the attempt.
        self._handled: dict[str, int] = {}
        self._keeper: asyncio.TimerHandle | None = None
        self._quiet: list[asyncio.Future[None]] = []
        if hub.connected:
            self._connected()

    def __repr__(self) -> str:
        return f"<Subscription {self.topic}::{self.group}>"

    # -- for the user

    @property
    def active(self) -> int:
        """How many handlers run, or are to run."""
        return self._running + len(self._queue)

    async def wait_closed(self) -> EventHubError | None:
        """Returns when the subscription has ended, with the error if the hub ended it."""
        return await asyncio.shield(self._closed)

    async def pause(self) -> None:
        """Stops deliveries to this member until resume. Handlers that run go on."""
        self._paused = True
        await self._ask("PAUSE")

    async def resume(self) -> None:
        """Starts deliveries again."""
        self._paused = False
        self._next()
        await self._ask("RESUME")

    async def unsubscribe(self) -> None:
        """Leaves the group at once. Events that are not settled go to other members."""
        if not self._ended:
            await self._leave()

    async def drain(self, timeout_ms: float = 10_000) -> None:
        """Takes no more events, lets the handlers finish, and leaves the group.

        A handler must not wait for its own end: it may call ``unsubscribe`` instead.
        """
        if asyncio.current_task() in self._tasks:
            raise RuntimeError("a handler cannot wait for the end of itself: drain and close need a task of their own")
        if self._ended:
            return
        self._draining = True
        for d in self._queue:
            self._held.pop(self._key(d.event), None)
        self._queue.clear()
        paused = self._ask("PAUSE")
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._settled()
        except TimeoutError:
            pass
        finally:
            paused.cancel()
            left = self._leave()
        await left

    async def __aenter__(self) -> Subscription[T]:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.drain()

    # -- the connection

    async def _open(self) -> None:
        """Waits until the hub has accepted the subscription. Leaves if the caller is cancelled."""
        try:
            await asyncio.shield(self._opened)
        except asyncio.CancelledError:
            if not self._ended:
                self._leave()
            raise

    def _connected(self) -> None:
        """Subscribes on a new connection."""
        if self._ended:
            return
        connection = self._connection

        def answered(error: EventHubError | None) -> None:
            # The next connection repeats it.
            if self._ended or connection != self._connection or (error and error.code == "connection_lost"):
                return
            if error is None:
                self._live = True
                self._retries = 0
                _tell(self._opened)
            elif error.retryable and self._retries < MAX_RETRIES:
                pause = min(10.0, 0.2 * 2**self._retries) * (0.5 + random.random() / 2)
                self._retries += 1
                self._loop.call_later(pause, again)
            elif error.code != "unauthorized":
                self._end(error)

        def again() -> None:
            if connection == self._connection and self._hub.connected:
                self._connected()

        self._call("SUBSCRIBE", f',"opts":{self._opts}', answered)
        if self._paused or self._draining:
            self._call("PAUSE", "", _ignore)

    def _disconnected(self) -> None:
        """The connection has ended, and all leases with it."""
        self._connection += 1
        self._live = False
        for d in self._acks:
            self._remember(d)
        self._acks = []
        for d in self._queue:
            self._held.pop(self._key(d.event), None)
        self._queue.clear()
        for key, d in list(self._held.items()):
            d._lose()
            d._again = None
            if self._manual and d._until == 0:
                del self._held[key]  # its handler is done
        self._keep()
        self._tell_quiet()

    def _end(self, error: EventHubError | None = None) -> None:
        """Ends the subscription in this client."""
        if self._ended:
            return
        self._disconnected()
        self._ended = True
        for d in self._held.values():
            d._lose()
        self._held.clear()  # handlers that run go on, and settle nothing
        self._keep()
        self._hub.remove(self)
        if not self._opened.done():
            self._opened.set_exception(error or EventHubError("aborted", "The subscription was ended."))
            self._opened.exception()  # whoever waits for it is told
        _tell(self._closed, error)
        self._tell_quiet()
        if error is not None:
            self._hub.report(error)

    def _told(self, frame: Frame) -> None:
        """An error about this subscription that answers no frame."""
        self._end(EventHubError(frame["code"], frame["msg"], frame.get("retryable")))

    def _call(self, op: str, rest: str, done: Done) -> None:
        self._hub.call(f'"op":"{op}",{self._names}{rest}', done)

    def _ask(self, op: str) -> asyncio.Future[None]:
        """A frame whose effect a new connection has anyway."""
        asked: asyncio.Future[None] = self._loop.create_future()

        def answered(error: EventHubError | None) -> None:
            if error is None or error.code in ("connection_lost", "not_subscribed", "closed"):
                _tell(asked)
            elif not asked.done():
                asked.set_exception(error)

        asked.add_done_callback(lambda f: f.cancelled() or f.exception())  # not all wait for it
        if self._hub.connected and not self._ended:
            self._call(op, "", answered)
        else:
            asked.set_result(None)
        return asked

    def _leave(self) -> asyncio.Future[None]:
        self._draining = True
        self._flush()
        left = self._ask("UNSUBSCRIBE")
        self._end()
        return left

    # -- deliveries

    def _key(self, event: Event[Any]) -> str:
        return f"{event.topic}/{event.id}" if self._many else event.id

    def _assigned(self, frame: Frame) -> None:
        if self._on_assign is not None and frame["topic"] in self._topics:
            try:
                self._on_assign(frame["topic"], frame["slots"], frame["epoch"])
            except Exception as cause:
                self._loop.call_exception_handler({"message": "on_assign failed", "exception": cause})

    def _deliver(self, frame: Frame) -> None:
        if self._draining or self._ended or not self._live:
            return  # UNSUBSCRIBE gives the event back
        ctx = frame["ctx"]
        d: Delivery[T] = Delivery(self, Event.from_record(frame["event"]), ctx["attempt"], ctx["ack_deadline_ms"])
        if self._held or self._handled:
            key = self._key(d.event)
            held = self._held.get(key)
            if held is not None and held._until == 0:
                held._lose()  # its handler is done, and nobody settled it in time
                del self._held[key]
            elif held is not None:
                # Its handler still runs, and is not started beside itself: what becomes of it
                # settles this delivery, too.
                if not held._lost:
                    held._lose()
                held._again = d
                return
            handled = self._handled.pop(key, None)
            if handled is not None and d.attempt > handled:
                self._ack_now(d)  # the acknowledgement was lost with its connection
                return
        if self._paused or self._queue or self._running >= self._concurrency:
            self._queue.append(d)
            self._hold(d)
        else:
            self._run(d)

    def _run(self, d: Delivery[T]) -> None:
        try:
            result = self._handler(d)
        except Exception as error:  # whatever the handler raises
            self._finished(d, error)
            return
        if not inspect.isawaitable(result):
            self._finished(d, None)
            return
        self._running += 1
        self._hold(d)
        task = self._hub.spawn(self._await(d, result))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _await(self, d: Delivery[T], result: Awaitable[object]) -> None:
        failure: BaseException | None = None
        try:
            await result
        except asyncio.CancelledError as error:
            failure = error
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        except Exception as error:  # whatever the handler raises
            failure = error
        finally:
            self._running -= 1
            self._finished(d, failure)
            self._next()
            self._tell_quiet()

    def _next(self) -> None:
        while not self._paused and self._queue and self._running < self._concurrency:
            self._run(self._queue.popleft())

    def _finished(self, d: Delivery[T], error: BaseException | None) -> None:
        d._until = 0  # the lease is prolonged no more
        if d._settled:
            self._let_go(d)
        elif error is not None:
            self.nack(d, _reason(error), None)
        elif not self._manual:
            self.ack(d)
        elif d._lost or self._ended:
            self._let_go(d)
        else:
            self._held[self._key(d.event)] = d  # until the user settles it

    def _hold(self, d: Delivery[T]) -> None:
        """A delivery is held while its handler is to run or runs."""
        now = self._loop.time()
        d._due = now + d.ack_deadline_ms / 2000
        d._until = now + self._max_lease
        self._held[self._key(d.event)] = d
        self._keep()

    def _let_go(self, d: Delivery[T]) -> None:
        """Forgets a delivery that is over. What came meanwhile shares its fate."""
        key = self._key(d.event)
        if self._held.get(key) is not d:
            return
        del self._held[key]
        self._keep()
        self._tell_quiet()

    def _keep(self) -> None:
        if not self._held:
            if self._keeper is not None:
                self._keeper.cancel()
                self._keeper = None
        elif self._keeper is None:
            self._keeper = self._loop.call_later(max(0.1, min(5.0, self._lease_ms / 5000)), self._prolong)

    def _prolong(self) -> None:
        self._keeper = None
        now = self._loop.time()
        for held in list(self._held.values()):
            d = held._again if held._lost else held  # the lease that counts
            if d is not None and held._due <= now < held._until:
                held._due = now + self._lease_ms / 2000
                self._extend(d, self._lease_ms, held)
        self._keep()

    def _extend(self, d: Delivery[T], ms: int, held: Delivery[T]) -> None:
        def answered(error: EventHubError | None) -> None:
            if error is None or error.code != "unknown_id" or d._settled:
                return
            d._lose()
            if held is not d:
                held._again = None

        self._call("MODACK", f',"id":{dumps(d.event.id)},"extend_ms":{dumps(ms)}', answered)

    # -- settling

    def ack(self, d: Delivery[T]) -> bool:
        if d._settled:
            return False
        d._settled = True
        again = d._again
        self._let_go(d)
        if not d._lost:
            self._ack_now(d)
        elif again is not None:
            self._ack_now(again)
        elif not self._ended:
            self._remember(d)  # it comes again, and is acknowledged then
        return not d._lost or again is not None

    def nack(self, d: Delivery[T], reason: str, delay_ms: int | None) -> bool:
        if d._settled:
            return False
        d._settled = True
        current = d._again if d._lost else d
        self._let_go(d)
        if current is None:
            return False
        current._settled = True
        delay = "" if delay_ms is None else f',"delay_ms":{dumps(delay_ms)}'
        self._call("NACK", f',"id":{dumps(d.event.id)},"reason":{dumps(str(reason)[:MAX_REASON])}{delay}', _ignore)
        return True

    def extend(self, d: Delivery[T], ms: int) -> bool:
        if d._settled or d._lost:
            return False
        d._due = self._loop.time() + ms / 2000
        self._extend(d, ms, d)
        return True

    def _ack_now(self, d: Delivery[T]) -> None:
        d._settled = True
        self._acks.append(d)
        if len(self._acks) >= ACK_BATCH:
            self._flush()
        elif len(self._acks) == 1:
            self._loop.call_soon(self._flush)  # when the frames at hand have been read

    def _flush(self) -> None:
        acks = self._acks
        if not acks:
            return
        self._acks = []
        ids = f'"id":{dumps(acks[0].event.id)}' if len(acks) == 1 else f'"ids":{dumps([d.event.id for d in acks])}'
        self._ack_calls += 1

        def answered(error: EventHubError | None) -> None:
            self._ack_calls -= 1
            if error is not None and not self._ended:
                for d in acks:
                    self._remember(d)
            self._tell_quiet()

        self._call("ACK", f",{ids}", answered)

    def _remember(self, d: Delivery[T]) -> None:
        """The event was handled, and may come again because the hub does not know."""
        if len(self._handled) >= MAX_HANDLED:
            del self._handled[next(iter(self._handled))]
        self._handled[self._key(d.event)] = d.attempt

    async def _settled(self) -> None:
        quiet: asyncio.Future[None] = self._loop.create_future()
        self._quiet.append(quiet)
        self._flush()
        self._tell_quiet()
        await quiet

    def _tell_quiet(self) -> None:
        if self._quiet and not self._held and self._ack_calls == 0 and not self._acks:
            for quiet in self._quiet:
                _tell(quiet)
            self._quiet = []


def _tell(future: asyncio.Future[Any], value: object = None) -> None:
    if not future.done():
        future.set_result(value)


def _ignore(error: EventHubError | None) -> None:
    """The next connection, or the end of the lease, has the same effect."""


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
