"""Publishes before there is a connection: events wait in a bounded buffer, also after a break."""

import asyncio
import os

from eventhub_client import Client

URL = os.environ.get("EVENTHUB_URL", "ws://127.0.0.1:8090")


async def main() -> None:
    async with Client(URL, token=os.environ["EVENTHUB_TOKEN"], buffer_events=100) as hub:  # does not wait for a connection
        before = hub.state
        await hub.publish("trains", "waits for a connection")
        print(f"published, and was not ready before: {before != 'ready'}")


asyncio.run(main())
# Prints: published, and was not ready before: True
