"""Events in a loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, TypeVar

from .delivery import Delivery
from .subscription import Handler, Subscription

T = TypeVar("T")


class _Stream(Generic[T]):
    """What handler and loop share. It does not know the loop, so that the end of the loop shows."""

    def __init__(self) -> None:
        self.subscription: Subscription[T] | None = None
        self.come: deque[tuple[Delivery[T], asyncio.Future[None]]] = deque()
        self.at_hand: asyncio.Future[None] | None = None
        self.news = asyncio.Event()

    def handle(self, delivery: Delivery[T]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.come.append((delivery, done))
        self.news.set()
        return done

    def finish(self) -> None:
        """Acknowledges the event at hand."""
        if self.at_hand is not None and not self.at_hand.done():
            self.at_hand.set_result(None)
        self.at_hand = None

    async def leave(self) -> None:
        """Leaves the group, which gives back the event at hand and those that wait."""
        try:
            if self.subscription is not None:
                await self.subscription.unsubscribe()
        finally:
            self.finish()
            for _, done in self.come:
                if not done.done():
                    done.set_result(None)
            self.come.clear()


class Events(Generic[T]):
    """Gives the events of a group one after the other.

    To ask for the next event acknowledges the one before. Leaving the loop leaves the group, and
    gives back the event at hand unless ``delivery.ack()`` was called. At the end of ``async with``,
    the group has been left; without it, the client leaves the group soon after the loop.
    """

    def __init__(self, join: Callable[[Handler[T]], Subscription[T]], spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._join = join
        self._spawn = spawn
        self._stream: _Stream[T] = _Stream()

    def _start(self) -> Subscription[T]:
        stream = self._stream
        if stream.subscription is None:
            stream.subscription = self._join(stream.handle)
            news = stream.news
            stream.subscription._closed.add_done_callback(lambda _: news.set())
        return stream.subscription

    def __aiter__(self) -> Events[T]:
        self._start()
        return self

    async def __anext__(self) -> Delivery[T]:
        stream = self._stream
        closed = self._start()._closed
        stream.finish()
        while True:
            if stream.come:
                delivery, stream.at_hand = stream.come.popleft()
                return delivery
            if closed.done():
                error = closed.result()
                if error is not None:
                    raise error
                raise StopAsyncIteration
            stream.news.clear()
            await stream.news.wait()

    async def aclose(self) -> None:
        """Leaves the group."""
        await self._stream.leave()

    async def __aenter__(self) -> Events[T]:
        await self._start()._open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    def __del__(self) -> None:
        subscription = self._stream.subscription
        if subscription is not None and not subscription._ended and not self._loop.is_closed():
            spawn, leave = self._spawn, self._stream.leave
            # The collector may run in any thread.
            self._loop.call_soon_threadsafe(lambda: spawn(leave()))
