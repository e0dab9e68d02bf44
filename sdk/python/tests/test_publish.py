from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hubs import FAST, Hub, closing, eventually, fails, jwt, new_topic
from proxy import Proxy

from eventhub_client import Client, Delivery, Outgoing, connect


def payloads(events: list[Any]) -> list[Any]:
    return [event.payload for event in events]


async def test_publish_returns_the_id_of_the_stored_event(hub: Hub) -> None:
    topic = new_topic()
    async with hub.open() as client:
        event_id = await client.publish(topic, {"n": 1}, key="k", headers={"x-a": "b"}, tags=["t"], caused_by=["c"], sid="s", ts=7)
        assert await client.publish(topic, "zwölf 🦆", id="order-1", key=None) == "order-1"
        assert await client.publish(topic, None, extra={"id": "none"}) == "none"
        await client.publish(topic, 10**30)
    first, second, third, fourth = await hub.stored(topic)
    assert re.fullmatch("[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", event_id)
    assert (first.id, first.ts, first.topic, first.payload) == (event_id, 7, topic, {"n": 1})
    assert (first.key, first.sid, first.headers, first.caused_by, first.tags) == ("k", "s", {"x-a": "b"}, ["c"], ["t"])
    assert (second.payload, second.key, third.payload, fourth.payload) == ("zwölf 🦆", None, None, 10**30)


async def test_a_refused_publish_raises_the_code_of_the_hub(hub: Hub) -> None:
    async with hub.open(token=jwt(["publish:allowed.*"])) as client:
        with fails("forbidden", retryable=False):
            await client.publish("other", 1)
        with fails("bad_topic", retryable=False):
            await client.publish("a..b", 1)
        with fails("bad_options", retryable=False):
            await client.publish("allowed.x", 1, ts="yesterday")
        with fails("publish_failed", retryable=False):
            await client.publish("allowed.x", "x" * 1_100_000)
        with fails("publish_failed", retryable=False):
            await client.publish("allowed.x", "x" * 5_000_000)
        cycle: dict[str, Any] = {}
        cycle["self"] = cycle
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        for payload in (object(), {1, 2}, cycle, float("nan"), "\ud800", deep):
            with fails("invalid", retryable=False):
                await client.publish("allowed.x", payload)
        with pytest.raises(TypeError, match="unexpected keyword argument 'kee'"):
            await client.publish("allowed.x", 1, kee="k")
        assert client.pending == 0
        await client.publish("allowed.x", "still works")


async def test_publish_many_keeps_the_order_and_takes_no_more_than_it_may_have_on_their_way(hub: Hub) -> None:
    topic = new_topic()
    # Fewer than the hub takes at once, and by a client of its own: what it refuses comes later.
    async with hub.open(token=jwt(["publish:**"], sub=topic)) as client:
        most = 0

        async def source() -> AsyncIterator[Outgoing]:
            nonlocal most
            for i in range(1_500):
                most = max(most, client.pending)
                yield {"payload": i}

        ids = await client.publish_many(topic, source(), in_flight=50)
    assert 10 < most <= 50
    events = await hub.stored(topic)
    assert payloads(events) == list(range(1_500))
    assert [event.id for event in events] == ids


async def test_publish_many_waits_for_room_in_the_buffer(hub: Hub) -> None:
    topic = new_topic()
    async with hub.open(buffer_bytes=10_000) as client:
        await client.publish_many(topic, [{"payload": "x" * 1_000, "key": str(i)} for i in range(100)])
        with fails("buffer_full"):
            await client.publish_many(topic, [{"payload": "x" * 10_000}])
    assert [event.key for event in await hub.stored(topic)] == [str(i) for i in range(100)]


async def test_publish_many_stops_at_the_first_failure(hub: Hub) -> None:
    topic = new_topic()
    taken = 0

    def source() -> Iterator[Outgoing]:
        nonlocal taken
        for taken in range(1_000):
            yield {"payload": taken, "id": ""} if taken == 20 else {"payload": taken}

    async with hub.open() as client:
        with fails("bad_options", retryable=False):
            await client.publish_many(topic, source(), in_flight=10)
        assert 20 <= taken <= 40
        assert client.pending == 0

        def failing() -> Iterator[Outgoing]:
            yield {"payload": "before"}
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await client.publish_many(topic, failing())


async def test_more_publishes_than_the_quota_allows_are_all_stored(hub: Hub) -> None:
    topic = new_topic()
    async with hub.open(token=jwt(["publish:**"], sub="eager")) as client:
        ids = await asyncio.gather(*(client.publish(topic, i) for i in range(8_000)))
    assert len(set(ids)) == 8_000
    assert {event.id for event in await hub.stored(topic)} == set(ids)


async def test_without_a_connection_publishes_wait_in_a_bounded_buffer(hub: Hub) -> None:
    topic = new_topic()
    async with Proxy(hub.websocket) as proxy:
        proxy.refusing = True
        async with Client(proxy.url, token=hub.token, buffer_events=3, buffer_bytes=1_000, **FAST) as client:
            some = [asyncio.create_task(client.publish(topic, i)) for i in (1, 2, 3)]
            await asyncio.sleep(0)
            with fails("buffer_full", retryable=True):
                await client.publish(topic, 4)
            async with closing(Client(proxy.url, token=hub.token, buffer_bytes=1_000, **FAST)) as other:
                with fails("buffer_full", retryable=True):
                    await other.publish(topic, "x" * 1_000)
            proxy.refusing = False
            await asyncio.gather(*some)
    assert payloads(await hub.stored(topic)) == [1, 2, 3]


async def test_a_publish_in_doubt_is_sent_again_and_stored_once(hub: Hub) -> None:
    topic = new_topic()
    async with Proxy(hub.websocket) as proxy, connect(proxy.url, token=hub.token, **FAST) as client:
        await client.publish(topic, 0)
        proxy.deaf = True  # the hub stores the event, and its answer is lost
        doubtful = asyncio.gather(client.publish(topic, 1), client.publish(topic, 2))

        async def stored() -> bool:
            return len(await hub.stored(topic)) == 3

        await eventually("the hub has stored both", stored)
        proxy.deaf = False
        proxy.cut()
        ids = await doubtful
    events = await hub.stored(topic)
    assert payloads(events) == [0, 1, 2]
    assert [event.id for event in events[1:]] == ids


async def test_a_publish_in_doubt_beyond_the_duplicate_window_is_outcome_unknown_and_not_sent_again(hub: Hub) -> None:
    topic = new_topic()
    async with Proxy(hub.websocket) as proxy, connect(proxy.url, token=hub.token, duplicate_window_ms=300, **FAST) as client:
        await client.publish(topic, 0)
        proxy.deaf = True
        doubtful = asyncio.create_task(client.publish(topic, 1))

        async def stored() -> bool:
            return len(await hub.stored(topic)) == 2

        await eventually("the hub has stored it", stored)
        proxy.refusing = True
        proxy.cut()
        with fails("outcome_unknown", retryable=False):
            await doubtful
        proxy.refusing = proxy.deaf = False
        await client.publish(topic, 2)
    assert payloads(await hub.stored(topic)) == [0, 1, 2]


async def test_cancelling_takes_back_a_publish_that_was_not_sent(hub: Hub) -> None:
    topic = new_topic()
    async with Proxy(hub.websocket) as proxy:
        proxy.refusing = True
        async with Client(proxy.url, token=hub.token, **FAST) as client:
            waiting = asyncio.create_task(client.publish(topic, "never"))
            many = asyncio.create_task(client.publish_many(topic, [{"payload": "never"}] * 3))
            kept = asyncio.create_task(client.publish(topic, "kept"))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await client.publish(topic, "never")
            waiting.cancel()
            many.cancel()
            await asyncio.wait([waiting, many])
            assert waiting.cancelled() and many.cancelled()
            proxy.refusing = False
            await kept
            assert client.pending == 0
    assert payloads(await hub.stored(topic)) == ["kept"]


async def test_close_waits_for_publishes_and_later_ones_are_refused(hub: Hub) -> None:
    topic = new_topic()
    client = await hub.open()
    publishes = [asyncio.create_task(client.publish(topic, i)) for i in range(500)]
    await asyncio.sleep(0)
    await client.close()
    await client.close()
    assert len(set(await asyncio.gather(*publishes))) == 500
    with fails("closed", retryable=False):
        await client.publish(topic, 1)
    with fails("closed", retryable=False):
        await client.subscribe(topic, "g", print)
    with fails("closed"):
        await client.ready()
    assert client.state == "closed"


async def test_a_close_that_cannot_drain_says_what_is_not_known(hub: Hub) -> None:
    topic = new_topic()
    async with Proxy(hub.websocket) as proxy, connect(proxy.url, token=hub.token, **FAST) as client:
        proxy.deaf = True
        doubtful = asyncio.create_task(client.publish(topic, 1))

        async def stored() -> bool:
            return len(await hub.stored(topic)) == 1

        await eventually("the hub has stored it", stored)
        proxy.refusing = True
        proxy.cut()
        await eventually("the client has noticed", lambda: client.state != "ready")
        waiting = asyncio.create_task(client.publish(topic, 2))
        await asyncio.sleep(0)
        await client.close(50)
        with fails("outcome_unknown", retryable=False):
            await doubtful
        with fails("closed", retryable=False):
            await waiting


@dataclasses.dataclass
class Order:
    n: int


def order(payload: Any) -> Order:
    if isinstance(payload, Order):
        return payload
    if not isinstance(payload["n"], int):
        raise ValueError("n must be a number")
    return Order(payload["n"])


async def test_payloads_are_checked_and_what_the_check_makes_of_them_is_sent_and_handled(hub: Hub) -> None:
    topic = new_topic()
    letters: list[Any] = []
    handled: list[Any] = []

    def letter(delivery: Delivery[Any]) -> None:
        letters.append(delivery.event.payload)

    def handle(delivery: Delivery[Order]) -> None:
        handled.append(delivery.event.payload)

    async with hub.open(schemas={topic: order}, default=dataclasses.asdict) as client, hub.open() as other:
        with fails("invalid") as raised:
            await client.publish(topic, {"n": "1"})
        assert raised.value.message == "The payload does not fit: n must be a number"
        await client.publish(topic, {"n": 1, "extra": True})
        await client.publish(topic, Order(2))
        assert payloads(await hub.stored(topic)) == [{"n": 1}, {"n": 2}]

        # An event that another client published is refused, and becomes a dead letter.
        await other.subscribe(f"dlq.{topic}", "operators", letter)
        await client.subscribe(topic, "g", handle, from_="earliest", max_attempts=1)
        await other.publish(topic, {"n": "3"})
        await eventually("a dead letter", lambda: letters)
        assert letters[0]["err"] == "invalid: The payload does not fit: n must be a number"
        assert handled == [Order(1), Order(2)]
