"""Publishes an order, and handles it. Run it with EVENTHUB_TOKEN set to the hub's token."""

import asyncio
import os

from eventhub_client import Delivery, connect

URL = os.environ.get("EVENTHUB_URL", "ws://127.0.0.1:8090")


async def main() -> None:
    async with connect(URL, token=os.environ["EVENTHUB_TOKEN"]) as hub:
        mailed = asyncio.Event()

        async def mail(delivery: Delivery) -> None:
            print(f"mail for order {delivery.event.payload['order']}")  # its end acknowledges the event
            mailed.set()

        await hub.subscribe("orders.placed", "mailer", mail)
        await hub.publish("orders.placed", {"order": 7}, key="customer:1")
        await mailed.wait()


asyncio.run(main())
# Prints: mail for order 7
