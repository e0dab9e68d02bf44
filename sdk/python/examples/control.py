"""Limits the handlers that run at a time, pauses, and drains at the end."""

import asyncio
import os

from eventhub_client import Delivery, connect

URL = os.environ.get("EVENTHUB_URL", "ws://127.0.0.1:8090")


async def main() -> None:
    async with connect(URL, token=os.environ["EVENTHUB_TOKEN"]) as hub:
        running = most = done = 0
        finished = asyncio.Event()

        async def resize(delivery: Delivery) -> None:
            nonlocal running, most, done
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)  # the lease lives as long as the handler
            running -= 1
            done += 1
            if done == 20:
                finished.set()

        async with await hub.subscribe("pictures.added", "resizer", resize, concurrency=4) as subscription:
            await subscription.pause()
            await hub.publish_many("pictures.added", [{"payload": n} for n in range(20)])
            print(f"{done} while it was paused")
            await subscription.resume()
            await finished.wait()
        print(f"{done}, {most} at a time")  # the block has drained the subscription


asyncio.run(main())
# Prints: 0 while it was paused
# Prints: 20, 4 at a time
