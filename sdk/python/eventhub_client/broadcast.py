"""Every event of a topic, without a group; and the latest value of each key."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, TypedDict, TypeVar

from .errors import EventHubError
from .frames import Event, Frame, check_names, dumps, wire_options
from .subscription import MAX_RETRIES, Done

T = TypeVar("T")

#: The most bytes of the events of a snapshot that wait for the handler.
MAX_SNAPSHOT_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class BroadcastEvent(Generic[T]):
    """An event of a broadcast."""

    event: Event[T]
    #: The place of the event, for the option ``pos``.
    pos: str
    #: The event is of the snapshot. ``pos`` is no place to go on from then.
    snapshot: bool = False
    #: The event removes its key.
    tombstone: bool = False


@dataclass(frozen=True, slots=True)
class Gap:
    """Events that were left out, between two places."""

    from_pos: str
    to_pos: str
    #: How many; 0 when nobody can tell.
    missed: int


@dataclass(frozen=True, slots=True)
class Reset:
    """A broadcast does not go on where it was.

    After ``truncated`` and ``too_far``, a Gap may follow. For the others nobody knows which events
    were missed. ``snapshot``: the connection broke within a snapshot, which begins again. ``gap``:
    a watch left out changes, and takes a new snapshot.
    """

    reason: str
    #: Where the broadcast goes on; None at a snapshot.
    pos: str | None = None


@dataclass(frozen=True, slots=True)
class Presence:
    """How many names are present at a topic, and at most 100 that have come and left."""

    count: int
    joined: Sequence[str]
    left: Sequence[str]


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """A key of a watched topic that has a new value, or was removed."""

    key: str
    #: The newest value; None if the key was removed.
    value: T | None
    deleted: bool
    #: The event; None when the key was found to be gone, after changes were missed.
    event: Event[T] | None


BroadcastHandler = Callable[[BroadcastEvent[T]], Awaitable[object] | object]
WatchHandler = Callable[[Change[T]], Awaitable[object] | object]


class BroadcastOptions(TypedDict, total=False):
    """Options of ``broadcast``. ``history``, ``snapshot`` and ``from_`` exclude one another."""

    #: So many events from before come first, at most 1,000.
    history: int | None
    #: The newest event of each key comes first. The topic must be compacted.
    snapshot: bool | None
    #: Where to begin. Defaults to latest.
    from_: Literal["latest", "pos", "ts", "afterId"] | None
    pos: str | None
    ts: int | None
    after_id: str | None
    #: What happens when the connection or the handler does not keep up. "skip", the default, leaves
    #: out the events up to the newest ones, and tells on_gap. "catchup" leaves out nothing: what
    #: does not fit is read from the hub's store later. "close" ends the broadcast with buffer_full.
    slow: Literal["skip", "catchup", "close"] | None
    #: A newer event of a key replaces those that were not handled yet.
    conflate_by_key: bool
    #: The least time between two moments in which the hub sends events, at most 60,000.
    min_interval_ms: int | None
    #: The version of the schema in which events come. By default, they come as they are stored.
    #: on_gap is told of an event that the hub cannot cast.
    schema_version: int | Literal["latest"] | None
    #: The most events that wait for the handler, besides a snapshot. Defaults to 8,192.
    queue_events: int
    #: The most bytes of them. Defaults to 16 MiB.
    queue_bytes: int
    #: The most events of a snapshot that wait. A larger one ends the broadcast with buffer_full.
    #: Defaults to 100,000.
    max_keys: int
    #: Told which events are left out, in the place of these events. This function and the next
    #: ones run in order with the handler, and may be coroutine functions.
    on_gap: Callable[[Gap], Awaitable[object] | object] | None
    #: Told that the broadcast does not go on where it was.
    on_reset: Callable[[Reset], Awaitable[object] | object] | None
    #: Told the pos at which the snapshot has ended. All changes behind it follow.
    on_snapshot: Callable[[str], Awaitable[object] | object] | None
    #: Requests presence, and is told who comes and leaves. The policy must allow presence.
    on_presence: Callable[[Presence], Awaitable[object] | object] | None
    #: Options that this version does not know.
    extra: Mapping[str, Any] | None


class WatchOptions(TypedDict, total=False):
    """Options of ``watch``."""

    #: The most keys that the topic may have. One more ends the watch with buffer_full. Defaults to
    #: 100,000.
    max_keys: int
    #: The least time between two moments in which the hub sends changes, at most 60,000.
    min_interval_ms: int | None
    #: Told when the handler was given the present state, at the beginning and after each reset.
    on_current: Callable[[], Awaitable[object] | object] | None
    #: Told that changes were missed, and that the state comes again.
    on_reset: Callable[[Reset], Awaitable[object] | object] | None


class Hub(Protocol):
    """What a broadcast needs of its client."""

    @property
    def connected(self) -> bool: ...

    def call(self, frame: str, done: Done, began: Callable[[Frame], None] | None = None) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...

    def remove_broadcast(self, broadcast: Broadcast) -> None: ...

    def report(self, error: EventHubError) -> None: ...


@dataclass(slots=True)
class _Item:
    #: BroadcastEvent, Gap, Reset or Presence; a str is the pos at the end of a snapshot.
    what: BroadcastEvent[Any] | Gap | Reset | Presence | str
    size: int = 0
    #: The place before an event.
    before: str = ""


class Queue:
    """What waits for the handler of a broadcast, in order."""

    def __init__(self, events: int, size: int, keys: int, conflate: bool) -> None:
        self._events, self._bytes, self._keys, self._conflate = events, size, keys, conflate
        self._items: OrderedDict[int, _Item] = OrderedDict()
        self._next = 0
        self._size = 0  # bytes of what is not of a snapshot
        self._snapped = 0  # events of a snapshot
        self._snap_size = 0
        self._by_key: dict[str, int] = {}
        self._attendance: int | None = None

    def __len__(self) -> int:
        return len(self._items)

    def _push(self, item: _Item) -> int:
        self._count(item, 1)
        self._next += 1
        self._items[self._next] = item
        return self._next

    def _remove(self, number: int) -> _Item:
        item = self._items.pop(number)
        self._count(item, -1)
        what = item.what
        if number == self._attendance:
            self._attendance = None
        if isinstance(what, BroadcastEvent) and what.event.key is not None and self._by_key.get(what.event.key) == number:
            del self._by_key[what.event.key]
        return item

    def _count(self, item: _Item, by: int) -> None:
        if isinstance(item.what, BroadcastEvent) and item.what.snapshot:
            self._snapped += by
            self._snap_size += by * item.size
        else:
            self._size += by * item.size

    def _last(self) -> tuple[int, _Item] | None:
        for number in reversed(self._items):
            return number, self._items[number]
        return None

    def add(self, event: BroadcastEvent[Any], size: int, before: str) -> bool:
        """Appends an event. False if there is no room for it."""
        item = _Item(event, size, before)
        if event.snapshot:
            if self._snapped >= self._keys or self._snap_size + size > MAX_SNAPSHOT_BYTES:
                return False
            self._push(item)
            return True
        key = event.event.key if self._conflate else None
        if key is not None and key in self._by_key:
            self._remove(self._by_key[key])
        waiting = len(self._items) - self._snapped
        if waiting >= self._events or (waiting > 0 and self._size + size > self._bytes):
            return False
        number = self._push(item)
        if key is not None:
            self._by_key[key] = number
        return True

    def add_gap(self, gap: Gap) -> None:
        """Appends a gap, or makes the last one longer."""
        last = self._last()
        if last is not None and isinstance(last[1].what, Gap):
            gap = _joined(last[1].what, gap)
            self._remove(last[0])
        self._push(_Item(gap))
        if len(self._items) - self._snapped > self._events:
            self.skip()

    def add_reset(self, reset: Reset) -> None:
        last = self._last()
        if last is not None and isinstance(last[1].what, Reset):
            self._remove(last[0])
        self._push(_Item(reset))

    def add_current(self, pos: str) -> None:
        self._push(_Item(pos))

    def add_presence(self, presence: Presence) -> None:
        if self._attendance is not None:
            self._remove(self._attendance)  # the newest one counts
        self._attendance = self._push(_Item(presence))

    def skip(self) -> None:
        """Puts one gap in the place of all events and gaps, besides those of a snapshot."""
        whole: Gap | None = None
        reset: int | None = None
        for number, item in list(self._items.items()):
            what = item.what
            if isinstance(what, Reset):
                if reset is not None:
                    self._remove(reset)
                reset = number
            elif isinstance(what, Gap) or (isinstance(what, BroadcastEvent) and not what.snapshot):
                part = what if isinstance(what, Gap) else Gap(item.before, what.pos, 1)
                whole = part if whole is None else _joined(whole, part)
                self._remove(number)
        if whole is not None:
            self._push(_Item(whole))

    def forget(self) -> None:
        """Drops all but the presence."""
        for number in list(self._items):
            if number != self._attendance:
                self._remove(number)

    def clear(self) -> None:
        for number in list(self._items):
            self._remove(number)

    def pop(self) -> _Item:
        return self._remove(next(iter(self._items)))


def _joined(a: Gap, b: Gap) -> Gap:
    """Two gaps as one. 0 is a number that nobody knows."""
    return Gap(a.from_pos, b.to_pos, a.missed + b.missed if a.missed and b.missed else 0)


class Broadcast:
    """A broadcast of a topic to this client. It goes on over reconnects, until it is ended.

    As a context manager, it ends at the end of the block.
    """

    def __init__(self, hub: Hub, topic: str, handler: BroadcastHandler[Any], options: BroadcastOptions, watch: Watch | None = None) -> None:
        check_names("broadcast", options, BroadcastOptions.__annotations__)
        own: dict[str, Any] = dict(options)
        limits = [own.pop(name, default) for name, default in (("queue_events", 8_192), ("queue_bytes", 16 * 2**20), ("max_keys", 100_000))]
        if not all(isinstance(limit, int) and limit > 0 for limit in limits):
            raise EventHubError("bad_options", "queue_events, queue_bytes and max_keys must be positive integers")
        conflate = bool(own.pop("conflate_by_key", False))
        self._on_gap, self._on_reset, self._on_snapshot, self._on_presence = (
            own.pop(name, None) for name in ("on_gap", "on_reset", "on_snapshot", "on_presence")
        )
        if conflate:
            own["conflate"] = "key"
        if self._on_presence is not None:
            own["presence"] = True
        self.topic = topic
        self._hub = hub
        self._handler = handler
        self._watch = watch
        self._limits = limits
        self._slow = own.get("slow") or "skip"
        self._options = own
        marked: dict[str, Any] = {"snapshotEnd": True} if own.get("snapshot") else {}
        self._first_opts = dumps({"mode": "broadcast", **marked, **wire_options(own)})
        self._queue = Queue(limits[0], limits[1], limits[2], conflate)
        self._loop = asyncio.get_running_loop()
        self._closed: asyncio.Future[EventHubError | None] = self._loop.create_future()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._worker: asyncio.Task[None] | None = None
        # Counts SUBSCRIBEs. What comes for an earlier one changes nothing.
        self._generation = 0
        self._live = False  # the hub has accepted the latest SUBSCRIBE
        self._there = False  # the hub may have a broadcast of this connection
        self._held = False  # nothing is taken until the queue is empty
        self._snapped = not own.get("snapshot")  # there is no snapshot, or it has ended
        self._partial = False  # a part of a snapshot has come
        self._pos: str | None = None  # behind which the broadcast goes on
        self._retries = 0
        self._ended = False
        self._draining = False
        if hub.connected:
            self._connected()

    def __repr__(self) -> str:
        return f"<Broadcast of {self.topic}>"

    # -- for the user

    async def wait_closed(self) -> EventHubError | None:
        """Returns when the broadcast has ended, with the error if it was not told to end."""
        return await asyncio.shield(self._closed)

    async def unsubscribe(self) -> None:
        """Ends the broadcast at once. A handler that runs is the last one."""
        if not self._ended:
            await self._leave()

    async def __aenter__(self) -> Broadcast:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.unsubscribe()

    # -- the connection

    async def _open(self) -> None:
        try:
            await asyncio.shield(self._opened)
        except asyncio.CancelledError:
            if not self._ended:
                self._leave()
            raise

    def _opts(self) -> str:
        if not self._snapped or self._pos is None:
            return self._first_opts
        own = {name: value for name, value in self._options.items() if name not in ("history", "snapshot", "ts", "after_id")}
        return dumps({"mode": "broadcast", **wire_options({**own, "from_": "pos", "pos": self._pos})})

    def _connected(self) -> None:
        """Subscribes, in place of an earlier SUBSCRIBE."""
        if self._ended or self._draining or self._held:
            return
        self._generation += 1
        generation = self._generation
        self._live = False
        self._release()
        self._there = True

        def answered(error: EventHubError | None) -> None:
            # The next connection repeats it.
            if error is None or self._ended or generation != self._generation or error.code == "connection_lost":
                return
            self._there = False
            if error.retryable and self._retries < MAX_RETRIES:
                pause = min(10.0, 0.2 * 2**self._retries) * (0.5 + random.random() / 2)
                self._retries += 1
                self._loop.call_later(pause, again)
            elif error.code != "unauthorized":
                self._end(error)

        def again() -> None:
            if generation == self._generation and self._hub.connected:
                self._connected()

        def began(frame: Frame) -> None:
            if not self._ended and generation == self._generation:
                self._began(frame)

        self._hub.call(f'"op":"SUBSCRIBE","topic":{dumps(self.topic)},"opts":{self._opts()}', answered, began)

    def _release(self) -> None:
        """Ends the broadcast at the hub, if there is one."""
        if self._there and self._hub.connected:
            self._hub.call(self._unsubscribe_frame(), lambda error: None)
        self._there = False

    def _unsubscribe_frame(self) -> str:
        return f'"op":"UNSUBSCRIBE","topic":{dumps(self.topic)},"opts":{{"mode":"broadcast"}}'

    def _began(self, frame: Frame) -> None:
        self._live = True
        self._retries = 0
        if not self._opened.done():
            self._opened.set_result(None)
        if not self._snapped:
            if self._partial:  # what has come of the snapshot before is void
                self._partial = False
                self._queue.forget()
                self._queue.add_reset(Reset("snapshot"))
        elif frame["recovered"]:
            self._pos = frame["pos"]
        elif self._watch is not None:
            self._begin_anew(frame["reason"])
        else:
            self._pos = frame["pos"]
            self._queue.add_reset(Reset(frame["reason"], frame["pos"]))
        self._work_on()

    def _begin_anew(self, reason: str) -> None:
        """Asks for a new snapshot, which has the changes that were not handled."""
        self._snapped = self._partial = self._live = False
        self._generation += 1
        self._queue.forget()
        self._queue.add_reset(Reset(reason))
        if self._hub.connected:
            self._connected()

    def _disconnected(self) -> None:
        self._generation += 1
        self._live = self._there = False

    def _end(self, error: EventHubError | None = None) -> None:
        """Ends the broadcast in this client."""
        if self._ended:
            return
        self._disconnected()
        self._ended = True
        self._queue.clear()
        self._hub.remove_broadcast(self)
        if not self._opened.done():
            self._opened.set_exception(error or EventHubError("aborted", "The broadcast was ended."))
            self._opened.exception()  # whoever waits for it is told
        self._closed.set_result(error)
        if error is not None:
            self._hub.report(error)

    def _fail(self, message: str) -> None:
        self._release()
        self._end(EventHubError("buffer_full", message))

    def _leave(self) -> asyncio.Future[None]:
        left: asyncio.Future[None] = self._loop.create_future()

        def answered(error: EventHubError | None) -> None:
            if not left.done():
                left.set_result(None)  # there is no broadcast at the hub, whatever the answer

        self._draining = True
        if self._there and self._hub.connected:
            self._hub.call(self._unsubscribe_frame(), answered)
        else:
            left.set_result(None)
        self._there = False
        self._end()
        return left

    async def _drain(self) -> None:
        """Ends the broadcast, and lets the handler finish."""
        worker = self._worker
        left = self._leave()
        if worker is not None:
            await asyncio.wait([worker])
        await left

    # -- what comes

    def _frame(self, frame: Frame, size: int) -> None:
        if not self._live or self._held or self._ended:
            return
        op = frame["op"]
        if op == "EVENT":
            self._event(frame, size)
        elif op == "GAP":
            self._pos = frame["to"]
            if self._watch is not None:
                self._begin_anew("gap")
            else:
                self._queue.add_gap(Gap(frame["from"], frame["to"], frame["missed"]))
        elif op == "SNAPSHOT":
            self._snapped, self._partial, self._pos = True, False, frame["pos"]
            self._queue.add_current(frame["pos"])
        elif op == "PRESENCE":
            self._queue.add_presence(Presence(frame["count"], frame["joined"], frame["left"]))
        self._work_on()

    def _event(self, frame: Frame, size: int) -> None:
        ctx = frame["ctx"]
        event = BroadcastEvent(Event.from_record(frame["event"]), ctx["pos"], not self._snapped, ctx.get("tombstone", False))
        if event.snapshot:
            self._partial = True
            if not self._queue.add(event, size, ""):
                self._fail(f"the snapshot of {self.topic} has more than {self._limits[2]} keys, or {MAX_SNAPSHOT_BYTES} bytes, that wait")
            return
        if not self._queue.add(event, size, self._pos or ""):
            if self._watch is not None:
                self._begin_anew("gap")
                return
            if self._slow == "close":
                self._fail(f"the handler is slower than the events of {self.topic}: {self._limits[0]} wait")
                return
            if self._slow == "catchup":
                self._held = True  # what still comes is fetched when the queue is empty
                self._live = False
                self._release()
                return
            self._queue.skip()
            self._queue.add(event, size, self._pos or "")
        self._pos = event.pos

    def _work_on(self) -> None:
        if self._worker is None and len(self._queue) > 0 and not self._ended:
            self._worker = self._hub.spawn(self._work())

    async def _work(self) -> None:
        """Handles what is queued, one after the other."""
        try:
            while not self._ended and len(self._queue) > 0:
                item = self._queue.pop()
                try:
                    await self._hand(item)
                except Exception as cause:  # whatever the handler raises: the broadcast goes on
                    self._report(cause)
                if len(self._queue) % 64 == 0:
                    await asyncio.sleep(0)  # plain functions must not keep the loop
        finally:
            self._worker = None
            if self._held and not self._ended:
                self._held = False
                if self._hub.connected:
                    self._connected()
            self._work_on()

    def _report(self, cause: Exception) -> None:
        self._hub.report(EventHubError("internal", f"The handler of {self.topic} failed: {cause!r}", False).caused_by(cause))

    async def _hand(self, item: _Item) -> None:
        if self._watch is not None:
            await self._watch.hand(self, item.what)
            return
        what = item.what
        if isinstance(what, BroadcastEvent):
            await _called(self._handler, what)
        elif isinstance(what, Gap):
            await _called(self._on_gap, what)
        elif isinstance(what, Reset):
            await _called(self._on_reset, what)
        elif isinstance(what, Presence):
            await _called(self._on_presence, what)
        else:
            await _called(self._on_snapshot, what)


async def _called(function: Callable[..., Awaitable[object] | object] | None, *args: object) -> None:
    if function is not None:
        result = function(*args)
        if inspect.isawaitable(result):
            await result


class Watch:
    """The state of a watch."""

    def __init__(self, handler: WatchHandler[Any], options: WatchOptions) -> None:
        check_names("watch", options, WatchOptions.__annotations__)
        self._handler = handler
        self._max = options.get("max_keys", 100_000)
        self._on_current = options.get("on_current")
        self._on_reset = options.get("on_reset")
        self._interval = options.get("min_interval_ms")
        self._keys: set[str] = set()  # that the handler knows
        self._fresh: set[str] | None = None  # of the snapshot that comes after a reset

    def begin(self, hub: Hub, topic: str) -> Broadcast:
        options: BroadcastOptions = {
            "snapshot": True,
            "conflate_by_key": True,
            "queue_events": self._max,
            "queue_bytes": MAX_SNAPSHOT_BYTES,
            "max_keys": self._max,
        }
        if self._interval is not None:
            options["min_interval_ms"] = self._interval
        return Broadcast(hub, topic, lambda event: None, options, self)

    async def hand(self, broadcast: Broadcast, what: object) -> None:
        if isinstance(what, BroadcastEvent):
            await self._event(broadcast, what)
        elif isinstance(what, Reset):
            self._fresh = set()
            await _called(self._on_reset, what)
        elif isinstance(what, str):
            await self._current(broadcast)

    async def _event(self, broadcast: Broadcast, e: BroadcastEvent[Any]) -> None:
        key = e.event.key
        if key is None:
            return
        if e.tombstone:
            if key not in self._keys:
                return
            self._keys.discard(key)
        else:
            self._keys.add(key)
            known = self._keys
            if self._fresh is not None:
                self._fresh.add(key)
                known = self._fresh
            if len(known) > self._max:
                broadcast._fail(f"{broadcast.topic} has more than {self._max} keys; raise max_keys")
                return
        await _called(self._handler, Change(key, None if e.tombstone else e.event.payload, e.tombstone, e.event))

    async def _current(self, broadcast: Broadcast) -> None:
        fresh, self._fresh = self._fresh, None
        for key in [] if fresh is None else sorted(self._keys - fresh):
            if broadcast._ended:
                return
            self._keys.discard(key)
            try:
                await _called(self._handler, Change(key, None, True, None))
            except Exception as cause:  # the others are told all the same
                broadcast._report(cause)
        await _called(self._on_current)
