from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hubs import Hub, eventually, fails, new_topic

from eventhub_client import Delivery, HttpHub, MemoryStore, dedupe, latest, replay, snapshot


async def test_latest_reads_a_key_and_sees_what_was_published_before(hub: Hub) -> None:
    key = "py:a/b c?#%:1"
    async with hub.open() as client:
        assert await latest(hub.reads, "process.state", key) is None
        event_id = await client.publish("process.state", {"status": "alive"}, key=key)
        record = await latest(hub.reads, "process.state", key)
        assert record is not None and (record.id, record.key) == (event_id, key)
        await client.publish("process.state", None, key=key, tombstone=True)
        assert await latest(hub.reads, "process.state", key) is None


async def test_snapshot_gives_each_key_once_over_several_pages(hub: Hub) -> None:
    keys = {f"snapshot:{i}" for i in range(25)}

    async def listed() -> bool:
        found = [event.key async for event in snapshot(hub.reads, "process.state", page=10)]
        assert len(set(found)) == len(found)
        return keys <= set(found)

    async with hub.open() as client:
        await client.publish_many("process.state", [{"payload": key, "key": key} for key in keys])
        await eventually("the records are listed", listed)
        await client.publish("orders.placed", 1)
    with fails("bad_topic", retryable=False):
        await anext(snapshot(hub.reads, "orders.placed"))


async def test_replay_gives_what_is_stored_over_several_pages(hub: Hub) -> None:
    topic = new_topic()
    async with hub.open() as client:
        ids = await client.publish_many(topic, [{"payload": i, "headers": {"x-even": str(i % 2 == 0).lower()}} for i in range(25)])

    async def all_of(**options: Any) -> list[int]:
        return [event.payload async for event in replay(hub.reads, topic, **options)]

    numbers = list(range(25))
    assert await all_of(page=10) == numbers
    assert await all_of(page=5) == numbers
    assert await all_of(page=10, limit=12) == numbers[:12]
    assert await all_of(limit=0) == []
    assert await all_of(from_="afterId", after_id=ids[19]) == numbers[20:]
    assert await all_of(header="x-even:true", page=4) == numbers[::2]
    assert await all_of(header=["x-even:true", "x-other:1"]) == []
    assert await all_of(from_="ts", ts=1) == numbers
    with fails("bad_options"):
        await all_of(from_="ts")


async def test_a_refused_request_has_the_code_of_the_hub(hub: Hub) -> None:
    with fails("bad_token", retryable=False):
        await latest(HttpHub(hub.http, "wrong"), "process.state", "k")
    with fails("no_token"):
        await latest(HttpHub(hub.http), "process.state", "k")

    async def token() -> str:
        return hub.token

    assert await latest(HttpHub(hub.http + "/", token), "process.state", "no such key") is None
    with fails("connection_lost", retryable=True):
        await latest(HttpHub("http://127.0.0.1:1"), "process.state", "k")
    for address in ("ws://127.0.0.1:1", "127.0.0.1:8081", "file:///etc/passwd"):
        with fails("bad_options"):
            await latest(HttpHub(address), "process.state", "k")


async def test_a_silent_hub_is_given_up_and_a_request_can_be_cancelled() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    asked = asyncio.Event()
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with fails("connect_timeout", retryable=True):
        await latest(HttpHub(address, timeout_ms=50), "t", "k")
    asked.clear()
    request = asyncio.create_task(latest(HttpHub(address, timeout_ms=600_000), "t", "k"))
    await asked.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    server.close()
    await server.wait_closed()
    # The thread has ended, else this would wait for ten minutes.
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_answers_that_are_cut_or_no_json_are_errors_and_truncation_is_told() -> None:
    answers = iter([(200, "text"), (500, "text"), (404, ""), (200, '{"cut'), (200, '{"events":[],"truncated":true,"first":"7"}')])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        status, body = next(answers)
        length = len(body) + (100 if body == '{"cut' else 0)
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n\r\n{body}".encode())
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        at = HttpHub(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with fails("connection_lost"):
            await latest(at, "t", "k")
        with fails("internal"):
            await latest(at, "t", "k")
        assert await latest(at, "t", "k") is None
        with fails("connection_lost"):
            await latest(at, "t", "k")
        truncated: list[str | None] = []
        assert [event async for event in replay(at, "t", on_truncated=truncated.append)] == []
        assert truncated == ["7"]


async def test_dedupe_handles_an_event_once_and_a_failed_one_again(hub: Hub) -> None:
    topic = new_topic()
    store = MemoryStore(1_000)
    handled: list[int] = []
    failing = True
    came = 0

    def handle(d: Delivery[int]) -> None:
        nonlocal failing
        if d.event.payload == 2 and failing:
            failing = False
            raise ValueError("the first time")
        handled.append(d.event.payload)

    handler = dedupe(handle, store)

    async def counting(d: Delivery[int]) -> None:
        nonlocal came
        await handler(d)
        came += 1

    async with hub.open() as client:
        subscription = await client.subscribe(topic, "g", handler)
        first, _ = await client.publish_many(topic, [{"payload": 1}, {"payload": 2}])
        await eventually("both", lambda: len(handled) == 2)
        await subscription.drain()
        assert store.seen(topic, "g", first)
        assert not store.seen(topic, "another group", first)
        # The group is gone back to its beginning: nothing is handled anew.
        await hub.request("PUT", f"/groups/{topic}/g/cursor", {"to": "earliest"})
        await client.subscribe(topic, "g", counting)
        await eventually("both came again", lambda: came == 2)
    assert sorted(handled) == [1, 2]


async def test_a_store_may_wait() -> None:
    class Store:
        def __init__(self) -> None:
            self.ids: set[str] = set()

        async def seen(self, topic: str, group: str, event_id: str, /) -> bool:
            return event_id in self.ids

        async def mark(self, topic: str, group: str, event_id: str, ttl_ms: int, /) -> None:
            self.ids.add(event_id)

    class Once:
        group = "g"

        class event:
            topic, id = "t", "1"

    runs: list[Any] = []
    handler = dedupe(runs.append, Store())
    await handler(Once)  # type: ignore[arg-type]
    await handler(Once)  # type: ignore[arg-type]
    assert runs == [Once]


def test_a_store_in_memory_is_bounded_and_forgets_in_time() -> None:
    store = MemoryStore(2)
    for event_id in "abc":
        store.mark("t", "g", event_id, 60_000)
    assert [store.seen("t", "g", event_id) for event_id in "abc"] == [False, True, True]
    store.mark("t", "g", "c", -1)
    assert not store.seen("t", "g", "c")
