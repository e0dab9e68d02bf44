"""Settles events by hand, and looks at the events that failed for good."""

import asyncio
import os

from eventhub_client import Delivery, connect

URL = os.environ.get("EVENTHUB_URL", "ws://127.0.0.1:8090")


async def main() -> None:
    async with connect(URL, token=os.environ["EVENTHUB_TOKEN"]) as hub:
        seen = asyncio.Event()

        def ship(delivery: Delivery) -> None:
            if delivery.event.payload["stock"] > 0:
                delivery.ack()
            else:
                delivery.nack("out of stock", delay_ms=10)  # comes again, twice at most

        def failed(delivery: Delivery) -> None:
            letter = delivery.event.payload
            print(f"order {letter['original']['payload']['order']}: {letter['err']}, {letter['attempts']} attempts")
            seen.set()

        await hub.subscribe("dlq.orders.paid", "operators", failed)
        await hub.subscribe("orders.paid", "shipper", ship, ack="manual", max_attempts=2)
        await hub.publish("orders.paid", {"order": 7, "stock": 1})
        await hub.publish("orders.paid", {"order": 8, "stock": 0})
        await seen.wait()


asyncio.run(main())
# Prints: order 8: out of stock, 2 attempts
