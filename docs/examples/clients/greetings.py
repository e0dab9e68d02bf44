"""Prints every greeting, and sends one of its own. It needs the package websockets."""

import asyncio
import json
import os
import sys
from pathlib import Path

import websockets

URL = os.environ.get("EVENTHUB_URL", "ws://127.0.0.1:8090")
TOKEN = os.environ.get("EVENTHUB_TOKEN") or os.environ.get("WS_TOKEN")
TOKEN = TOKEN or Path("eventhub-data/token").read_text().strip()
PLACE = {"topic": "greetings", "group": "python"}


async def main():
    greeted = False
    # The loop connects again, with growing pauses.
    async for hub in websockets.connect(URL, max_size=8 << 20):

        async def send(**frame):
            await hub.send(json.dumps(frame))

        try:
            await send(op="AUTH", token=TOKEN, corr="auth")
            await send(op="SUBSCRIBE", **PLACE, corr="subscribe")
            if not greeted:
                opts = {"id": f"hello-python-{os.getpid()}"}  # with an id, it is safe to repeat
                await send(op="PUBLISH", topic=PLACE["topic"], payload="hello from Python",
                           opts=opts, corr="hello")
            async for message in hub:
                frame = json.loads(message)
                if frame["op"] == "EVENT":
                    print(frame["event"]["payload"], flush=True)
                    await send(op="ACK", **PLACE, id=frame["event"]["id"])
                elif frame["op"] == "ERR":
                    print(frame.get("corr"), frame["code"], frame["msg"], file=sys.stderr)
                elif frame.get("corr") == "hello":
                    greeted = True
        except websockets.ConnectionClosed:
            pass
        if 4100 <= (hub.close_code or 0) <= 4199:
            sys.exit(f"the hub closed the connection for good: {hub.close_code} {hub.close_reason}")


try:
    asyncio.run(main())
except KeyboardInterrupt:
    pass
