"""Ordered groups: slots, and one event of a key at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from hubs import FAST, Hub, eventually, fails, new_topic
from proxy import Proxy

from eventhub_client import Delivery, connect

KEYS = [f"key-{i}" for i in range(40)]


class Slots:
    """The slots of a member, as it was told."""

    def __init__(self) -> None:
        self.of: dict[str, Sequence[int]] = {}
        self.epochs: dict[str, int] = {}
        self.told = 0
        self.rising = True

    def assign(self, topic: str, slots: Sequence[int], epoch: int) -> None:
        self.rising &= epoch > self.epochs.get(topic, 0)
        self.of[topic], self.epochs[topic] = slots, epoch
        self.told += 1


async def test_a_member_has_the_slots_of_its_events_on_each_of_its_topics(hub: Hub) -> None:
    topics = [new_topic(), new_topic()]
    own = Slots()
    got: list[tuple[str | None, bool, bool]] = []

    def handler(d: Delivery[Any]) -> None:
        slot = d.event.partition
        got.append((d.event.key, slot in own.of.get(d.event.topic, ()), slot is None))

    async with hub.open(**FAST) as client:
        await client.subscribe(topics[0], "g", handler, ordered="key", slots=8, topics=topics[1:], on_assign=own.assign)
        for topic in topics:
            await client.publish_many(topic, [*({"payload": 1, "key": key} for key in KEYS), {"payload": 1}])
        await eventually("all events came", lambda: len(got) == 2 * (len(KEYS) + 1))
        slots = [list(own.of[topic]) for topic in topics]  # a member that leaves is told that it has none
    for key, has, none in got:
        assert (has, none) == ((False, True) if key is None else (True, False)), key
    assert own.rising
    assert slots == [list(range(8))] * 2


async def test_members_share_the_slots_and_the_events_of_a_key_come_one_at_a_time_and_in_order(hub: Hub) -> None:
    topic = new_topic()
    each = 20
    last: dict[str, int] = {}
    busy: set[str] = set()
    wrong: list[str] = []
    done = 0
    a, b = Slots(), Slots()

    def handler(own: Slots):  # type: ignore[no-untyped-def]
        async def handle(d: Delivery[Any]) -> None:
            nonlocal done
            key = d.event.key
            assert key is not None
            if key in busy:
                wrong.append(f"two events of {key} at a time")
            busy.add(key)
            if d.event.partition not in own.of[topic]:
                wrong.append(f"{key} of another's slot {d.event.partition}")
            if d.event.payload != last.get(key, 0) + 1:
                wrong.append(f"{key}: {d.event.payload} after {last.get(key)}")
            await asyncio.sleep(random.random() * 0.004)
            last[key] = d.event.payload
            busy.remove(key)
            done += 1

        return handle

    async with hub.open(**FAST) as one, hub.open(**FAST) as two:
        first = await one.subscribe(topic, "g", handler(a), ordered="key", concurrency=16, on_assign=a.assign)
        await two.subscribe(topic, "g", handler(b), ordered="key", concurrency=16, on_assign=b.assign)
        await eventually("each has half of the slots", lambda: [len(s.of.get(topic, ())) for s in (a, b)] == [32, 32])

        async def publish() -> None:
            for n in range(1, each + 1):
                await two.publish_many(topic, [{"payload": n, "key": key} for key in KEYS])

        publishing = asyncio.create_task(publish())
        await eventually("events came", lambda: done > 4 * len(KEYS))
        await first.drain()
        await eventually("the other has all slots", lambda: len(b.of[topic]) == 64)
        await publishing
        await eventually("all events were handled", lambda: done == each * len(KEYS))
    assert wrong == []
    assert a.rising and b.rising


async def test_a_member_is_told_its_slots_again_after_a_reconnect(hub: Hub) -> None:
    topic = new_topic()
    own = Slots()
    got: list[str] = []
    async with Proxy(hub.websocket) as proxy, hub.open(**FAST) as publisher:
        async with connect(proxy.url, token=hub.token, **FAST) as client:
            await client.subscribe(topic, "g", lambda d: got.append(d.event.payload), ordered="key", slots=2, on_assign=own.assign)
            await eventually("the slots are known", lambda: len(own.of.get(topic, ())) == 2)
            told = own.told
            await proxy.cut_once(client)
            await eventually("the slots are told again", lambda: own.told > told and len(own.of[topic]) == 2)
            await publisher.publish(topic, "after", key="k")
            await eventually("the event came", lambda: "after" in got)
    assert own.rising


async def test_a_member_that_takes_an_ordered_group_for_another_is_refused_at_once(hub: Hub) -> None:
    topic = new_topic()
    async with hub.open(**FAST) as one, hub.open(**FAST) as two:
        await one.subscribe(topic, "ordered", print, ordered="key")
        await one.subscribe(topic, "plain", print)
        with fails("subscribe_failed", retryable=False):
            await two.subscribe(topic, "ordered", print)
        with fails("subscribe_failed", retryable=False):
            await two.subscribe(topic, "plain", print, ordered="key")
