"""Gets its tokens from a function, and watches the connection."""

import asyncio
import logging
import os

from eventhub_client import connect

URL = os.environ.get("EVENTHUB_URL", "ws://127.0.0.1:8090")


async def token() -> str:
    """Asks the service that gives out tokens. It is asked again before a JWT expires."""
    await asyncio.sleep(0)
    return os.environ["EVENTHUB_TOKEN"]


async def main() -> None:
    async with connect(URL, token=token) as hub:
        hub.on("state", lambda state, error: print(f"{state}: {error}" if error else state))
        hub.on("notice", lambda notice: logging.warning("%s missed events", notice.group))
        hub.on("error", lambda error: logging.error("%s", error))
        await hub.publish("orders.placed", {"order": 7})


asyncio.run(main())
# Prints: closed: closed: The client is closed.
