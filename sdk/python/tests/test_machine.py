"""Each transition of the connection, on a socket that the test moves."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import pathlib
import re
import time
import typing
from typing import Any

import pytest
from hubs import Hub, closing, fails

from eventhub_client import Client, EventHubError, Input, Notice, State, sockets, step, table

HERE = pathlib.Path(__file__).parent
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \| (.*?) \|$", re.MULTILINE)


def rows(path: pathlib.Path) -> list[tuple[str, ...]]:
    return ROW.findall(path.read_text())


def test_readme_shows_the_table_that_both_clients_have() -> None:
    states = typing.get_args(State)
    expected = []
    for state in states:
        for given in typing.get_args(Input):
            transition = step(state, given)
            if transition:
                following, actions = transition
                expected.append((state, given, following, ", ".join(actions)))
    assert rows(HERE / "../README.md") == expected
    assert rows(HERE / "../../README.md") == expected
    assert tuple(table) == states


def test_an_input_that_a_state_does_not_list_changes_nothing() -> None:
    assert step("closed", "start") is None
    assert step("waiting", "lost") is None
    assert step("ready", "token") is None


class FakeSocket:
    """A socket that the test moves."""

    def __init__(self, url: str, events: sockets.SocketEvents, ssl: object) -> None:
        self.events = events
        self.sent: list[Any] = []
        self.dropped = False
        self.is_open = False

    def send(self, text: str) -> None:
        if self.is_open:
            self.sent.append(json.loads(text))

    def drop(self) -> None:
        self.dropped = True
        self.is_open = False

    async def gone(self) -> None:
        pass

    def opens(self) -> None:
        self.is_open = True
        self.events.opened()

    def says(self, **frame: object) -> None:
        self.events.text(json.dumps(frame))

    def breaks(self, code: int = 1006, reason: str = "") -> None:
        self.is_open = False
        self.events.ended(code, reason)

    def frames(self, op: str) -> list[Any]:
        return [frame for frame in self.sent if frame["op"] == op]


class Rig:
    """A client, and what it lives through."""

    def __init__(self, all_sockets: list[FakeSocket], **options: Any) -> None:
        self.sockets = all_sockets
        self.asked: list[asyncio.Future[str]] = []
        self.client = Client("ws://hub", **{"token": self._token, "min_pause_ms": 1, "max_pause_ms": 1, **options})
        self.states: list[str] = []
        self.client.on("state", lambda state, error: self.states.append(f"{state}: {error.code}" if error else state))

    def _token(self) -> asyncio.Future[str]:
        self.asked.append(asyncio.get_running_loop().create_future())
        return self.asked[-1]

    @property
    def last(self) -> FakeSocket:
        return self.sockets[-1]

    async def until(self, state: State) -> None:
        while self.client.state != state:
            await asyncio.sleep(0)

    async def question(self, n: int) -> asyncio.Future[str]:
        """Waits until the token provider was asked n times."""
        while len(self.asked) < n:
            await asyncio.sleep(0)
        return self.asked[n - 1]

    async def to(self, state: State) -> None:
        if state == "token":
            before = len(self.asked)
            await self.until("token")
            if not self.asked or self.asked[-1].done():
                await self.question(before + 1)
        elif state == "opening":
            await self.to("token")
            self.asked[-1].set_result("a token")
            await self.until("opening")
        elif state == "authenticating":
            await self.to("opening")
            self.last.opens()
        elif state == "ready":
            await self.to("authenticating")
            self.last.says(op="OK", corr="auth")
        elif state == "waiting":
            await self.to("ready")
            self.last.breaks()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[FakeSocket] = []

    def open_socket(url: str, events: sockets.SocketEvents, ssl: object) -> FakeSocket:
        made.append(FakeSocket(url, events, ssl))
        return made[-1]

    monkeypatch.setattr(sockets, "open_socket", open_socket)
    return lambda **options: Rig(made, **options)


async def test_the_way_to_a_connection(make: Any) -> None:
    r = make()
    await r.to("ready")
    await r.client.ready()
    assert r.states == ["token", "opening", "authenticating", "ready"][1:]
    assert r.last.sent == [{"op": "AUTH", "token": "a token", "caps": ["group_reset", "events_lost", "retry_after"], "corr": "auth"}]
    await r.client.close()
    assert r.client.state == "closed"
    assert r.last.dropped


def break_in(r: Rig, state: State) -> None:
    if state == "token":
        r.asked[-1].set_exception(OSError("no"))
    else:
        r.last.breaks()


@pytest.mark.parametrize("state", ["token", "opening", "authenticating", "ready"])
async def test_lost_another_attempt_with_a_token_of_its_own(make: Any, state: State) -> None:
    r = make(min_pause_ms=20, max_pause_ms=20)
    await r.to(state)
    break_in(r, state)
    await r.until("waiting")
    before = len(r.asked)
    await r.to("ready")
    assert len(r.asked) == before + 1
    await r.client.close()


@pytest.mark.parametrize("state", ["token", "opening", "authenticating", "ready"])
async def test_close_nothing_is_left(make: Any, state: State) -> None:
    r = make()
    waiting = asyncio.create_task(r.client.ready())
    await asyncio.sleep(0)
    await r.to(state)
    await r.client.close(0)
    assert r.client.state == "closed"
    if state == "ready":
        await waiting
    else:
        with fails("closed"):
            await waiting
    assert all(socket.dropped for socket in r.sockets)
    if not r.asked[-1].done():
        r.asked[-1].set_result("too late")
    await asyncio.sleep(0)
    assert r.client.state == "closed"


@pytest.mark.parametrize("state", ["opening", "authenticating", "ready"])
async def test_a_close_code_that_says_so_gives_up(make: Any, state: State) -> None:
    r = make()
    errors: list[str] = []
    r.client.on("error", lambda error: errors.append(error.code))
    await r.to(state)
    publish = asyncio.create_task(r.client.publish("t", 1))
    await asyncio.sleep(0)
    r.last.breaks(4103, "auth_refused")
    assert r.client.state == "failed"
    with fails("outcome_unknown" if state == "ready" else "gave_up"):
        await publish
    with fails("gave_up", retryable=False):
        await r.client.ready()
    assert errors == ["gave_up"]
    await r.client.close()


async def test_a_hub_that_ends_is_left_alone_for_as_long_as_it_asks_once(make: Any) -> None:
    loop = asyncio.get_running_loop()
    r = make()
    await r.to("ready")
    begin = loop.time()
    r.last.breaks(4000, "draining retry_after_ms=300")
    await r.to("opening")
    assert loop.time() - begin >= 0.299
    r.last.breaks(1006, "connect ECONNREFUSED 127.0.0.1:99999")
    again = loop.time()
    await r.to("ready")
    r.last.breaks(4000, "draining retry_after_ms=999999")
    await r.to("ready")
    assert loop.time() - again < 30
    await r.client.close()


async def test_close_while_it_waits_and_while_it_is_closed(make: Any) -> None:
    r = make(min_pause_ms=60_000, max_pause_ms=60_000)
    await r.to("waiting")
    assert r.client.state == "waiting"
    await r.client.close()
    await r.client.close()
    assert r.states[-2:] == ["waiting: connection_lost", "closed: closed"]


async def test_a_provider_is_asked_three_times_when_its_tokens_are_refused(make: Any) -> None:
    r = make()
    async with closing(r.client):
        for _ in range(3):
            await r.to("authenticating")
            r.last.says(op="ERR", code="jwt_invalid", msg="no", corr="auth")
        assert r.client.state == "failed"
        assert len(r.asked) == 3
        with fails("jwt_invalid"):
            await r.client.ready()


async def test_a_fixed_token_that_is_refused_is_not_tried_again(make: Any) -> None:
    r = make(token="fixed")
    async with closing(r.client):
        await r.until("opening")
        r.last.opens()
        r.last.says(op="ERR", code="bad_token", msg="no", corr="auth")
        assert r.client.state == "failed"


async def test_a_hub_at_its_limits_is_asked_again_whatever_the_token(make: Any) -> None:
    r = make(token="fixed")
    async with closing(r.client):
        await r.until("opening")
        r.last.opens()
        r.last.says(op="ERR", code="overloaded", msg="later", corr="auth")
        assert r.client.state == "waiting"


async def test_a_provider_that_is_cancelled_or_gives_nothing_is_asked_again(make: Any) -> None:
    r = make()
    async with closing(r.client):
        await r.to("token")
        r.asked[-1].cancel()
        await r.until("waiting")
        await r.to("token")
        r.asked[-1].set_result("")
        await r.until("waiting")
        await r.to("ready")
        assert [state for state in r.states if state.startswith("waiting")] == ["waiting: connection_lost"] * 2


async def test_a_provider_that_does_not_hear_cannot_hold_up_close(hub: Hub) -> None:
    end = asyncio.Event()

    async def deaf() -> str:
        while not end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await end.wait()
        return "too late"

    client = Client(hub.websocket, token=deaf)
    await asyncio.sleep(0)
    await client.close()
    assert client.state == "closed"
    end.set()


async def test_news_of_an_earlier_socket_or_token_changes_nothing(make: Any) -> None:
    r = make()
    async with closing(r.client):
        await r.to("waiting")
        old = r.sockets[0]
        await r.to("token")
        old.opens()
        old.says(op="OK", corr="auth")
        old.breaks(4103)
        assert r.client.state == "token"
        await r.to("ready")
        assert len(r.sockets) == 2
        assert old.dropped


async def test_a_subscription_made_while_the_token_is_fetched_is_sent_once(make: Any) -> None:
    r = make()
    async with closing(r.client):
        await r.to("token")
        joined = asyncio.create_task(r.client.subscribe("t", "g", lambda delivery: None))
        await asyncio.sleep(0)
        await r.to("ready")
        [subscribe] = r.last.frames("SUBSCRIBE")
        r.last.says(op="OK", corr=subscribe["corr"])
        subscription = await joined

        # One that is left while there is no connection is not made again.
        r.last.breaks()
        await subscription.unsubscribe()
        await r.to("ready")
        assert r.last.frames("SUBSCRIBE") == []


async def test_events_of_an_earlier_subscription_of_the_same_name_are_not_handled(make: Any) -> None:
    r = make()
    async with closing(r.client):
        await r.to("ready")
        event = {"op": "EVENT", "topic": "t", "group": "g", "event": {"id": "1", "ts": 1, "topic": "t", "payload": 1}}
        ctx = {"attempt": 1, "ack_deadline_ms": 30_000}
        handled: list[int] = []
        first = asyncio.create_task(r.client.subscribe("t", "g", lambda delivery: handled.append(1)))
        await asyncio.sleep(0)
        r.last.says(op="OK", corr=r.last.frames("SUBSCRIBE")[0]["corr"])
        leaving = asyncio.create_task((await first).unsubscribe())
        await asyncio.sleep(0)
        second = asyncio.create_task(r.client.subscribe("t", "g", lambda delivery: handled.append(2)))
        await asyncio.sleep(0)
        r.last.says(**event, ctx=ctx)  # was on its way when the first one left
        r.last.says(op="OK", corr=r.last.frames("UNSUBSCRIBE")[0]["corr"])
        await leaving
        r.last.says(op="OK", corr=r.last.frames("SUBSCRIBE")[1]["corr"])
        await second
        r.last.says(**event, ctx=ctx)
        assert handled == [2]


def expiring(seconds: float, name: str) -> str:
    """A JWT that expires soon; nobody checks its signature here."""
    return f"{name}.{base64.urlsafe_b64encode(json.dumps({'exp': time.time() + seconds}).encode()).decode()}.x"


async def to_a_token_that_expires(r: Rig) -> asyncio.Future[str]:
    """Connects with a token that is replaced at once, and returns the next question."""
    (await r.question(1)).set_result(expiring(0.2, "first"))
    await r.until("opening")
    r.last.opens()
    r.last.says(op="OK", corr="auth")
    while len(r.asked) < 2:
        await asyncio.sleep(0.001)
    return r.asked[1]


async def test_a_token_that_comes_after_a_break_is_not_used_for_the_earlier_connection(make: Any) -> None:
    r = make()
    async with closing(r.client):
        refresh = await to_a_token_that_expires(r)
        first = r.last
        first.breaks()
        await r.until("token")  # the reconnect waits for the answer to the same question
        await asyncio.sleep(0)
        assert len(r.asked) == 2
        refresh.set_result(expiring(60, "second"))
        await r.until("opening")
        r.last.opens()
        assert len(first.frames("AUTH")) == 1
        assert [frame["token"].split(".")[0] for frame in r.last.sent] == ["second"]


async def test_frames_behind_a_token_that_is_refused_are_sent_again_on_the_next_connection(make: Any) -> None:
    r = make()
    async with closing(r.client):
        refresh = await to_a_token_that_expires(r)
        refresh.set_result(expiring(60, "second"))
        while len(r.last.frames("AUTH")) < 2:
            await asyncio.sleep(0)
        publish = asyncio.create_task(r.client.publish("t", 1))
        await asyncio.sleep(0)
        [frame] = r.last.frames("PUBLISH")
        r.last.says(op="ERR", code="jwt_invalid", msg="revoked", corr="auth")
        await r.to("ready")
        assert r.last.frames("PUBLISH") == [frame]
        r.last.says(op="OK", corr=frame["corr"], id="stored")
        assert await publish == "stored"


async def test_a_connection_on_which_nothing_comes_is_given_up(make: Any) -> None:
    r = make(ping_ms=20)
    async with closing(r.client):
        await r.to("ready")
        socket = r.last
        while r.client.state == "ready":
            await asyncio.sleep(0.001)
        assert socket.sent[-1]["corr"] == "ping"
        assert "waiting: connection_lost" in r.states


async def test_an_attempt_that_hangs_is_given_up(make: Any) -> None:
    r = make(attempt_timeout_ms=10)
    async with closing(r.client):
        await r.to("opening")
        while r.client.state == "opening":
            await asyncio.sleep(0.001)
        assert "waiting: connect_timeout" in r.states
        assert r.sockets[0].dropped


@pytest.mark.parametrize("url", ["nonsense", "http://127.0.0.1:1", "ws://"])
async def test_an_address_that_is_not_one_is_not_tried_again(url: str) -> None:
    async with closing(Client(url)) as client:
        with fails("gave_up", retryable=False):
            await client.ready()


async def test_frames_that_are_none_are_ignored(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    r = make()
    async with closing(r.client):
        await r.to("ready")
        for text in ["", "{", "[]", '"OK"', '{"op":"LATER"}', '{"op":"OK","corr":"x"}', '{"op":"OK","corr":99}']:
            r.last.events.text(text)
        assert r.client.state == "ready"
        r.last.events.text("[" * 100_000 + "]" * 100_000)
        assert "too deeply" in caplog.text
        publish = asyncio.create_task(r.client.publish("t", 1))
        await asyncio.sleep(0)
        # A number with more digits than Python reads as an int does no harm.
        r.last.events.text('{"op":"OK","corr":%d,"id":"x","more":%s}' % (r.last.frames("PUBLISH")[0]["corr"], "9" * 5_000))
        assert await publish == "x"


async def test_a_publish_whose_outcome_the_hub_does_not_know_is_repeated_and_ends_with_the_client(make: Any) -> None:
    r = make()
    await r.to("ready")
    publish = asyncio.create_task(r.client.publish("t", 1))
    other = asyncio.create_task(r.client.publish("t", 2))
    await asyncio.sleep(0)
    first, second = r.last.frames("PUBLISH")
    r.last.says(op="ERR", code="publish_failed", msg="no ack", corr=first["corr"])
    while len(r.last.frames("PUBLISH")) < 3:
        await asyncio.sleep(0.001)
    assert r.last.frames("PUBLISH")[2] == first  # under the same id
    r.last.says(op="OK", corr=first["corr"], id="stored")
    assert await publish == "stored"
    r.last.says(op="ERR", code="publish_failed", msg="no ack", corr=second["corr"])
    await r.client.close(0)  # before it is sent again
    with fails("outcome_unknown", retryable=False):
        await other
    assert r.client.pending == 0


async def test_the_client_tells_what_the_hub_says_about_a_group(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    r = make()
    notices: list[Notice] = []
    errors: list[str] = []
    async with closing(r.client):
        await r.to("ready")
        for group in ("g", "g2"):
            joined = asyncio.create_task(r.client.subscribe("t", group, print))
            await asyncio.sleep(0)
            r.last.says(op="OK", corr=r.last.frames("SUBSCRIBE")[-1]["corr"])
            await joined
        offs = [r.client.on("notice", notices.append), r.client.on("error", lambda error: errors.append(error.code))]
        r.last.says(op="ERR", code="events_lost", msg="t::g2 has lost 3 events")
        r.last.says(op="ERR", code="group_reset", msg="t::g")
        r.last.says(op="ERR", code="bad_frame", msg="no corr")
        r.last.says(op="ERR", code="token_expired", msg="told by the end of the connection")
        assert notices == [Notice("events_lost", "t", "g2", "t::g2 has lost 3 events"), Notice("group_reset", "t", "g", "t::g")]
        assert errors == ["bad_frame"]
        assert caplog.text == ""
        for off in offs:
            off()
            off()
        r.last.says(op="ERR", code="group_reset", msg="t::g")
        assert "group_reset: t::g" in caplog.text
        with pytest.raises(ValueError, match="there is no event 'news'"):
            r.client.on("news", print)


def test_errors_can_be_pickled() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(EventHubError("overloaded", "later")))
    assert (error.code, error.message, error.retryable, str(error)) == ("overloaded", "later", True, "overloaded: later")
