from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

import pytest
from hubs import FAST, Hub, eventually, fails, new_topic
from proxy import Proxy

from eventhub_client import Client, Delivery, connect, sockets


def numbers(n: int) -> list[Any]:
    return [{"payload": i} for i in range(n)]


async def test_the_end_of_a_handler_acknowledges_its_event(hub: Hub) -> None:
    topic = new_topic()
    got: list[Any] = []

    def handle(d: Delivery[int]) -> None:
        got.append((d.event.payload, d.attempt, d.topic, d.group, repr(d).startswith("<Delivery of ")))

    later: list[int] = []

    async def handle_later(d: Delivery[int]) -> None:
        await asyncio.sleep(0.001)
        later.append(d.event.payload)

    async with hub.open() as client:
        await client.subscribe(topic, "sync", handle)
        await client.subscribe(topic, "async", handle_later)
        await client.publish(topic, 1)
        await client.publish(topic, 2)
        await eventually("both", lambda: len(got) == len(later) == 2)
        await hub.settled(topic, "sync")
        await hub.settled(topic, "async")
    assert got == [(1, 1, topic, "sync", True), (2, 1, topic, "sync", True)]


async def test_what_a_handler_raises_refuses_its_event(hub: Hub) -> None:
    topic = new_topic()
    letters: list[Any] = []

    def letter(d: Delivery[Any]) -> None:
        letters.append((d.event.payload["group"], d.event.payload["err"], d.event.payload["attempts"]))

    def at_once(d: Delivery[Any]) -> None:
        raise ValueError("at once")

    async def later(d: Delivery[Any]) -> None:
        await asyncio.sleep(0)
        raise ValueError("later \ud800")  # has no form in UTF-8

    async def cancelled(d: Delivery[Any]) -> None:
        raise asyncio.CancelledError

    async with hub.open() as client:
        await client.subscribe(f"dlq.{topic}", "operators", letter)
        for handler in (at_once, later, cancelled):
            await client.subscribe(topic, handler.__name__, handler, max_attempts=2)
        await client.publish(topic, 1)
        await eventually("three dead letters", lambda: len(letters) == 3)
    assert [(group, attempts) for group, _, attempts in sorted(letters)] == [("at_once", 2), ("cancelled", 2), ("later", 2)]
    assert sorted(letters)[0][1] == "at once"
    assert sorted(letters)[1][1] == "CancelledError"
    assert sorted(letters)[2][1].startswith("later ")


async def test_a_handler_may_settle_its_event_itself(hub: Hub) -> None:
    topic = new_topic()
    got: list[Any] = []

    def handle(d: Delivery[Any]) -> None:
        first = d.nack("not now", 0) if d.attempt == 1 else d.ack()
        got.append((d.attempt, first, d.settled, d.ack(), d.nack()))

    async with hub.open() as client:
        await client.subscribe(topic, "g", handle)
        await client.publish(topic, 1)
        await eventually("two attempts", lambda: len(got) == 2)
        await hub.settled(topic, "g")
    assert got == [(1, True, True, False, False), (2, True, True, False, False)]


async def test_with_manual_acknowledgement_an_event_is_open_until_it_is_settled(hub: Hub) -> None:
    topic = new_topic()
    got: list[Delivery[Any]] = []
    async with hub.open() as client:
        await client.subscribe(topic, "g", got.append, ack="manual")
        for i in range(3):
            await client.publish(topic, i)
        await eventually("three events", lambda: len(got) == 3)
        await hub.settled(topic, "g", left=3)
        assert got[1].ack()

        await hub.settled(topic, "g", left=2)
        assert got[0].extend(60_000)
        got[2].nack("again", 0)
        await eventually("one comes again", lambda: len(got) == 4)
        assert got[3].attempt == 2
        got[0].ack()
        got[3].ack()
        await hub.settled(topic, "g")


async def test_a_manual_lease_that_runs_out_brings_the_event_again(hub: Hub) -> None:
    topic = new_topic()
    got: list[Delivery[Any]] = []
    async with hub.open() as client:
        await client.subscribe(topic, "g", got.append, ack="manual", ack_timeout_ms=1_000)
        await client.publish(topic, 1)
        await eventually("an event", lambda: len(got) == 1)
        await got[0].wait_lost()
        await eventually("a second attempt", lambda: len(got) == 2)
        assert got[0].lost
        got[1].ack()
        await hub.settled(topic, "g")


async def test_no_more_handlers_run_at_a_time_than_were_asked_for(hub: Hub) -> None:
    topic = new_topic()
    running = most = done = 0

    async def handle(d: Delivery[Any]) -> None:
        nonlocal running, most, done
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        done += 1

    async with hub.open() as client:
        await client.subscribe(topic, "g", handle, concurrency=3)
        await client.publish_many(topic, numbers(60))
        await eventually("all", lambda: done == 60)
        assert most == 3
        await hub.settled(topic, "g")
        for options in ({"concurrency": 0}, {"ack": "none"}):
            with fails("bad_options"):
                await client.subscribe(topic, "none", print, **options)
        with pytest.raises(TypeError, match="unexpected keyword argument 'maxInFlight'"):
            await client.subscribe(topic, "none", print, maxInFlight=1)


async def test_acknowledgements_leave_together(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    frames: list[Any] = []
    send = sockets.WebSocket.send

    def counting(self: sockets.WebSocket, text: str) -> None:
        frames.append(json.loads(text))
        send(self, text)

    topic = new_topic()
    got = 0

    def handle(d: Delivery[Any]) -> None:
        nonlocal got
        got += 1

    async with hub.open() as client:
        await client.publish_many(topic, numbers(1_000))
        monkeypatch.setattr(sockets.WebSocket, "send", counting)
        await client.subscribe(topic, "g", handle, from_="earliest", max_in_flight=1_000)
        await eventually("all", lambda: got == 1_000)
        await hub.settled(topic, "g")
    acks = [frame for frame in frames if frame["op"] == "ACK"]
    assert got == 1_000
    assert sum(len(frame.get("ids", [1])) for frame in acks) == 1_000
    assert len(acks) < 500
    assert max(len(frame.get("ids", [1])) for frame in acks) <= 1_000


async def test_a_lease_lives_as_long_as_its_handler_and_those_that_wait_for_one(hub: Hub) -> None:
    topic = new_topic()
    attempts: list[int] = []

    async def slow(d: Delivery[Any]) -> None:
        attempts.append(d.attempt)
        await asyncio.sleep(2.5)

    async with hub.open() as client:
        await client.subscribe(topic, "g", slow, ack_timeout_ms=1_000, concurrency=1)
        await client.publish(topic, 1)
        await client.publish(topic, 2)
        await eventually("both", lambda: len(attempts) == 2)
        await hub.settled(topic, "g")
    assert attempts == [1, 1]


async def test_a_lease_is_not_prolonged_for_ever_and_its_handler_is_not_run_beside_itself(hub: Hub) -> None:
    topic = new_topic()
    attempts: list[int] = []
    elsewhere: list[int] = []
    stuck = asyncio.Event()

    async def handle(d: Delivery[Any]) -> None:
        attempts.append(d.attempt)
        await stuck.wait()

    async with hub.open() as client, hub.open() as other:
        await client.subscribe(topic, "g", handle, ack_timeout_ms=1_000, max_lease_ms=1, max_attempts=0)
        await client.publish(topic, 1)
        await eventually("the handler runs", lambda: len(attempts) == 1)
        await other.subscribe(topic, "g", lambda d: elsewhere.append(d.attempt))
        await eventually("another member gets the event", lambda: elsewhere and elsewhere[-1] > 1)
        assert attempts == [1]
        stuck.set()
        await hub.settled(topic, "g")


async def test_an_event_that_comes_again_while_its_handler_runs_is_settled_by_that_handler(hub: Hub) -> None:
    topic = new_topic()
    running = runs = most = 0
    lost: list[bool] = []
    going = asyncio.Event()

    async def handle(d: Delivery[Any]) -> None:
        nonlocal running, runs, most
        running += 1
        runs += 1
        most = max(most, running)
        await going.wait()
        running -= 1
        lost.append(d.lost)

    async with Proxy(hub.websocket) as proxy, hub.open() as client, connect(proxy.url, token=hub.token, **FAST) as cut:
        subscription = await cut.subscribe(topic, "g", handle)
        await client.publish(topic, 1)
        await eventually("the handler runs", lambda: runs == 1)
        for _ in range(3):
            await proxy.cut_once(cut)

        async def here_again() -> bool:
            figures = await hub.request("GET", f"/groups/{topic}/g")
            return bool(figures["inflight"] == 1)

        await eventually("the event is here again", here_again)
        going.set()
        await hub.settled(topic, "g")
        assert (runs, most, lost, subscription.active) == (1, 1, [True], 0)


async def test_an_acknowledgement_that_is_lost_with_its_connection_costs_no_second_run(hub: Hub) -> None:
    topic = new_topic()
    runs: list[int] = []
    async with Proxy(hub.websocket) as proxy, hub.open() as client, connect(proxy.url, token=hub.token, **FAST) as cut:

        def handle(d: Delivery[int]) -> None:
            runs.append(d.event.payload)
            proxy.cut()  # before the acknowledgement is written

        await cut.subscribe(topic, "g", handle)
        await client.publish(topic, 1)
        await eventually("the event", lambda: runs)
        await hub.settled(topic, "g")
    assert runs == [1]


async def test_a_loop_gives_one_event_after_the_other(hub: Hub) -> None:
    topic = new_topic()
    got: list[int] = []
    async with hub.open() as client:
        await client.publish_many(topic, numbers(50))
        async with client.events(topic, "g", from_="earliest") as events:
            async for delivery in events:
                got.append(delivery.event.payload)
                if len(got) == 50:
                    break  # gives this event back
        assert got == list(range(50))
        async with client.events(topic, "g") as events:
            async for delivery in events:
                assert (delivery.event.payload, delivery.attempt) == (49, 2)
                delivery.ack()
                break
        await hub.settled(topic, "g")
        with pytest.raises(TypeError, match="unexpected keyword argument 'ack'"):
            client.events(topic, "g", ack="manual")
        with fails("bad_group"):
            async for _ in client.events(topic, ""):
                pass


async def test_leaving_a_loop_leaves_the_group_also_without_a_context_manager(hub: Hub) -> None:
    topic = new_topic()
    async with hub.open() as client:
        await client.publish_many(topic, numbers(2))
        async for delivery in client.events(topic, "g", from_="earliest"):
            assert delivery.event.payload == 0
            break
        with pytest.raises(ZeroDivisionError):
            async for delivery in client.events(topic, "h", from_="earliest"):
                raise ZeroDivisionError
        gc.collect()
        await eventually("the groups are left", lambda: not client._subscriptions)
        await hub.settled(topic, "g", left=2)


async def test_cancelling_ends_a_loop_over_events_and_a_subscribe_that_waits(hub: Hub) -> None:
    topic = new_topic()
    got: list[int] = []

    async def loop(client: Client) -> None:
        async with client.events(topic, "loop") as events:
            joined.set()
            async for delivery in events:
                got.append(delivery.event.payload)

    joined = asyncio.Event()
    async with hub.open() as client:
        looping = asyncio.create_task(loop(client))
        await joined.wait()
        await client.publish(topic, 0)
        await eventually("an event", lambda: got)
        looping.cancel()
        await asyncio.wait([looping])
        assert looping.cancelled()
        waiting = asyncio.create_task(client.subscribe(topic, "g", print))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not client._subscriptions
        await client.subscribe(topic, "g", print)  # the name is free


async def test_a_group_is_joined_once(hub: Hub) -> None:
    topic = new_topic()
    async with hub.open() as client:
        subscription = await client.subscribe(topic, "g", print)
        with fails("already_subscribed"):
            await client.subscribe(topic, "g", print)
        await subscription.unsubscribe()
        await subscription.unsubscribe()
        again, _ = await asyncio.gather(client.subscribe(topic, "g", print), client.subscribe(topic, "g2", print))
        await again.drain()
        assert await again.wait_closed() is None
        async with await client.subscribe(topic, "g", print) as block:
            assert repr(block) == f"<Subscription {topic}::g>"
        assert await block.wait_closed() is None
        with fails("bad_group"):
            await client.subscribe(topic, "", print)
        with fails("bad_options"):
            await client.subscribe(topic, "x", print, from_="ts")


async def test_pause_stops_deliveries_also_over_a_reconnect_and_resume_starts_them(hub: Hub) -> None:
    topic = new_topic()
    got: list[int] = []
    async with Proxy(hub.websocket) as proxy, hub.open() as client, connect(proxy.url, token=hub.token, **FAST) as cut:
        subscription = await cut.subscribe(topic, "g", lambda d: got.append(d.event.payload))
        await subscription.pause()
        await client.publish(topic, 1)
        await proxy.cut_once(cut)
        await client.publish(topic, 2)
        await cut.publish(new_topic(), "an answer that comes after events, if there were any")
        assert got == []
        await subscription.resume()
        await eventually("both", lambda: len(got) == 2)
        await hub.settled(topic, "g")
    assert sorted(got) == [1, 2]


async def test_unsubscribe_gives_back_what_is_not_done_and_drain_finishes_it(hub: Hub) -> None:
    topic = new_topic()
    runs = 0
    going = asyncio.Event()

    async def handle(d: Delivery[Any]) -> None:
        nonlocal runs
        runs += 1
        await going.wait()

    async with hub.open() as client:
        leaving = await client.subscribe(topic, "leaves", handle)
        draining = await client.subscribe(topic, "drains", handle)
        await client.publish(topic, 1)
        await eventually("both run", lambda: runs == 2)
        await leaving.unsubscribe()
        drained = asyncio.create_task(draining.drain())
        await asyncio.sleep(0)
        await client.publish(topic, 2)
        going.set()
        await drained
        await hub.settled(topic, "leaves", left=2)

        await hub.settled(topic, "drains", left=1)
        assert runs == 2


async def test_close_lets_handlers_finish(hub: Hub) -> None:
    topic = new_topic()
    begun = done = 0

    async def handle(d: Delivery[Any]) -> None:
        nonlocal begun, done
        begun += 1
        await asyncio.sleep(0.05)
        done += 1

    async with hub.open() as client:
        async with hub.open() as finishing:
            await finishing.subscribe(topic, "g", handle, concurrency=4)
            await client.publish_many(topic, numbers(40))
            await eventually("some run", lambda: begun > 0)
        assert done == begun
        await hub.settled(topic, "g", left=40 - done)


async def test_close_cancels_handlers_that_do_not_finish(hub: Hub) -> None:
    topic = new_topic()
    ended: list[str] = []

    async def handle(d: Delivery[Any]) -> None:
        ended.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    client = await hub.open()
    await client.subscribe(topic, "g", handle)
    await client.publish(topic, 1)
    await eventually("the handler runs", lambda: ended)
    await client.close(50)
    assert ended == ["began", "cancelled"]
    await hub.settled(topic, "g", left=1)


async def test_a_handler_cannot_wait_for_its_own_end(hub: Hub) -> None:
    topic = new_topic()
    raised: list[str] = []
    async with hub.open() as client:

        async def handle(d: Delivery[Any]) -> None:
            for end in (client.close, subscription.drain):
                with pytest.raises(RuntimeError, match="a task of their own"):
                    await end()
                raised.append(end.__name__)
            await subscription.unsubscribe()

        subscription = await client.subscribe(topic, "g", handle)
        await client.publish(topic, 1)
        await subscription.wait_closed()
        assert raised == ["close", "drain"]


async def test_a_subscription_that_the_hub_ends_says_so(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    topic = new_topic()
    errors: list[str] = []
    async with hub.open() as client:
        off = client.on("error", lambda error: errors.append(error.code))
        for group in ("told", "logged"):
            subscription = await client.subscribe(topic, group, print)
            await hub.request("DELETE", f"/groups/{topic}/{group}")
            error = await subscription.wait_closed()
            assert error is not None and error.code == "not_subscribed"
            assert errors == ["not_subscribed"]
            off()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert f"{topic}::logged" in caplog.text


async def test_a_loop_ends_with_the_error_when_the_hub_ends_its_subscription(hub: Hub) -> None:
    topic = new_topic()
    async with hub.open() as client:
        client.on("error", lambda error: None)
        async with client.events(topic, "g") as events:
            await hub.request("DELETE", f"/groups/{topic}/g")
            with fails("not_subscribed"):
                async for _ in events:
                    pass


async def test_one_subscription_reads_several_topics(hub: Hub) -> None:
    topic, second = new_topic(), new_topic()
    got: list[Any] = []
    async with hub.open() as client:
        await client.subscribe(topic, "g", lambda d: got.append((d.event.topic, d.event.payload)), topics=[second])
        await client.publish(topic, 1, id="same")
        await client.publish(second, 2, id="same")
        await eventually("both", lambda: len(got) == 2)
        await hub.settled(topic, "g")
        await hub.settled(second, "g")
    assert sorted(got) == sorted([(topic, 1), (second, 2)])


async def test_a_listener_that_fails_harms_nobody(hub: Hub) -> None:
    seen: list[str] = []
    contexts: list[Any] = []

    def failing(state: object, error: object) -> None:
        raise ZeroDivisionError

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: contexts.append(context["exception"]))
    async with Client(hub.websocket, token=hub.token) as client:
        client.on("state", failing)
        client.on("state", lambda state, error: seen.append(state))
        await client.ready()
        await client.publish(new_topic(), 1)
    assert "ready" in seen
    assert all(isinstance(error, ZeroDivisionError) for error in contexts) and len(contexts) == len(seen)
