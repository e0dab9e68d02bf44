from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import hubs
import pytest
from hubs import FAST, Hub, eventually, fails, jwt, new_topic
from proxy import Proxy

from eventhub_client import BroadcastEvent, Change, Client, Event, EventHubError, Gap, Presence, Reset, connect
from eventhub_client.broadcast import Queue


class News:
    """What came of a broadcast, in order."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def event(self, e: BroadcastEvent[Any]) -> None:
        text = e.event.payload if e.event.key is None else f"{e.event.key}={e.event.payload}"
        if e.tombstone:
            text = f"{e.event.key} gone"
        self.all.append(f"snapshot {text}" if e.snapshot else text)

    @property
    def options(self) -> Any:
        return {
            "on_gap": lambda gap: self.all.append(f"gap {gap.missed}"),
            "on_reset": lambda reset: self.all.append(f"reset {reset.reason}"),
            "on_snapshot": lambda pos: self.all.append("current"),
        }

    async def wants(self, *want: Any) -> None:
        await eventually(f"{want[-3:]}", lambda: self.all[-1:] == list(want[-1:]) or len(self.all) > len(want), 30)
        assert self.all == list(want)

    async def ends_with(self, last: Any) -> None:
        """Waits until an event came.

        Then the hub's own reader of the topic is behind the event: a hub whose reader is late has more to give to a
        broadcast that comes again than the topic holds.
        """
        await eventually(f"the hub has read {last}", lambda: self.all[-1:] == [last], 30)


@contextlib.asynccontextmanager
async def pair(hub: Hub) -> AsyncIterator[tuple[Proxy, Client, Client]]:
    """A client behind a proxy, and one that is not."""
    async with Proxy(hub.websocket) as proxy, hubs.closing(await connect(proxy.url, token=hub.token, **FAST)) as client:
        async with hub.open(**FAST) as writer:
            yield proxy, client, writer


@contextlib.asynccontextmanager
async def lost(proxy: Proxy, client: Client) -> AsyncIterator[None]:
    """The client has no connection in the block."""
    proxy.refusing = True
    proxy.cut()
    await eventually("no connection", lambda: client.state != "ready")
    yield
    proxy.refusing = False
    await client.ready()


@pytest.fixture(scope="module")
def small(program: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A hub that keeps little, whose topics c.* are compacted."""
    rules = tmp_path_factory.mktemp("topics") / "topics.yaml"
    rules.write_text('topics:\n  - {pattern: "c.*", compaction: true}\n  - {topic: "room", presence: true}\n  - {pattern: "**"}\n')
    limits = {"EVENTHUB_LIMIT_RING_FRAMES": "16", "EVENTHUB_LIMIT_CATCH_UP": "30", "JWT_SECRET": hubs.SECRET, "WS_TOKEN": "the hub's own token"}
    with hubs.start_hub({**limits, "EVENTHUB_TOPICS": str(rules)}) as hub:
        yield hub


async def test_a_broadcast_gives_every_event_in_order_from_where_it_is_asked(hub: Hub) -> None:
    topic = new_topic()
    async with hub.open() as client:
        ids = await client.publish_many(topic, [{"payload": i} for i in range(1, 21)])
        places: list[str] = []
        async with await client.broadcast(topic, lambda e: places.append(e.pos), history=1000):
            await eventually("20 events", lambda: len(places) == 20)
        starts: list[tuple[Any, int]] = [
            ({}, 21),
            ({"history": 5}, 17),
            ({"from_": "afterId", "after_id": ids[14]}, 16),
            ({"from_": "pos", "pos": places[14]}, 16),
            ({"from_": "ts", "ts": 0}, 1),
            ({"from_": "latest", "min_interval_ms": 1}, 26),
        ]
        for n, (start, first) in enumerate(starts, 21):
            news = News()
            async with await client.broadcast(topic, news.event, **start):
                await client.publish(topic, n)
                await news.wants(*range(first, n + 1))


async def test_a_broadcast_misses_and_doubles_nothing_over_cuts_anywhere(hub: Hub) -> None:
    for options in ({}, {"history": 10}, {"slow": "catchup", "queue_events": 3}):
        topic, news, cuts = new_topic(), News(), 0
        async with pair(hub) as (proxy, client, writer):

            def changed(state: str, _: object) -> None:
                nonlocal cuts
                cuts += state == "waiting"

            client.on("state", changed)
            await writer.publish(topic, 0)
            await client.broadcast(topic, news.event, **news.options, **options)
            last = 0
            while last < 200 or cuts < 10:
                if proxy.budget is None:
                    proxy.budget = random.randrange(4000)
                last += 1
                assert last < 6000, "there were few cuts"
                await writer.publish(topic, last)
            proxy.budget = None
            await writer.publish(topic, last + 1)
            await news.wants(*range(0 if "history" in options else 1, last + 2))


async def test_a_snapshot_comes_first_and_again_when_it_is_cut(small: Hub) -> None:
    topic = f"c.{new_topic()[2:]}"
    async with pair(small) as (proxy, client, writer):
        for i in range(8):
            await writer.publish(topic, i, key=f"k{i % 4}")
        await writer.publish(topic, None, key="k0", tombstone=True)
        news = News()
        await stored(small, topic, {"k1": 5, "k2": 6, "k3": 7})
        for budget in range(0, 1000, 100):
            news = News()
            proxy.budget = budget
            async with await client.broadcast(topic, news.event, snapshot=True, **news.options):
                await eventually("the state", lambda: "current" in news.all)
                proxy.budget = None
                at = news.all.index("reset snapshot") + 1 if "reset snapshot" in news.all else 0
                assert [text for text in news.all[at:] if text != "current"] == ["snapshot k1=5", "snapshot k2=6", "snapshot k3=7"], budget
        news = News()
        await client.broadcast(topic, news.event, snapshot=True, **news.options)
        await news.wants("snapshot k1=5", "snapshot k2=6", "snapshot k3=7", "current")
        # Behind its snapshot it goes on.
        await proxy.cut_once(client)
        await writer.publish(topic, 8, key="k1")
        await writer.publish(topic, None, key="k1", tombstone=True)
        await news.wants("snapshot k1=5", "snapshot k2=6", "snapshot k3=7", "current", "k1=8", "k1 gone")


async def stored(hub: Hub, topic: str, want: dict[str, Any]) -> None:
    """Waits until a snapshot has these values."""
    async with hub.open() as client:

        async def right() -> bool:
            got: dict[str | None, Any] = {}
            ended = asyncio.Event()
            options: Any = {"snapshot": True, "on_snapshot": lambda pos: ended.set()}

            def take(e: BroadcastEvent[Any]) -> None:
                if not ended.is_set():
                    got[e.event.key] = e.event.payload

            async with await client.broadcast(topic, take, **options):
                await ended.wait()
            return got == want

        await eventually("the snapshot has all events", right)


async def test_what_a_broadcast_missed_is_told_exactly(small: Hub) -> None:
    topic, news, seen = new_topic(), News(), News()
    async with pair(small) as (proxy, client, writer):
        await client.broadcast(topic, news.event, **news.options)
        other = await writer.broadcast(topic, seen.event, slow="catchup", **seen.options)
        await writer.publish(topic, 0)
        await news.wants(0)
        async with lost(proxy, client):
            for i in range(1, 26):
                await writer.publish(topic, i)
            await seen.ends_with(25)
        await news.wants(*range(26))
        async with lost(proxy, client):
            for i in range(100):
                await writer.publish(topic, i)
            await seen.ends_with(99)
        await news.wants(*range(26), "reset too_far", "gap 100")
        # Made anew while the client is away, and then deleted.
        told: list[EventHubError] = []
        client.on("error", told.append)
        writer.on("error", lambda error: None)
        async with lost(proxy, client):
            await small.request("DELETE", f"/topics/{topic}")
            assert (await other.wait_closed() or told).code == "not_subscribed"  # type: ignore[union-attr]
            await writer.publish(topic, "missed")
        await news.wants(*range(26), "reset too_far", "gap 100", "reset stream_changed")
        broadcast = client._broadcasts[topic]
        await small.request("DELETE", f"/topics/{topic}")
        error = await broadcast.wait_closed()
        assert error is not None and error.code == "not_subscribed" and told == [error]


@pytest.mark.parametrize("slow", ["skip", "catchup", "close", "conflate"])
async def test_a_slow_handler_holds_up_its_broadcast_alone(hub: Hub, slow: str) -> None:
    topic, news = new_topic(), News()
    begun, release = asyncio.Event(), asyncio.Event()

    async def handle(e: BroadcastEvent[Any]) -> None:
        if e.event.payload == 1:
            begun.set()
            await release.wait()
        news.event(e)

    options: Any = {"conflate_by_key": True} if slow == "conflate" else {"slow": slow}
    async with hub.open() as client, hub.open() as other:
        client.on("error", lambda error: None)
        broadcast = await client.broadcast(topic, handle, queue_events=4, **news.options, **options)
        await client.publish(topic, 1)
        await begun.wait()
        for i in range(2, 22):
            await client.publish(topic, i, key=f"k{i % 2}" if slow == "conflate" else None)
        last = News()
        await other.broadcast(topic, last.event, history=1)
        await eventually("the last event at another client", lambda: last.all[-1:] in ([21], ["k1=21"]))
        got: list[int] = []
        await client.subscribe(new := new_topic(), "g", lambda d: got.append(d.event.payload))
        await client.publish(new, 1)
        await eventually("the event of another topic", lambda: got)
        release.set()
        match slow:
            case "skip":
                await news.wants(1, "gap 19", 21)
            case "catchup":
                await news.wants(*range(1, 22))
            case "conflate":
                await news.wants(1, "k0=20", "k1=21")
            case "close":
                error = await broadcast.wait_closed()
                assert error is not None and error.code == "buffer_full"
                await news.wants(1)


async def test_presence_of_a_broadcast(small: Hub) -> None:
    came: list[Presence] = []
    async with small.open() as client, small.open(token=jwt(["subscribe:room"], sub="alice")) as alice:
        await client.broadcast("room", lambda e: None, on_presence=came.append)
        broadcast = await alice.broadcast("room", lambda e: None)
        await eventually("alice comes", lambda: any("alice" in p.joined and p.count == 2 for p in came))
        await broadcast.unsubscribe()
        await eventually("alice leaves", lambda: any("alice" in p.left and p.count == 1 for p in came))
        alice.on("error", lambda error: None)
        with fails("forbidden"):
            await alice.broadcast("room", lambda e: None, on_presence=print)


async def test_a_broadcast_that_is_refused(hub: Hub) -> None:
    async with hub.open(token=jwt(["subscribe:open"])) as client:
        client.on("error", lambda error: None)
        with fails("forbidden"):
            await client.broadcast("closed", print)
        with fails("bad_options"):
            await client.broadcast("open", print, history=1, snapshot=True)
        with fails("bad_options"):
            await client.broadcast("open", print, queue_events=0)
        with fails("bad_topic"):
            await client.watch("open", print)
        with pytest.raises(TypeError, match="histori"):
            await client.broadcast("open", print, histori=1)  # type: ignore[call-arg]
        await client.broadcast("open", print)
        with fails("already_subscribed"):
            await client.broadcast("open", print)
    with fails("closed"):
        await client.broadcast("open", print)


async def test_a_new_token_that_forbids_a_broadcast_ends_it(hub: Hub) -> None:
    kept, gone, news, asked = new_topic(), new_topic(), News(), 0

    def token() -> str:
        nonlocal asked
        asked += 1
        return jwt([f"subscribe:{kept}", f"subscribe:{gone}"], 3) if asked == 1 else jwt([f"subscribe:{kept}"])

    async with hub.open(token=token, **FAST) as client, hub.open() as writer:
        client.on("error", lambda error: None)
        await client.broadcast(kept, news.event)
        broadcast = await client.broadcast(gone, news.event)
        error = await broadcast.wait_closed()
        assert error is not None and error.code == "forbidden"
        await writer.publish(kept, 1)
        await news.wants(1)


async def test_handlers_fail_end_their_broadcast_and_finish(hub: Hub) -> None:
    topic, news, errors = new_topic(), News(), []
    client = await hub.open()
    client.on("error", errors.append)

    async def handle(e: BroadcastEvent[Any]) -> None:
        if e.event.payload == 1:
            raise ValueError("oh")
        news.event(e)
        if e.event.payload == 3:
            await broadcast.unsubscribe()

    broadcast = await client.broadcast(topic, handle)
    for i in range(1, 6):
        await client.publish(topic, i)
    assert await broadcast.wait_closed() is None
    assert news.all == [2, 3] and "ValueError('oh')" in str(errors[0])

    # The hub may hear of an event after it has answered its publish.
    heard = asyncio.Event()

    async def until_the_last(e: BroadcastEvent[Any]) -> None:
        if e.event.payload == 5:
            heard.set()

    whole = await client.broadcast(topic, until_the_last, history=5)
    await heard.wait()
    await whole.unsubscribe()
    begun, release = asyncio.Event(), asyncio.Event()

    async def slow(e: BroadcastEvent[Any]) -> None:
        begun.set()
        await release.wait()
        news.event(e)

    await client.broadcast(topic, slow, history=1)
    await begun.wait()
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    release.set()
    await closing
    assert news.all[:2] == [2, 3] and len(news.all) == 3


class Watched:
    """What a watch tells."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.resets: list[str] = []
        self.current = 0

    def change(self, c: Change[Any]) -> None:
        if c.deleted:
            del self.values[c.key]
        else:
            self.values[c.key] = c.value

    @property
    def options(self) -> Any:
        def current() -> None:
            self.current += 1

        return {"on_current": current, "on_reset": lambda reset: self.resets.append(reset.reason)}

    async def wants(self, values: dict[str, Any], current: int, *resets: str) -> None:
        await eventually(f"{values}, {current}", lambda: (self.values, self.current) == (values, current), 30)
        assert self.resets == list(resets)


async def test_watch_gives_the_state_each_change_and_a_snapshot_after_each_reset(small: Hub) -> None:
    topic, state = f"c.{new_topic()[2:]}", Watched()
    async with pair(small) as (proxy, client, writer):
        for key in ("a", "b", "c"):
            await writer.publish(topic, 1, key=key)
        await writer.publish(topic, None, key="null")
        await stored(small, topic, {"a": 1, "b": 1, "c": 1, "null": None})
        await client.watch(topic, state.change, **state.options)
        await state.wants({"a": 1, "b": 1, "c": 1, "null": None}, 1)
        seen = News()
        other = await writer.broadcast(topic, seen.event, slow="catchup", **seen.options)
        async with lost(proxy, client):
            await writer.publish(topic, None, key="c", tombstone=True)
        await writer.publish(topic, 2, key="d")
        await state.wants({"a": 1, "b": 1, "d": 2, "null": None}, 1)
        async with lost(proxy, client):
            await writer.publish(topic, None, key="b", tombstone=True)
            for i in range(100):
                await writer.publish(topic, i, key="a")
            await stored(small, topic, {"a": 99, "d": 2, "null": None})
            await seen.ends_with("a=99")
        await state.wants({"a": 99, "d": 2, "null": None}, 2, "too_far")
        writer.on("error", lambda error: None)
        async with lost(proxy, client):
            await small.request("DELETE", f"/topics/{topic}")
            await other.wait_closed()
            await writer.publish(topic, 4, key="e")
            await stored(small, topic, {"e": 4})
        await state.wants({"e": 4}, 3, "too_far", "stream_changed")


async def test_watch_is_right_over_cuts_anywhere(small: Hub) -> None:
    topic, state, want, cuts = f"c.{new_topic()[2:]}", Watched(), {}, 0
    async with pair(small) as (proxy, client, writer):

        def changed(to: str, _: object) -> None:
            nonlocal cuts
            cuts += to == "waiting"

        async def change() -> None:
            key = f"k{random.randrange(50)}"
            if key in want and random.randrange(3) == 0:
                del want[key]
                await writer.publish(topic, None, key=key, tombstone=True)
            else:
                want[key] = random.randrange(10**6)
                await writer.publish(topic, want[key], key=key)

        for _ in range(100):
            await change()
        client.on("state", changed)
        await client.watch(topic, state.change, **state.options)
        while cuts < 15:
            if proxy.budget is None:
                proxy.budget = random.randrange(10_000)
            await change()
        proxy.budget = None
        await change()
        await eventually("the state", lambda: state.values == want)


async def test_a_watch_of_too_many_keys_ends_with_a_clear_error(small: Hub) -> None:
    topic, state = f"c.{new_topic()[2:]}", Watched()
    async with small.open() as client:
        client.on("error", lambda error: None)
        watch = await client.watch(topic, state.change, max_keys=2)
        for key in ("a", "b"):
            await client.publish(topic, 1, key=key)
        await eventually("two keys", lambda: len(state.values) == 2)
        await client.publish(topic, 1, key="c")
        error = await watch.wait_closed()
        assert error is not None and str(error) == f"buffer_full: {topic} has more than 2 keys; raise max_keys"


# -- the queue


def event(n: int, key: str | None = None, snapshot: bool = False) -> BroadcastEvent[int]:
    return BroadcastEvent(Event(str(n), 0, "t", n, key), str(n), snapshot)


def test_the_queue_keeps_its_bounds_and_accounts_for_what_it_leaves_out() -> None:
    queue = Queue(3, 100, 2, False)
    assert queue.add(event(1, snapshot=True), 1, "") and queue.add(event(2, snapshot=True), 1, "")
    assert not queue.add(event(3, snapshot=True), 1, "")
    queue.add_presence(Presence(1, ["a"], []))
    queue.add_presence(Presence(2, ["b"], []))
    queue.add_reset(Reset("truncated"))
    queue.add_reset(Reset("too_far"))
    assert queue.add(event(4), 1, "3") and not queue.add(event(5), 1, "4")
    queue.skip()
    queue.add_gap(Gap("4", "9", 5))
    got = [queue.pop().what for _ in range(len(queue))]
    assert got == [event(1, snapshot=True), event(2, snapshot=True), Presence(2, ["b"], []), Reset("too_far"), Gap("3", "9", 6)]
    queue.add_gap(Gap("1", "2", 0))
    queue.add_gap(Gap("2", "4", 2))
    assert queue.pop().what == Gap("1", "4", 0)
    big = Queue(10, 100, 2, True)
    assert big.add(event(1), 1000, "0") and not big.add(event(2), 1, "1")
    big.clear()
    assert big.add(event(1, "k"), 60, "0") and big.add(event(2, "k"), 60, "1")
    assert [big.pop().what for _ in range(len(big))] == [event(2, "k")]
