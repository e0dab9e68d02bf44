from __future__ import annotations

import asyncio
import pathlib

import pytest
from hubs import FAST, DurableHub, Hub, eventually, fails, jwt, new_topic
from proxy import Proxy

from eventhub_client import Client, EventHubError, State, connect


async def test_a_member_of_a_group_stays_one_over_cuts_and_misses_nothing(hub: Hub) -> None:
    topic = new_topic()
    got: set[int] = set()
    async with Proxy(hub.websocket) as proxy, connect(proxy.url, token=hub.token, **FAST) as client:
        await client.subscribe(topic, "g", lambda d: got.add(d.event.payload))
        for i in range(5):
            many = asyncio.create_task(client.publish_many(topic, [{"payload": i * 100 + n} for n in range(100)], in_flight=20))
            await asyncio.sleep(0)
            await proxy.cut_once(client)
            await many
        await eventually("all", lambda: len(got) == 500)


async def test_a_hub_that_is_killed_and_comes_back_loses_nothing_that_it_answered(program: None, tmp_path: pathlib.Path) -> None:
    topic = new_topic()
    got: set[str] = set()
    async with DurableHub(tmp_path) as hub, connect(hub.websocket, token=hub.token, **FAST) as client:
        await client.subscribe(topic, "g", lambda d: got.add(d.event.id))
        ids = await client.publish_many(topic, [{"payload": i} for i in range(100)])
        await hub.kill()
        later = asyncio.create_task(client.publish(topic, "while there is no hub"))
        await hub.start()
        ids.append(await later)
        await eventually("all", lambda: got >= set(ids))


async def test_a_token_is_replaced_before_it_expires_and_subscriptions_go_on(hub: Hub) -> None:
    topic = new_topic()
    tokens: list[str] = []
    states: list[str] = []
    got: list[str] = []

    async def token() -> str:
        tokens.append(jwt(["publish:**", "subscribe:**"], 4, jti=str(len(tokens))))
        return tokens[-1]

    async with hub.open(token=token, **FAST) as client:
        client.on("state", lambda state, error: states.append(state))
        await client.subscribe(topic, "g", lambda d: got.append(d.event.payload))
        await eventually("three tokens", lambda: len(tokens) >= 3)
        await client.publish(topic, "still here")
        await eventually("the event", lambda: got)
        assert states == []  # the connection stayed


async def test_a_token_that_expires_without_a_better_one_ends_the_connection_and_the_next_opens_another(hub: Hub) -> None:
    give = jwt(["publish:**"], 2, jti="short")
    async with hub.open(token=lambda: give, min_pause_ms=200, max_pause_ms=200) as client:
        await eventually("the connection has ended", lambda: client.state != "ready")
        give = jwt(["publish:**"])
        await client.publish(new_topic(), 1)


async def test_a_token_that_does_not_allow_a_subscription_any_more_ends_only_that(hub: Hub) -> None:
    kept, lost = new_topic(), new_topic()
    scopes = [f"subscribe:{kept}", f"subscribe:{lost}"]
    async with hub.open(token=lambda: jwt(scopes, 4, jti=str(len(scopes))), **FAST) as client:
        client.on("error", lambda error: None)
        staying = await client.subscribe(kept, "g", print)
        ending = await client.subscribe(lost, "g", print)
        scopes.pop()
        error = await ending.wait_closed()
        assert error is not None and error.code == "forbidden"
        assert not staying._ended


async def test_a_wrong_token_is_raised_by_connect(hub: Hub) -> None:
    with fails("bad_token", retryable=False):
        await connect(hub.websocket, token="wrong")
    with fails("no_token"):
        async with connect(hub.websocket):
            pass
    with pytest.raises(TypeError, match="unexpected keyword argument 'tokn'"):
        connect(hub.websocket, tokn="t")


async def test_connect_gives_up_after_its_time_or_when_it_is_cancelled() -> None:
    nowhere = "ws://127.0.0.1:1"
    for ms in (200, 2_000, 20_000):  # a machine that stands still may not get to an attempt
        with fails("connect_timeout", retryable=True) as raised:
            await connect(nowhere, token="t", connect_timeout_ms=ms, **FAST)
        if "The connection ended: 1006" in raised.value.message:
            break
    else:
        pytest.fail(raised.value.message)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await connect(nowhere, token="t", **FAST)


async def test_a_connection_that_is_dead_without_having_ended_is_replaced(hub: Hub) -> None:
    lost: asyncio.Future[EventHubError | None] = asyncio.get_running_loop().create_future()

    def changed(state: State, error: EventHubError | None) -> None:
        if state == "waiting" and not lost.done():
            lost.set_result(error)

    async with Proxy(hub.websocket) as proxy, connect(proxy.url, token=hub.token, ping_ms=100, **FAST) as client:
        client.on("state", changed)
        proxy.deaf = True
        error = await lost
        assert error is not None and "does not answer" in error.message
        proxy.deaf = False
        await client.publish(new_topic(), 1)


async def test_many_clients_whose_hub_was_away_do_not_come_back_at_once(hub: Hub) -> None:
    pauses: list[float] = []

    def count(client: Client) -> None:
        def changed(state: State, error: EventHubError | None) -> None:
            if state == "waiting":
                pause = client._connection._timers["pause"].when() - asyncio.get_running_loop().time()
                pauses.append(pause)

        client.on("state", changed)

    async with Proxy(hub.websocket) as proxy:
        clients = await asyncio.gather(*(connect(proxy.url, token=hub.token, min_pause_ms=200, max_pause_ms=200) for _ in range(20)))
        for client in clients:
            count(client)
        proxy.cut()
        await eventually("all have noticed", lambda: len(pauses) == 20)
        await asyncio.gather(*(client.ready() for client in clients))
        await asyncio.gather(*(client.close() for client in clients))
    assert max(pauses) <= 0.2
    assert max(pauses) - min(pauses) > 0.02


async def test_a_large_event_comes_whole(hub: Hub) -> None:
    topic = new_topic()
    got: list[str] = []
    async with hub.open() as client:
        await client.subscribe(topic, "g", lambda d: got.append(d.event.payload))
        large = "x" * (2**20 - 2)  # with its quotes 1 MiB, and its frame is longer
        await client.publish(topic, large, headers={"x-long": "h" * 16_000})
        await eventually("the event", lambda: got)
    assert got == [large]
