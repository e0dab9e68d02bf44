"""Programs that mypy must accept, and calls that it must refuse: run `mypy` in sdk/python."""

from __future__ import annotations

from typing import Any

from eventhub_client import Client, DedupeStore, Delivery, Event, HttpHub, MemoryStore, Subscription, connect, dedupe, latest, replay


class Order:
    number: int


async def accepted(url: str) -> None:
    async with connect(url, token="t", connect_timeout_ms=5_000, min_pause_ms=10) as hub:
        event_id: str = await hub.publish("t", {"n": 1}, key="k", headers={"a": "b"}, delay_ms=5)
        ids: list[str] = await hub.publish_many("t", [{"payload": 1, "key": "k"}, {"payload": event_id}])

        def plain(delivery: Delivery[Order]) -> None:
            number: int = delivery.event.payload.number
            delivery.nack(str(number), delay_ms=7)

        async def coroutine(delivery: Delivery[Any]) -> list[str]:
            return ids

        subscription: Subscription[Any] = await hub.subscribe("t", "g", plain, from_="earliest", concurrency=4)
        await hub.subscribe("t", "h", coroutine, ack="manual", topics=["u"])
        async with await hub.subscribe("t", "i", dedupe(plain, MemoryStore())):
            pass
        async for delivery in hub.events("t", "j", max_in_flight=1):
            delivery.ack()
        await subscription.drain(timeout_ms=5)
        off = hub.on("notice", lambda notice: print(notice.code))
        off()
    client: Client = await connect(url, token=lambda: "t")
    await client.close()
    record: Event[Any] | None = await latest(HttpHub("http://h", "t"), "t", "k")
    async for event in replay(HttpHub("http://h"), "t", from_="ts", ts=1):
        print(event.id, record)


async def refused(hub: Client) -> None:
    await hub.publish("t", 1, kee="k")  # type: ignore[call-arg]
    await hub.publish("t", 1, ts="now")  # type: ignore[arg-type]
    await hub.subscribe("t", "g", lambda delivery: None, from_="begin")  # type: ignore[arg-type]
    hub.events("t", "g", ack="manual")  # type: ignore[call-arg]
    hub.on("news", print)  # type: ignore[call-overload]
    store: DedupeStore = object()  # type: ignore[assignment]
    print(store)
