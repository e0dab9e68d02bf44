"""An event in the hands of this client."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, Protocol, TypeVar

from .frames import Event

T = TypeVar("T")


class Settler(Protocol):
    """What a delivery needs of its subscription."""

    @property
    def topic(self) -> str: ...

    @property
    def group(self) -> str: ...

    def ack(self, delivery: Delivery[Any]) -> bool: ...

    def nack(self, delivery: Delivery[Any], reason: str, delay_ms: int | None) -> bool: ...

    def extend(self, delivery: Delivery[Any], ms: int) -> bool: ...


class Delivery(Generic[T]):
    """A lease of an event, which ends when it is settled or when its time is over."""

    __slots__ = ("event", "attempt", "ack_deadline_ms", "_by", "_settled", "_lost", "_again", "_due", "_until", "_waiters")

    def __init__(self, by: Settler, event: Event[T], attempt: int, ack_deadline_ms: int) -> None:
        self.event = event
        #: Counts from 1.
        self.attempt = attempt
        #: How long the lease lasted when the event came, in milliseconds.
        self.ack_deadline_ms = ack_deadline_ms
        self._by = by
        self._settled = False
        self._lost = False
        # The same event, delivered anew while its handler still ran.
        self._again: Delivery[T] | None = None
        # When the lease is prolonged next, and until when, in seconds of the loop's clock.
        self._due = 0.0
        self._until = 0.0
        self._waiters: asyncio.Event | None = None

    def __repr__(self) -> str:
        return f"<Delivery of {self.event.id} on {self.topic}::{self.group}, attempt {self.attempt}>"

    @property
    def topic(self) -> str:
        """The topic of the subscription. That of the event is ``event.topic``."""
        return self._by.topic

    @property
    def group(self) -> str:
        return self._by.group

    @property
    def settled(self) -> bool:
        """Settled by the handler or for it."""
        return self._settled

    @property
    def lost(self) -> bool:
        """The lease has ended without being settled: the hub delivers the event again.

        What the handler still does, another may do as well.
        """
        return self._lost

    async def wait_lost(self) -> None:
        """Returns when the lease is lost."""
        if self._lost:
            return
        if self._waiters is None:
            self._waiters = asyncio.Event()
        await self._waiters.wait()

    def ack(self) -> bool:
        """Settles the event. False if the lease is over: then the event comes again."""
        return self._by.ack(self)

    def nack(self, reason: str = "", delay_ms: int | None = None) -> bool:
        """Refuses the event.

        It is delivered again, or becomes a dead letter after its last attempt.
        """
        return self._by.nack(self, reason, delay_ms)

    def extend(self, ms: int) -> bool:
        """Sets the lease to end this many milliseconds from now."""
        return self._by.extend(self, ms)

    def _lose(self) -> None:
        self._lost = True
        if self._waiters is not None:
            self._waiters.set()
