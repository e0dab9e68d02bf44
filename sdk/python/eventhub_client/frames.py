"""What client and hub send each other."""

from __future__ import annotations

import decimal
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Required, TypedDict, TypeVar

from .errors import EventHubError

T = TypeVar("T")

#: The operations that this client sends.
client_ops = ("AUTH", "PUBLISH", "SUBSCRIBE", "UNSUBSCRIBE", "ACK", "NACK", "MODACK", "PAUSE", "RESUME")
#: The operations that this client understands.
hub_ops = ("OK", "ERR", "EVENT", "ASSIGN", "GAP", "SNAPSHOT", "PRESENCE")
#: Capabilities that are named in AUTH.
caps = ("group_reset", "events_lost", "retry_after")

Frame = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Event(Generic[T]):
    """An event, as it is stored."""

    id: str
    #: Epoch milliseconds.
    ts: int
    topic: str
    payload: T
    key: str | None = None
    sid: str | None = None
    headers: Mapping[str, str] | None = None
    caused_by: Sequence[str] | None = None
    tags: Sequence[str] | None = None
    #: The slot of the key, for members of ordered groups.
    partition: int | None = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Event[Any]:
        """Makes an event of its JSON object. Fields that later versions add are ignored."""
        get = record.get
        return Event(
            record["id"],
            record["ts"],
            record["topic"],
            record["payload"],
            get("key"),
            get("sid"),
            get("headers"),
            get("caused_by"),
            get("tags"),
            get("partition"),
        )


class PublishOptions(TypedDict, total=False):
    """Options of PUBLISH. None is the same as leaving an option out."""

    #: The event's id. By default the client makes a UUIDv7, so that it can repeat a publish safely.
    id: str | None
    #: Epoch milliseconds; by default when the event is stored.
    ts: int | None
    key: str | None
    headers: Mapping[str, str] | None
    tags: Sequence[str] | None
    caused_by: Sequence[str] | None
    sid: str | None
    #: Removes the key from the latest records of a compacted topic; needs the payload None.
    tombstone: bool | None
    #: Stores the event this many milliseconds later.
    delay_ms: int | None
    #: Stores the event at this time, in epoch milliseconds.
    at: int | None
    #: Options that this version does not know.
    extra: Mapping[str, Any] | None


class Outgoing(PublishOptions, total=False):
    """An event for ``publish_many``: a payload, with options of PUBLISH."""

    payload: Required[Any]


class HubSubscribeOptions(TypedDict, total=False):
    """Options of SUBSCRIBE."""

    #: Where a new group starts. Defaults to latest. (``from`` is a keyword of Python.)
    from_: Literal["latest", "earliest", "ts", "afterId"] | None
    ts: int | None
    after_id: str | None
    #: The most events that are held at a time. Defaults to 100, or to twice the concurrency if that
    #: is given.
    max_in_flight: int | None
    batch_size: int | None
    #: How long a lease lasts. Defaults to 30,000.
    ack_timeout_ms: int | None
    #: After this many failures an event becomes a dead letter; 0 tries for ever. Defaults to 5.
    max_attempts: int | None
    #: Further topics to read through the same subscription.
    topics: Sequence[str] | None
    #: A new group disappears when it had no member for this long.
    group_ttl_ms: int | None
    #: "key" for an ordered group: of each key, one event at a time is leased, in order.
    ordered: Literal["key"] | None
    #: The slots of a new ordered group. Defaults to 64.
    slots: int | None
    #: The version of the schema in which events come. By default, they come as they are stored. An
    #: event that the hub cannot cast is an attempt that failed.
    schema_version: int | Literal["latest"] | None
    #: Options that this version does not know.
    extra: Mapping[str, Any] | None


_wire_names = {
    "from_": "from",
    "after_id": "afterId",
    "max_in_flight": "maxInFlight",
    "batch_size": "batchSize",
    "ack_timeout_ms": "ackTimeoutMs",
    "max_attempts": "maxAttempts",
    "group_ttl_ms": "groupTtlMs",
    "min_interval_ms": "minIntervalMs",
    "schema_version": "schemaVersion",
}


def wire_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options under the names that the hub knows, without those that are None."""
    extra = options.get("extra") or {}
    wire = {_wire_names.get(name, name): value for name, value in options.items() if value is not None and name != "extra"}
    return {**wire, **extra}


def check_names(call: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises a TypeError for an option that the call does not have, as Python does."""
    for name in options:
        if name not in known:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")


def dumps(value: object) -> str:
    """Returns the JSON of what this client adds to a frame, in ASCII."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as cause:
        raise EventHubError("bad_options", f"An option has no JSON form: {cause}").caused_by(cause) from None


def dump_payload(value: object, default: Callable[[Any], Any] | None) -> str:
    """Returns the JSON of a payload, as short as it can be."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False, default=default)
    except (TypeError, ValueError, RecursionError) as cause:
        raise EventHubError("invalid", f"The payload has no JSON form: {cause}").caused_by(cause) from None


def loads(text: str | bytes) -> Any:
    """Reads JSON. Integers with too many digits for Python become decimals."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_int=_long_int)


def _long_int(digits: str) -> int | decimal.Decimal:
    try:
        return int(digits)
    except ValueError:  # sys.set_int_max_str_digits
        return decimal.Decimal(digits)
