"""Stores an event later, and gives up waiting for a publish."""

import asyncio
import os
import time

from eventhub_client import connect

URL = os.environ.get("EVENTHUB_URL", "ws://127.0.0.1:8090")


async def main() -> None:
    async with connect(URL, token=os.environ["EVENTHUB_TOKEN"]) as hub, hub.events("reminders", "reader") as events:
        began = time.monotonic()
        async with asyncio.timeout(30):  # cancels the publish; an event that was sent may be stored
            await hub.publish("reminders", "call back", id="reminder-7", headers={"x-for": "ann"}, delay_ms=500)
        async for delivery in events:
            print(delivery.event.id, delivery.event.payload, time.monotonic() - began >= 0.5)
            delivery.ack()
            break


asyncio.run(main())
# Prints: reminder-7 call back True
