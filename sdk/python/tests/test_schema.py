from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

from hubs import Hub, eventually, new_topic

from eventhub_client import BroadcastEvent, Delivery


async def test_a_group_and_a_broadcast_get_events_in_the_version_that_they_ask_for(hub: Hub) -> None:
    topic = new_topic()
    drafts: list[dict[str, Any]] = [
        {"schema": {"type": "object", "required": ["host"]}},
        {"schema": {"type": "object", "required": ["name"]}, "up": [{"rename": {"at": "/host", "to": "name", "required": True}}], "force": True},
    ]
    for draft in drafts:
        await register(hub, topic, draft)
    got: dict[str, Any] = {}

    def note(name: str) -> Any:
        def handler(e: Delivery[Any] | BroadcastEvent[Any]) -> None:
            got[name] = e.event.payload

        return handler

    async with hub.open() as client:
        await client.subscribe(topic, "first", note("first"), schema_version=1)
        await client.subscribe(topic, "latest", note("latest"), schema_version="latest")
        await client.broadcast(topic, note("broadcast"), schema_version=2)
        await client.publish(topic, {"host": "a"})
        await eventually("all have the event", lambda: len(got) == 3)
    assert got == {"first": {"host": "a"}, "latest": {"name": "a"}, "broadcast": {"name": "a"}}


async def register(hub: Hub, topic: str, draft: dict[str, Any]) -> None:
    """Registers a version."""
    request = urllib.request.Request(f"{hub.http}/schemas/{topic}", json.dumps(draft).encode(), {"Authorization": f"Bearer {hub.token}"})

    def answer() -> int:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)

    assert await asyncio.to_thread(answer) == 201
