"""Kills the hub and cuts connections at random while events flow both ways.

CHAOS_EVENTS (2,000), CHAOS_CUTS (20) and CHAOS_KILLS (1) say how much; `task python:chaos` with
100000, 1000 and 50 is the long form. CHAOS_SEED repeats the same order of faults.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import random
import time
from typing import Any

from hubs import DurableHub, eventually, new_topic
from proxy import Proxy

from eventhub_client import Delivery, EventHubError, HttpHub, State, connect, replay

EVENTS = int(os.environ.get("CHAOS_EVENTS", "2000"))
CUTS = int(os.environ.get("CHAOS_CUTS", "20"))
KILLS = int(os.environ.get("CHAOS_KILLS", "1"))
SEED = int(os.environ.get("CHAOS_SEED", str(time.time_ns() % 1_000_000)))
PATIENCE = 60 + CUTS + KILLS * 10
MAX_IN_FLIGHT = 50


async def test_chaos(program: None, tmp_path: pathlib.Path) -> None:
    print(f"{EVENTS} events, {CUTS} cuts and {KILLS} kills, seed {SEED}")
    rnd = random.Random(SEED)
    topic = new_topic()
    began = time.monotonic()

    # Consume: how often each event was handled, and whether a handler ever ran beside itself.
    runs: dict[str, int] = {}
    running: set[str] = set()
    beside = breaks = 0
    lately: list[float] = []  # when handlers ended, most recent last
    in_flight = 0  # at the breaks: so many may come twice

    async def handle(delivery: Delivery[int]) -> None:
        nonlocal beside
        event_id = delivery.event.id
        if event_id in running:
            beside += 1
        running.add(event_id)
        await asyncio.sleep(rnd.uniform(0.001, 0.021) if rnd.random() < 0.02 else 0)
        running.discard(event_id)
        runs[event_id] = runs.get(event_id, 0) + 1
        lately.append(time.monotonic())

    def changed(state: State, error: EventHubError | None) -> None:
        nonlocal breaks, in_flight
        if state == "waiting":
            breaks += 1
            in_flight += MAX_IN_FLIGHT

    # Publish: which events were answered, and which may or may not be stored.
    answered: dict[int, str] = {}
    unknown: set[int] = set()
    numbers = iter(range(EVENTS))

    async def lane(publisher: Any) -> None:
        for n in numbers:
            while True:
                try:
                    answered[n] = await publisher.publish(topic, n)
                    break
                except EventHubError as error:
                    if error.code == "outcome_unknown":
                        unknown.add(n)
                        break
                    if not error.retryable:
                        raise
            await asyncio.sleep(rnd.random() * 0.004)  # spreads the events over the faults

    options: Any = {"min_pause_ms": 10, "max_pause_ms": 100, "attempt_timeout_ms": 5_000}
    async with (
        DurableHub(tmp_path) as hub,
        Proxy(hub.websocket) as to_publish,
        Proxy(hub.websocket) as to_consume,
        connect(to_publish.url, token=hub.token, **options) as publisher,
        connect(to_consume.url, token=hub.token, **options) as consumer,
    ):
        subscription = await consumer.subscribe(topic, "g", handle, max_attempts=0, max_in_flight=MAX_IN_FLIGHT)
        consumer.on("state", changed)
        published = asyncio.gather(*(lane(publisher) for _ in range(64)))

        # Break: each fault comes when its share of the events has been published.
        faults = sorted((rnd.random() * EVENTS, kind) for kind in ["cut"] * CUTS + ["kill"] * KILLS)
        cuts = 0
        for at, kind in faults:
            share = min(at, EVENTS - 64)
            await eventually(
                f"{share} events were published", lambda: published.done() or len(answered) + len(unknown) >= share, PATIENCE
            )
            if published.done():
                published.result()
            if kind == "cut":
                cuts += 1
                proxy, client = (to_publish, publisher) if cuts % 2 else (to_consume, consumer)
                async with asyncio.timeout(PATIENCE):
                    await client.ready()  # so that there is a connection to cut
                proxy.cut()
            else:
                # A killed hub may also deliver again what was acknowledged in its last moments.
                since = time.monotonic() - 0.5
                in_flight += sum(1 for ended in lately[-10_000:] if ended >= since)
                await hub.kill()
                await hub.start()
        await published

        stored: dict[int, str] = {}
        async for event in replay(HttpHub(hub.http, hub.token), topic):
            assert event.payload not in stored, f"event {event.payload} is stored twice"
            stored[event.payload] = event.id
        for n, event_id in answered.items():
            assert stored.get(n) == event_id, f"event {n} was answered, and is not stored"
        assert not stored.keys() - answered.keys() - unknown
        await eventually("every stored event was handled", lambda: len(runs) >= len(stored), PATIENCE)
        await subscription.drain()
    assert set(runs) == set(stored.values())
    twice = sum(runs.values()) - len(runs)
    print(f"stored {len(stored)}, answered {len(answered)}, unknown {len(unknown)}; handled again {twice} of at most {in_flight}")
    print(f"{cuts} cuts, {breaks} breaks of the consumer, {time.monotonic() - began:.0f} s")
    assert beside == 0, "a handler ran beside itself"
    assert twice <= in_flight, f"{twice} events were handled again; {in_flight} were in flight at {breaks} breaks"
