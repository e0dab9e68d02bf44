"""The asyncio client of eventhub.

Publishes and consumes events of a hub, reconnects, renews its token, and repeats publishes in
doubt::

    async with connect("ws://127.0.0.1:8090", token=token) as hub:
        await hub.publish("orders.placed", {"order": 7}, key="customer:1")
"""

from .broadcast import Broadcast, BroadcastEvent, BroadcastHandler, BroadcastOptions, Change, Gap, Presence, Reset, WatchHandler, WatchOptions
from .client import Client, ClientOptions, Connecting, EventsOptions, Notice, connect
from .dedupe import DedupeStore, MemoryStore, dedupe
from .delivery import Delivery
from .errors import EventHubError, client_codes, hub_codes
from .events import Events
from .frames import Event, HubSubscribeOptions, Outgoing, PublishOptions, caps, client_ops, hub_ops
from .machine import Action, Input, State, Transition, step, table
from .reads import HttpHub, latest, replay, snapshot
from .subscription import Handler, SubscribeOptions, Subscription
from .tokens import TokenSource

__version__ = "0.1.0"

__all__ = [
    "Action",
    "Broadcast",
    "BroadcastEvent",
    "BroadcastHandler",
    "BroadcastOptions",
    "Change",
    "Client",
    "ClientOptions",
    "Connecting",
    "DedupeStore",
    "Delivery",
    "Event",
    "EventHubError",
    "Events",
    "EventsOptions",
    "Gap",
    "Handler",
    "HttpHub",
    "HubSubscribeOptions",
    "Input",
    "MemoryStore",
    "Notice",
    "Outgoing",
    "Presence",
    "PublishOptions",
    "Reset",
    "State",
    "SubscribeOptions",
    "Subscription",
    "TokenSource",
    "Transition",
    "WatchHandler",
    "WatchOptions",
    "caps",
    "client_codes",
    "client_ops",
    "connect",
    "dedupe",
    "hub_codes",
    "hub_ops",
    "latest",
    "replay",
    "snapshot",
    "step",
    "table",
]
