"""Follows a topic live, without a group."""

import asyncio
import os
import uuid

from eventhub_client import BroadcastEvent, connect

URL = os.environ.get("EVENTHUB_URL", "ws://127.0.0.1:8090")
TOPIC = f"prices.{uuid.uuid4()}"  # a new topic each time


async def main() -> None:
    async with connect(URL, token=os.environ["EVENTHUB_TOKEN"]) as hub:
        await hub.publish(TOPIC, 100, key="tea")
        last = asyncio.Event()

        def show(e: BroadcastEvent[int]) -> None:
            print(e.event.key, "costs", e.event.payload)
            if e.event.payload == 101:
                last.set()

        await hub.broadcast(
            TOPIC,
            show,
            history=10,
            on_gap=lambda gap: print("missed", gap.missed),
            on_reset=lambda reset: print("missed an unknown number:", reset.reason),
        )
        await hub.publish(TOPIC, 101, key="tea")
        await last.wait()


asyncio.run(main())
# Prints: tea costs 100
# Prints: tea costs 101
