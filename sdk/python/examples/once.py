"""Handles each event once, though it may be delivered twice."""

import asyncio
import os

from eventhub_client import Delivery, MemoryStore, connect, dedupe

URL = os.environ.get("EVENTHUB_URL", "ws://127.0.0.1:8090")


async def main() -> None:
    store = MemoryStore()  # a service keeps this in its database
    again = asyncio.Event()
    pay = dedupe(lambda delivery: print(f"paid {delivery.event.payload['order']}"), store)

    async def handle(delivery: Delivery) -> None:
        await pay(delivery)
        if delivery.attempt == 1:
            raise RuntimeError("the process fails after the payment")
        again.set()

    async with connect(URL, token=os.environ["EVENTHUB_TOKEN"]) as hub:
        await hub.subscribe("orders.due", "payer", handle)
        await hub.publish("orders.due", {"order": 7})
        await again.wait()


asyncio.run(main())
# Prints: paid 7
