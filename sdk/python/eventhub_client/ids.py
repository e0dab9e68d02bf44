"""Ids for events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable


def new_id_maker(now: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> Callable[[], str]:
    """Returns a function that makes UUIDv7s that rise.

    The random half is drawn once: time and counter make ids of one maker differ, and 62 random bits
    tell makers apart.
    """
    random = f"{secrets.randbits(62) | 1 << 63:016x}"  # with the variant
    tail = f"-{random[:4]}-{random[4:]}"
    ms = -1
    count = 0

    def new_id() -> str:
        nonlocal ms, count
        at = now()
        count += 1
        if at > ms or count == 4096:
            # A full millisecond borrows from the next; a clock set back changes nothing.
            ms = max(at, ms + 1)
            count = 0
        head = f"{ms:012x}"
        return f"{head[:8]}-{head[8:]}-7{count:03x}{tail}"

    return new_id
