"""The codes of errors, and the one exception of this package."""

from __future__ import annotations

from collections.abc import Mapping

#: The codes of the hub, and whether the same request may succeed later.
hub_codes: Mapping[str, bool] = {
    "ack_failed": True,
    "already_subscribed": False,
    "bad_frame": False,
    "bad_group": False,
    "bad_handle": False,
    "bad_json": False,
    "bad_options": False,
    "bad_token": False,
    "bad_topic": False,
    "events_lost": False,
    "forbidden": False,
    "group_reset": False,
    "internal": True,
    "jwt_invalid": False,
    "lease_over": False,
    "no_token": False,
    "not_found": False,
    "not_subscribed": False,
    "overloaded": True,
    "publish_failed": True,  # unless the hub says otherwise
    "rate_limited": True,
    "schema_conflict": False,
    "schema_invalid": False,
    "storage_low": True,
    "subscribe_failed": True,  # likewise
    "token_expired": False,
    "topic_full": True,
    "unauthorized": False,
    "unknown_id": False,
    "unknown_op": False,
}

#: The codes of the client itself, and whether the same call may succeed later.
client_codes: Mapping[str, bool] = {
    "aborted": False,  # The subscription was ended before the hub had accepted it.
    "buffer_full": True,  # The client holds as many publishes as it may.
    "closed": False,  # The client is closed.
    "connect_timeout": True,  # The hub gave no answer in time.
    "connection_lost": True,  # The connection ended before the answer came.
    "gave_up": False,  # The hub closed the connection with a code that says to give up.
    "invalid": False,  # A schema refused the payload, or it has no JSON form.
    # The event may or may not be stored, and sending it again could store it twice.
    "outcome_unknown": False,
}


class EventHubError(Exception):
    """Every failure of this package.

    Decide by ``code`` and ``retryable``; the message is for people.
    """

    def __init__(self, code: str, message: str, retryable: bool | None = None) -> None:
        super().__init__(message)
        #: A code of the hub, of the client, or one that a newer hub has.
        self.code = code
        self.message = message
        if retryable is None:
            retryable = hub_codes.get(code, client_codes.get(code, False))
        #: Whether the same call may succeed later.
        self.retryable = retryable

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    def __reduce__(self) -> tuple[type[EventHubError], tuple[str, str, bool]]:
        return EventHubError, (self.code, self.message, self.retryable)

    def caused_by(self, cause: BaseException) -> EventHubError:
        """Sets the cause, as ``raise ... from cause`` does."""
        self.__cause__ = cause
        return self


def gives_up(close_code: int) -> bool:
    """Says whether the client or its token has to be changed first after this close code."""
    return 4100 <= close_code <= 4199
