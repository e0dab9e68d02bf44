"""Handling each event once."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from .delivery import Delivery
from .subscription import Handler

T = TypeVar("T")

#: An event may come again for as long as its topic keeps it: seven days by default.
WEEK_MS = 7 * 24 * 3600_000


class DedupeStore(Protocol):
    """Remembers which events were handled. Both methods may be coroutine functions."""

    def seen(self, topic: str, group: str, event_id: str, /) -> bool | Awaitable[bool]: ...

    def mark(self, topic: str, group: str, event_id: str, ttl_ms: int, /) -> None | Awaitable[None]: ...


def dedupe(handler: Handler[T], store: DedupeStore, ttl_ms: int = WEEK_MS) -> Callable[[Delivery[T]], Awaitable[None]]:
    """Returns a handler that handles each event once as long as the store remembers.

    Effects happen at most twice, when the process ends between the handler and the mark. A store
    that shares a transaction with the handler has not even this gap: it marks in the handler, and
    ``mark`` does nothing.
    """

    async def once(delivery: Delivery[T]) -> None:
        event = delivery.event
        if await _value(store.seen(event.topic, delivery.group, event.id)):
            return
        await _value(handler(delivery))
        await _value(store.mark(event.topic, delivery.group, event.id, ttl_ms))

    return once


async def _value(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


class MemoryStore:
    """A store in memory, for one process. The oldest entries make room for new ones."""

    def __init__(self, max_entries: int = 100_000) -> None:
        self._max = max_entries
        self._ends: dict[tuple[str, str, str], float] = {}

    def seen(self, topic: str, group: str, event_id: str, /) -> bool:
        return self._ends.get((topic, group, event_id), 0) > time.time()

    def mark(self, topic: str, group: str, event_id: str, ttl_ms: int, /) -> None:
        key = (topic, group, event_id)
        self._ends.pop(key, None)
        if len(self._ends) >= self._max:
            del self._ends[next(iter(self._ends))]
        self._ends[key] = time.time() + ttl_ms / 1000
