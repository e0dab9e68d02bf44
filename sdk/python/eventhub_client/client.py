"""The client: one connection, and another when that breaks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl as ssl_module
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, TypedDict, Unpack, cast, overload

from .broadcast import Broadcast, BroadcastHandler, BroadcastOptions, Watch, WatchHandler, WatchOptions
from .connection import Connection
from .delivery import Delivery
from .errors import EventHubError
from .events import Events
from .frames import Frame, HubSubscribeOptions, Outgoing, PublishOptions, check_names
from .machine import State
from .publisher import Pending, Publisher
from .subscription import Done, Handler, SubscribeOptions, Subscription
from .tokens import TokenSource

log = logging.getLogger("eventhub_client")


class ClientOptions(TypedDict, total=False):
    """Options of a client."""

    #: A token, or a function or coroutine function that returns one.
    token: TokenSource | None
    #: For wss. Defaults to a context that checks certificates.
    ssl: ssl_module.SSLContext | None
    #: The first pause before a new attempt. Each further pause is twice as long. Defaults to 1,000.
    min_pause_ms: float
    #: The longest pause. Defaults to 30,000.
    max_pause_ms: float
    #: How long an attempt may take, from the socket to the accepted token. Defaults to 10,000.
    attempt_timeout_ms: float
    #: After this much silence the client asks whether the hub is there. Defaults to 15,000.
    ping_ms: float
    #: The most publishes that wait for their answers at a time, sent or not. Defaults to 10,000.
    buffer_events: int
    #: The most bytes of them. Defaults to 16 MiB.
    buffer_bytes: int
    #: The most publishes that are on their way to the hub at a time. Defaults to 1,000.
    window: int
    #: For how long the hub knows an id. A publish in doubt is sent again only well within this
    #: time. Defaults to two minutes, as topics do.
    duplicate_window_ms: float
    #: For how long a publish is repeated that the hub refuses for the moment. Defaults to 30,000.
    retry_ms: float
    #: Functions that check payloads, by topic. A function returns the payload, or another form of
    #: it, or raises an exception. Publishes are checked before they are sent, and events before
    #: they are handled.
    schemas: Mapping[str, Callable[[Any], Any]]
    #: Turns what JSON does not have into what it has, as that of json.dumps.
    default: Callable[[Any], Any] | None


@dataclass(frozen=True, slots=True)
class Notice:
    """What the hub tells about a group without being asked."""

    code: Literal["group_reset", "events_lost"]
    topic: str
    group: str
    message: str


StateListener = Callable[[State, EventHubError | None], object]
NoticeListener = Callable[[Notice], object]
ErrorListener = Callable[[EventHubError], object]


class EventsOptions(HubSubscribeOptions, total=False):
    """Options of ``events``."""

    #: The most events that are taken out of the group at a time. Defaults to 1.
    concurrency: int | None
    #: As for ``subscribe``.
    max_lease_ms: float


class Client:
    """A client, which connects at once. It is made within a running event loop.

    As a context manager, it closes at the end of the block. Use ``connect`` to wait for the first
    connection.
    """

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        check_names("connect", options, ClientOptions.__annotations__)
        self._loop = asyncio.get_running_loop()
        self._schemas = options.get("schemas", {})
        # By topic, then by group.
        self._subscriptions: dict[str, dict[str, Subscription[Any]]] = {}
        self._broadcasts: dict[str, Broadcast] = {}
        self._calls: dict[int, tuple[Done, float, Callable[[Frame], None] | None]] = {}
        self._listeners: dict[str, list[Callable[..., object]]] = {"state": [], "notice": [], "error": []}
        self._next_corr = 0
        self._over: EventHubError | None = None
        self._closing: asyncio.Task[None] | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._connection = Connection(
            self,
            url,
            options.get("token"),
            options.get("ssl"),
            options.get("min_pause_ms", 1_000),
            options.get("max_pause_ms", 30_000),
            options.get("attempt_timeout_ms", 10_000),
            options.get("ping_ms", 15_000),
        )
        self._publisher = Publisher(
            self._connection.send,
            self._corr,
            options.get("default"),
            options.get("buffer_events", 10_000),
            options.get("buffer_bytes", 16 * 2**20),
            options.get("window", 1_000),
            options.get("duplicate_window_ms", 120_000),
            options.get("retry_ms", 30_000),
        )
        self._connection.start()

    @property
    def state(self) -> State:
        """The state of the connection."""
        return self._connection.state

    @property
    def pending(self) -> int:
        """How many publishes have no answer yet."""
        return self._publisher.pending

    @overload
    def on(self, event: Literal["state"], listener: StateListener) -> Callable[[], None]: ...

    @overload
    def on(self, event: Literal["notice"], listener: NoticeListener) -> Callable[[], None]: ...

    @overload
    def on(self, event: Literal["error"], listener: ErrorListener) -> Callable[[], None]: ...

    def on(self, event: str, listener: Callable[..., object]) -> Callable[[], None]:
        """Calls a function at each event, until the function that is returned is called.

        ``state``: the state of the connection has changed; the error says why, if it was lost.
        ``notice``: a group had to start anew, or events were removed before it was given them.
        ``error``: something failed that no call reports, such as a subscription that the hub has
        ended. Without a listener, notices and errors are logged.
        """
        if event not in self._listeners:
            raise ValueError(f"there is no event {event!r}: listen to state, notice or error")
        listeners = self._listeners[event]
        listeners.append(listener)

        def off() -> None:
            if listener in listeners:
                listeners.remove(listener)

        return off

    async def ready(self) -> None:
        """Returns when the client is connected. Raises when it has given up or is closed."""
        if self.state == "ready":
            return
        if self._over is not None:
            raise self._over
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    async def publish(self, topic: str, payload: object, **options: Unpack[PublishOptions]) -> str:
        """Publishes an event, and returns its id when the hub has stored it.

        While there is no connection, the event waits. After a break, an event without an answer is
        sent again under the same id; where that could store it twice, outcome_unknown is raised. If
        the call is cancelled, an event that was not sent is taken back, and an event that was sent
        may or may not be stored.
        """
        p = self._publish(topic, payload, options)
        try:
            return await p.answer
        except asyncio.CancelledError:
            self._publisher.abandon(p)
            raise

    def _publish(self, topic: str, payload: object, options: PublishOptions) -> Pending:
        return self._publisher.start(topic, self._checked(topic, payload), options)

    async def publish_many(self, topic: str, events: Iterable[Outgoing] | AsyncIterable[Outgoing], *, in_flight: int = 256) -> list[str]:
        """Publishes many events, several at a time, and returns their ids.

        An event is a dict with ``payload`` and options of PUBLISH. The source is asked for an event
        only when there is room for it. After the first failure, no further event is taken, and the
        failure is raised when those on their way have their answers.
        """
        ids: list[str] = []
        flying: dict[Pending, int] = {}
        failure: BaseException | None = None
        room = asyncio.Event()

        def fly(p: Pending) -> None:
            at = flying[p] = len(ids)
            ids.append("")

            def answered(answer: asyncio.Future[str]) -> None:
                nonlocal failure
                flying.pop(p, None)
                room.set()
                if answer.cancelled():
                    return
                error = answer.exception()
                if error is None:
                    ids[at] = answer.result()
                else:
                    failure = failure or error

            p.answer.add_done_callback(answered)

        async def one_less() -> None:
            room.clear()
            await room.wait()

        async def start(event: Outgoing) -> None:
            options: dict[str, Any] = dict(event)
            payload = options.pop("payload")
            while True:
                try:
                    return fly(self._publish(topic, payload, cast(PublishOptions, options)))
                except EventHubError as error:
                    if error.code != "buffer_full" or not flying:
                        raise
                await one_less()

        try:
            async with contextlib.aclosing(_each(events)) as source:
                async for event in source:
                    try:
                        await start(event)
                    except EventHubError as error:
                        failure = failure or error
                    while len(flying) >= in_flight:
                        await one_less()
                    if failure is not None:
                        break
            while flying:
                await one_less()
        finally:
            for p in list(flying):
                self._publisher.abandon(p)
        if failure is not None:
            raise failure
        return ids

    async def subscribe(self, topic: str, group: str, handler: Handler[Any], **options: Unpack[SubscribeOptions]) -> Subscription[Any]:
        """Joins a group, and stays a member over reconnects.

        The handler's end acknowledges the event, and an exception refuses the event. Returns when
        the hub has accepted the subscription.
        """
        subscription = self._join(topic, group, handler, options)
        await subscription._open()
        return subscription

    def _join(self, topic: str, group: str, handler: Handler[Any], options: SubscribeOptions) -> Subscription[Any]:
        self._may_join()
        if group in self._subscriptions.get(topic, {}):
            raise EventHubError("already_subscribed", f"{topic}::{group}")
        subscription = Subscription(self, topic, group, self._guard(handler) if self._schemas else handler, options)
        self._subscriptions.setdefault(topic, {})[group] = subscription
        return subscription

    def events(self, topic: str, group: str, **options: Unpack[EventsOptions]) -> Events[Any]:
        """Joins a group, and gives its events one after the other: ``async for delivery in ...``.

        To ask for the next event acknowledges the one before. Leaving the loop leaves the group,
        and gives back the event at hand unless it was acknowledged.
        """
        check_names("events", options, EventsOptions.__annotations__)
        joined = cast(SubscribeOptions, {"concurrency": 1, **options})
        return Events(lambda handler: self._join(topic, group, handler, joined), self.spawn)

    async def broadcast(self, topic: str, handler: BroadcastHandler[Any], **options: Unpack[BroadcastOptions]) -> Broadcast:
        """Gives every event of a topic to the handler, without a group and acknowledgements.

        Events come in order, one at a time, also over reconnects. ``on_gap`` or ``on_reset`` is
        told what was missed all the same. Returns when the hub has accepted the broadcast. A
        client has at most one broadcast of a topic.
        """
        return await self._follow(topic, lambda: Broadcast(self, topic, handler, options))

    async def watch(self, topic: str, handler: WatchHandler[Any], **options: Unpack[WatchOptions]) -> Broadcast:
        """Gives the present value of each key of a compacted topic to the handler, then each change.

        When changes were missed, it takes a new snapshot: the handler is given all values again,
        and a Change with ``deleted`` for each key that has gone. If a key changes faster than the
        handler is, the handler gets the newest value only.
        """
        watch = Watch(handler, options)
        return await self._follow(topic, lambda: watch.begin(self, topic))

    async def _follow(self, topic: str, begin: Callable[[], Broadcast]) -> Broadcast:
        self._may_join()
        if topic in self._broadcasts:
            raise EventHubError("already_subscribed", topic)
        broadcast = self._broadcasts[topic] = begin()
        await broadcast._open()
        return broadcast

    def _may_join(self) -> None:
        if self._over is not None:
            raise self._over
        if self._closing is not None:
            raise EventHubError("closed", "The client is closing.")

    async def close(self, timeout_ms: float = 10_000) -> None:
        """Lets handlers and publishes finish, and closes the connection.

        Events that no handler has begun go to other members. What has not finished in time is given
        up, and handlers that still run are cancelled.
        """
        if asyncio.current_task() in self._tasks:
            raise RuntimeError("a handler cannot wait for the end of itself: drain and close need a task of their own")
        if self._closing is None:
            self._closing = self._loop.create_task(self._drain(timeout_ms))
        await asyncio.shield(self._closing)

    async def _drain(self, timeout_ms: float) -> None:
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                broadcasts = (b._drain() for b in list(self._broadcasts.values()))
                await asyncio.gather(*(s.drain(timeout_ms) for s in self._all()), *broadcasts, return_exceptions=True)
                await self._publisher.idle()
        except TimeoutError:
            pass
        finally:
            self._connection.close()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=1)
            await self._connection.wait_closed()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    # -- payloads

    def _checked(self, topic: str, payload: object) -> object:
        schema = self._schemas.get(topic)
        if schema is None:
            return payload
        try:
            return schema(payload)
        except Exception as cause:  # whatever the schema raises
            raise EventHubError("invalid", f"The payload does not fit: {cause}").caused_by(cause) from None

    def _guard(self, handler: Handler[Any]) -> Handler[Any]:
        """Checks payloads before the handler, if their topic has a schema."""

        def checked(delivery: Delivery[Any]) -> Awaitable[object] | object:
            event = delivery.event
            delivery.event = replace(event, payload=self._checked(event.topic, event.payload))
            return handler(delivery)

        return checked

    # -- for the connection

    def resume(self) -> None:
        for subscription in self._all():
            subscription._connected()
        for broadcast in list(self._broadcasts.values()):
            broadcast._connected()
        self._publisher.resume()
        self._tell(None)

    def suspend(self) -> None:
        for subscription in self._all():
            subscription._disconnected()
        for broadcast in list(self._broadcasts.values()):
            broadcast._disconnected()
        self._publisher.suspend()
        self._fail_calls(EventHubError("connection_lost", "The connection ended before the answer came."))

    def ended(self, error: EventHubError) -> None:
        self._over = error
        for subscription in self._all():
            subscription._end(None if error.code == "closed" else error)
        for broadcast in list(self._broadcasts.values()):
            broadcast._end(None if error.code == "closed" else error)
        self._publisher.end(error)
        self._fail_calls(error)
        self._tell(error)
        if error.code != "closed":
            self.report(error)

    def changed(self, state: State, error: EventHubError | None) -> None:
        self._emit("state", state, error)

    def unanswered(self) -> float:
        for _, sent, _ in self._calls.values():
            return max((time.monotonic() - sent) * 1000, self._publisher.unanswered())
        return self._publisher.unanswered()

    def frame(self, frame: Frame, size: int) -> None:
        op = frame.get("op")
        if (op == "EVENT" and "group" not in frame) or op in ("GAP", "SNAPSHOT", "PRESENCE"):
            broadcast = self._broadcasts.get(frame["topic"])
            if broadcast is not None:
                broadcast._frame(frame, size)
            return
        if op == "EVENT":
            subscription = self._subscriptions.get(frame["topic"], {}).get(frame["group"])
            if subscription is not None:
                subscription._deliver(frame)
            return
        corr = frame.get("corr")
        if op == "OK":
            if not self._publisher.ok(corr, frame.get("id")):
                self._answered(corr, None, frame)
        elif op == "ERR":
            if corr is None:
                self._told(frame)
            elif not self._publisher.err(corr, frame):
                self._answered(corr, EventHubError(frame["code"], frame["msg"], frame.get("retryable")))
        elif op == "ASSIGN":
            for groups in self._subscriptions.values():
                subscription = groups.get(frame["group"])
                if subscription is not None:
                    subscription._assigned(frame)
        # Other frames belong to extensions that this client did not ask for.

    def _answered(self, corr: object, error: EventHubError | None, ok: Frame | None = None) -> None:
        call = self._calls.pop(corr, None) if isinstance(corr, int) else None
        if call is not None:
            done, _, began = call
            if began is not None and ok is not None:
                began(ok)
            done(error)

    def _told(self, frame: Frame) -> None:
        """An error that answers no frame."""
        code, message = frame["code"], frame["msg"]
        subscription = self._named(message)
        broadcast = self._broadcast_named(code, message)
        if broadcast is not None:
            broadcast._end(EventHubError(code, message))
        elif subscription is not None and code in ("group_reset", "events_lost"):
            notice = Notice(code, subscription.topic, subscription.group, message)
            if not self._emit("notice", notice):
                log.warning("%s: %s", code, message)
        elif subscription is not None and code in ("not_subscribed", "forbidden"):
            subscription._told(frame)
        elif code != "token_expired":  # the connection's end tells that
            self.report(EventHubError(code, message))

    def _named(self, message: str) -> Subscription[Any] | None:
        """The subscription that a message names as topic::group."""
        named = [s for s in self._all() if f"{s.topic}::{s.group}" in message]
        return max(named, key=lambda s: len(s.topic) + len(s.group)) if named else None

    def _broadcast_named(self, code: str, message: str) -> Broadcast | None:
        """The broadcast that a message ends."""
        if code == "not_subscribed":
            return self._broadcasts.get(message)
        if code == "forbidden":
            for topic, broadcast in self._broadcasts.items():
                if f" {topic}; the broadcast" in message:
                    return broadcast
        return None

    def _tell(self, error: EventHubError | None) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    def _fail_calls(self, error: EventHubError) -> None:
        calls = list(self._calls.values())
        self._calls.clear()
        for done, _, _ in calls:
            done(error)

    def _corr(self) -> int:
        self._next_corr += 1
        return self._next_corr

    def _all(self) -> Iterator[Subscription[Any]]:
        return iter([s for groups in self._subscriptions.values() for s in groups.values()])

    def _emit(self, event: str, *args: object) -> bool:
        listeners = list(self._listeners[event])
        for listener in listeners:
            try:
                listener(*args)
            except Exception as cause:  # whatever the listener raises: the client goes on
                self._loop.call_exception_handler({"message": f"a listener of {event!r} failed", "exception": cause})
        return bool(listeners)

    # -- for subscriptions

    @property
    def connected(self) -> bool:
        return self.state == "ready"

    def call(self, frame: str, done: Done, began: Callable[[Frame], None] | None = None) -> None:
        if self.state != "ready":
            done(EventHubError("connection_lost", "There is no connection."))
            return
        corr = self._corr()
        self._calls[corr] = (done, time.monotonic(), began)
        self._connection.send(f'{{{frame},"corr":{corr}}}')

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def remove(self, subscription: Subscription[Any]) -> None:
        groups = self._subscriptions.get(subscription.topic, {})
        if groups.get(subscription.group) is subscription:
            del groups[subscription.group]
            if not groups:
                del self._subscriptions[subscription.topic]

    def remove_broadcast(self, broadcast: Broadcast) -> None:
        if self._broadcasts.get(broadcast.topic) is broadcast:
            del self._broadcasts[broadcast.topic]

    def report(self, error: EventHubError) -> None:
        if not self._emit("error", error):
            log.error("%s", error)


class Connecting:
    """A client that connects: ``async with connect(...) as hub``, or ``await connect(...)``."""

    def __init__(self, url: str, connect_timeout_ms: float, options: ClientOptions) -> None:
        self._url = url
        self._timeout_ms = connect_timeout_ms
        self._options = options
        self._client: Client | None = None

    def __await__(self) -> Generator[Any, None, Client]:
        return self._open().__await__()

    async def __aenter__(self) -> Client:
        self._client = await self._open()
        return self._client

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._client is not None:
            await self._client.close()

    async def _open(self) -> Client:
        client = Client(self._url, **self._options)
        last: EventHubError | None = None

        def changed(state: State, error: EventHubError | None) -> None:
            nonlocal last
            last = error or last

        # What fails here is raised.
        offs = [client.on("state", changed), client.on("error", lambda error: None)]
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                await client.ready()
        except TimeoutError:
            why = last  # before the end of the client is told
            await client.close(0)
            reason = why.message if why else "the hub does not answer"
            raise EventHubError("connect_timeout", f"There is no connection after {self._timeout_ms:g} ms: {reason}") from why
        except BaseException:
            await client.close(0)
            raise
        finally:
            for off in offs:
                off()
        return client


def connect(url: str, *, connect_timeout_ms: float = 30_000, **options: Unpack[ClientOptions]) -> Connecting:
    """Makes a client, and waits until it is connected."""
    check_names("connect", options, ClientOptions.__annotations__)
    return Connecting(url, connect_timeout_ms, options)


async def _each(events: Iterable[Outgoing] | AsyncIterable[Outgoing]) -> AsyncGenerator[Outgoing, None]:
    if isinstance(events, AsyncIterable):
        async for event in events:
            yield event
    else:
        for event in events:
            yield event
