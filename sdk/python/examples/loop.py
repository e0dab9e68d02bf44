"""Reads a topic in a loop, and publishes many events at once."""

import asyncio
import os

from eventhub_client import connect

URL = os.environ.get("EVENTHUB_URL", "ws://127.0.0.1:8090")


async def main() -> None:
    async with connect(URL, token=os.environ["EVENTHUB_TOKEN"]) as hub:
        await hub.publish_many("numbers", ({"payload": i} for i in range(1, 1001)))

        total = 0
        async with hub.events("numbers", "adder", from_="earliest") as events:
            async for delivery in events:
                total += delivery.event.payload
                if delivery.event.payload == 1000:
                    delivery.ack()  # leaving the loop would give this event back
                    break
        print(total)


asyncio.run(main())
# Prints: 500500
