"""Reads the latest record of a key, lists all keys, and replays a topic, over HTTP."""

import asyncio
import os

from eventhub_client import HttpHub, connect, latest, replay, snapshot

URL = os.environ.get("EVENTHUB_URL", "ws://127.0.0.1:8090")
HTTP = os.environ.get("EVENTHUB_HTTP", "http://127.0.0.1:8081")


async def main() -> None:
    token = os.environ["EVENTHUB_TOKEN"]
    async with connect(URL, token=token) as hub:
        await hub.publish("process.state", {"status": "alive"}, key="example:1")

    http = HttpHub(HTTP, token)
    record = await latest(http, "process.state", "example:1")
    print(record and record.payload["status"])

    keys = [event.key async for event in snapshot(http, "process.state")]
    print(keys.count("example:1") <= 1)  # a listing may lag behind

    async for event in replay(http, "process.state", key="example:1", limit=1):
        print(event.key)


asyncio.run(main())
# Prints: alive
# Prints: True
# Prints: example:1
