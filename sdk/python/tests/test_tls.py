from __future__ import annotations

import pathlib
import ssl
import subprocess

import pytest
from hubs import FAST, Hub, closing, eventually, fails, new_topic, start_hub

from eventhub_client import Client, HttpHub, connect, latest, replay


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A certificate that only those trust who are told to."""
    folder = tmp_path_factory.mktemp("tls")
    goroot = subprocess.run(["go", "env", "GOROOT"], stdout=subprocess.PIPE, check=True, text=True).stdout.strip()
    program = pathlib.Path(goroot, "src/crypto/tls/generate_cert.go")
    make = ["go", "run", str(program), "--host=127.0.0.1", "--ca", "--ecdsa-curve=P256"]
    subprocess.run(make, cwd=folder, check=True, stderr=subprocess.DEVNULL)
    return folder


async def test_tls_of_both_ports(program: None, certificate: pathlib.Path) -> None:
    trusting = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    topic = new_topic()
    env = {"EVENTHUB_TLS_CERT": str(certificate / "cert.pem"), "EVENTHUB_TLS_KEY": str(certificate / "key.pem")}
    with start_hub(env) as hub:
        assert hub.websocket.startswith("wss://") and hub.http.startswith("https://")
        async with connect(hub.websocket, token=hub.token, ssl=trusting) as client:
            await client.publish(topic, 1)
            async with client.events(topic, "g", from_="earliest") as events:
                async for delivery in events:
                    assert delivery.event.payload == 1
                    delivery.ack()
                    break
        reads = HttpHub(hub.http, hub.token, ssl=trusting)
        assert [event.payload async for event in replay(reads, topic)] == [1]

        # A certificate that nobody vouches for is not accepted.
        errors: list[str] = []
        async with closing(Client(hub.websocket, token=hub.token, **FAST)) as client:
            client.on("state", lambda state, error: errors.append(error.message) if error else None)
            await eventually("two attempts", lambda: len(errors) >= 2)
        assert "certificate verify failed" in errors[0]
        with fails("connection_lost") as raised:
            await latest(HttpHub(hub.http, hub.token), topic, "k")
        assert "certificate verify failed" in raised.value.message


async def test_tls_that_is_asked_for_where_there_is_none(hub: Hub) -> None:
    with fails("gave_up", retryable=False) as raised:
        await connect(hub.websocket, token=hub.token, ssl=ssl.create_default_context())
    assert "The address is not usable" in raised.value.message
