"""Decides by the code of an error."""

import asyncio
import os

from eventhub_client import EventHubError, connect

URL = os.environ.get("EVENTHUB_URL", "ws://127.0.0.1:8090")


async def main() -> None:
    async with connect(URL, token=os.environ["EVENTHUB_TOKEN"]) as hub:
        try:
            await hub.publish("orders..placed", {"order": 7})
        except EventHubError as error:
            print(error.code, error.retryable)


asyncio.run(main())
# Prints: bad_topic False
