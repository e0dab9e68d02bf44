"""Checks payloads when they are published and before they are handled."""

import asyncio
import os
from dataclasses import asdict, dataclass
from typing import Any

from eventhub_client import Delivery, EventHubError, connect

URL = os.environ.get("EVENTHUB_URL", "ws://127.0.0.1:8090")


@dataclass
class Order:
    number: int


def order(payload: Any) -> Order:  # with pydantic: TypeAdapter(Order).validate_python
    if isinstance(payload, Order):
        return payload
    if not isinstance(payload.get("number"), int):
        raise ValueError("number must be an integer")
    return Order(payload["number"])


async def main() -> None:
    token = os.environ["EVENTHUB_TOKEN"]
    async with connect(URL, token=token, schemas={"orders.checked": order}, default=asdict) as hub:
        try:
            await hub.publish("orders.checked", {"number": "7"})
        except EventHubError as error:
            print(error)

        handled = asyncio.Event()

        def handle(delivery: Delivery[Order]) -> None:
            print(delivery.event.payload.number)
            handled.set()

        await hub.subscribe("orders.checked", "printer", handle)
        await hub.publish("orders.checked", Order(7))
        await handled.wait()


asyncio.run(main())
# Prints: invalid: The payload does not fit: number must be an integer
# Prints: 7
