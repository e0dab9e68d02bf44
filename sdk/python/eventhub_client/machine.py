"""The life of a connection, as one table.

For each state and input, the table has the next state and what has to be done. An input that a
state does not list changes nothing, so news of an earlier attempt cannot disturb a later one.

Everything else about reconnecting hangs on the actions. The TypeScript client has the same table;
README.md shows it, and tests compare them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

State = Literal["idle", "token", "opening", "authenticating", "ready", "waiting", "failed", "closed"]

Input = Literal[
    "start",  # The client wants a connection.
    "token",  # The token provider answered.
    "open",  # The socket is open.
    "accepted",  # The hub accepted the token.
    "lost",  # The attempt or the connection is over, and another may succeed.
    "refused",  # It is over, and no other attempt would succeed.
    "wake",  # The pause is over.
    "close",  # The client closes.
]

Action = Literal[
    "fetch",  # Ask the token provider.
    "dial",  # Open a socket.
    "auth",  # Send AUTH.
    "resume",  # Subscribe again and send what waits.
    "suspend",  # Forget leases, and take note of publishes in doubt.
    "drop",  # Close the socket, and hear nothing of it any more.
    "pause",  # Wait for a while that grows with each attempt.
    "end",  # Fail everything that waits.
]

Transition = tuple[State, tuple[Action, ...]]

table: Mapping[State, Mapping[Input, Transition]] = {
    "idle": {
        "start": ("token", ("fetch",)),
        "close": ("closed", ("end",)),
    },
    "token": {
        "token": ("opening", ("dial",)),
        "lost": ("waiting", ("pause",)),
        "refused": ("failed", ("end",)),
        "close": ("closed", ("end",)),
    },
    "opening": {
        "open": ("authenticating", ("auth",)),
        "lost": ("waiting", ("drop", "pause")),
        "refused": ("failed", ("drop", "end")),
        "close": ("closed", ("drop", "end")),
    },
    "authenticating": {
        "accepted": ("ready", ("resume",)),
        "lost": ("waiting", ("drop", "pause")),
        "refused": ("failed", ("drop", "end")),
        "close": ("closed", ("drop", "end")),
    },
    "ready": {
        "lost": ("waiting", ("drop", "suspend", "pause")),
        "refused": ("failed", ("drop", "suspend", "end")),
        "close": ("closed", ("drop", "suspend", "end")),
    },
    "waiting": {
        "wake": ("token", ("fetch",)),
        "close": ("closed", ("end",)),
    },
    "failed": {},
    "closed": {},
}


def step(state: State, given: Input) -> Transition | None:
    """Returns the transition for an input, or None if the input changes nothing."""
    return table[state].get(given)
