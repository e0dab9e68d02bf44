"""Tokens, and when to replace them."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
from collections.abc import Awaitable, Callable

from .errors import EventHubError

#: A token, or a function that gets one. The function may be a coroutine function. It is asked for
#: each connection, and before the token expires.
TokenSource = str | Callable[[], str | Awaitable[str]]


class Tokens:
    """Asks the source.

    Whoever asks while a question is open gets the answer to that question, so that a reconnect and
    a refresh at the same time cost one request.
    """

    def __init__(self, source: TokenSource | None) -> None:
        self._source = source
        self._open: asyncio.Task[str] | None = None

    @property
    def changes(self) -> bool:
        """Whether another question may bring another token."""
        return callable(self._source)

    async def ask(self) -> str:
        if not callable(self._source):
            return self._source or ""
        if self._open is None:
            self._open = asyncio.create_task(self._question(self._source))
            self._open.add_done_callback(self._answered)
        return await asyncio.shield(self._open)

    async def _question(self, source: Callable[[], str | Awaitable[str]]) -> str:
        try:
            answer = source()
            token = await answer if inspect.isawaitable(answer) else answer
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EventHubError("no_token", "The token provider was cancelled.") from None
        if not isinstance(token, str) or token == "":
            raise EventHubError("no_token", "The token provider returned no token.")
        return token

    def _answered(self, task: asyncio.Task[str]) -> None:
        self._open = None
        if not task.cancelled():
            task.exception()  # those who asked have it

    async def close(self) -> None:
        """Ends an open question."""
        if self._open is not None:
            self._open.cancel()
            await asyncio.wait([self._open], timeout=1)


def expiry(token: str) -> float | None:
    """Returns when a JWT expires, in seconds since the epoch; None for other tokens."""
    parts = token.split(".")
    if len(parts) < 2:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, RecursionError):
        return None  # not a JWT
    exp = claims.get("exp") if isinstance(claims, dict) else None
    return float(exp) if isinstance(exp, (int, float)) and not isinstance(exp, bool) else None


def refresh_delay(expires: float, now: float) -> float:
    """Returns in how many seconds a token is replaced.

    That is before its end by a fifth of what is left, and a minute at most.
    """
    left = max(0.0, expires - now)
    return min(left - min(left / 5, 60.0), 2**31 / 1000)
