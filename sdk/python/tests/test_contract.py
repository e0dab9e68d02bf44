"""What the client and the hub must agree on.

That is testdata/errors.json, docs/asyncapi.yaml, and the conversations of testdata/frames, which
run here over the client's own socket.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import re
import time
from typing import Any

import pytest
from hubs import Hub, new_topic

from eventhub_client import Event, EventHubError, caps, client_codes, client_ops, hub_codes, hub_ops
from eventhub_client.errors import gives_up
from eventhub_client.frames import loads
from eventhub_client.sockets import open_socket

ROOT = pathlib.Path(__file__).parents[3]


def test_the_codes_are_those_of_the_hub_and_say_the_same_about_another_try() -> None:
    errors = json.loads((ROOT / "testdata/errors.json").read_text())
    retry: dict[str, bool] = {}
    for entry in errors["codes"]:
        retry[entry["code"]] = retry.get(entry["code"], False) or entry["retry"]
    assert hub_codes == retry
    for close in errors["closes"]:
        assert gives_up(close["code"]) != close["reconnect"], close
    assert not set(client_codes) & set(retry)
    for code, may in retry.items():
        assert EventHubError(code, "").retryable is may
    assert EventHubError("publish_failed", "too large", False).retryable is False
    assert EventHubError("a code of a newer hub", "").retryable is False


def test_the_codes_of_the_client_are_those_of_the_typescript_client() -> None:
    text = (ROOT / "sdk/src/errors.ts").read_text()
    block = text[text.index("clientCodes") : text.index("as const;\n\nexport type HubCode")]
    codes = {code: may == "true" for code, may in re.findall(r"^  (\w+): (true|false),", block, re.MULTILINE)}
    assert codes.pop("no_websocket") is False  # Python always has one
    assert client_codes == codes


def test_the_frames_are_those_that_asyncapi_describes() -> None:
    text = (ROOT / "docs/asyncapi.yaml").read_text()
    messages = text[text.index("\n  messages:") : text.index("\n  schemas:")]
    assert sorted(client_ops + hub_ops) == sorted(re.findall(r"^ {4}([A-Z]+):$", messages, re.MULTILINE))
    for cap in caps:
        assert cap in text


# -- conversations


class Conversation:
    def __init__(self, url: str) -> None:
        self._inbox: asyncio.Queue[str] = asyncio.Queue()
        self._open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._socket = open_socket(url, self, None)

    async def opened_now(self) -> Conversation:
        await self._open
        return self

    def opened(self) -> None:
        self._open.set_result(None)

    def text(self, data: str) -> None:
        self._inbox.put_nowait(data)

    def ended(self, code: int, reason: str) -> None:
        self._inbox.put_nowait(json.dumps(f"the connection ended: {code} {reason}"))

    def unusable(self, cause: Exception) -> None:
        self._open.set_exception(cause)

    def send(self, text: str) -> None:
        self._socket.send(text)

    async def next(self) -> str:
        async with asyncio.timeout(60):
            return await self._inbox.get()

    async def close(self) -> None:
        self._socket.drop()
        await self._socket.gone()


TYPES = {"string": str, "number": (int, float), "boolean": bool, "null": type(None), "object": dict, "array": list}


def matches(want: Any, got: Any, names: dict[str, str], fresh: dict[str, str], raw: str) -> bool:
    """Compares a value with what a fixture wants. New names are kept in fresh."""
    if isinstance(want, list):
        return isinstance(got, list) and len(want) == len(got) and all(matches(w, g, names, fresh, raw) for w, g in zip(want, got))
    if not isinstance(want, dict):
        return type(want) is type(got) and want == got
    placeholder, of = next(iter(want.items()), ("", None))
    match placeholder:
        case "$uuidv7" | "$bind":
            if not isinstance(got, str) or (placeholder == "$uuidv7" and not re.match("[0-9a-f]{8}-[0-9a-f]{4}-7", got)):
                return False
            if names.get(of, fresh.get(of, got)) != got:
                return False
            fresh[of] = got
            return True
        case "$ref":
            return names.get(of, fresh.get(of)) == got
        case "$int":
            return type(got) is int and of[0] <= got <= of[1]
        case "$now":
            return type(got) is int and abs(got - time.time() * 1000) <= of
        case "$any":
            return isinstance(got, TYPES[of]) and (of == "boolean" or not isinstance(got, bool))
        case "$contains":
            return isinstance(got, str) and of.lower() in got.lower()
        case "$raw":
            return of in raw
        case "$repeat":
            return bool(got == of[0] * of[1])
    return isinstance(got, dict) and want.keys() == got.keys() and all(matches(want[k], got[k], names, fresh, raw) for k in want)


def filled(text: str, names: dict[str, str]) -> str:
    text = re.sub(r'\{\s*"\$ref"\s*:\s*"(\w+)"\s*\}', lambda m: json.dumps(names[m[1]]), text)
    return re.sub(r'\{\s*"\$repeat"\s*:\s*\["(.*?)",\s*(\d+)\]\s*\}', lambda m: json.dumps(m[1] * int(m[2])), text)


def frame_text(frame: Any, names: dict[str, str]) -> str:
    text = frame if isinstance(frame, str) else json.dumps(frame, separators=(",", ":"), ensure_ascii=False)
    return filled(re.sub('"@number (.*?)@"', r"\1", text), names)


async def play(hub: Hub, source: str) -> None:
    scenario = json.loads(source)
    # What is sent keeps its numbers as they are written, also those that no float has.
    sends = json.loads(source, parse_float=lambda number: f"@number {number}@")
    names: dict[str, str] = {}
    connections: dict[str, Conversation] = {}
    try:
        for step, sent in zip(scenario["steps"], sends["steps"]):
            name = step.get("conn", "main")
            if name not in connections:
                connections[name] = await Conversation(hub.websocket).opened_now()
            conversation = connections[name]
            for frame in [sent["send"]] if "send" in sent else sent.get("send_all", []):
                conversation.send(frame_text(frame, names))
            wanted = [step["expect"]] if "expect" in step else list(step.get("expect_all", []))
            while wanted:
                raw = await conversation.next()
                got = loads(raw)
                for want in wanted:
                    fresh: dict[str, str] = {}
                    if matches(want, got, names, fresh, raw):
                        names.update(fresh)
                        wanted.remove(want)
                        break
                else:
                    pytest.fail(f"came: {raw[:500]}\nwanted: {json.dumps(wanted)[:500]}")
                assert got["op"] in hub_ops
                if got["op"] == "ERR":
                    assert got["code"] in hub_codes
                if got["op"] == "EVENT":
                    event = Event.from_record(got["event"])
                    assert (event.id, event.payload) == (got["event"]["id"], got["event"]["payload"])
    finally:
        for conversation in connections.values():
            await conversation.close()


# The steps that break a connection on purpose, and a hub with settings of its own, are for the
# runner of the hub.
FOR_THE_HUB = ("send_binary", "expect_close", "disconnect")
# Limits of a hub with its defaults.
OTHERS = ("topic_limit", "subscription_limit")


def scenarios() -> list[pathlib.Path]:
    found = []
    for path in sorted((ROOT / "testdata/frames").glob("*.json")):
        scenario = json.loads(path.read_text())
        steps = scenario["steps"]
        if path.stem not in OTHERS and "config" not in scenario and not any(field in step for step in steps for field in FOR_THE_HUB):
            found.append(path)
    return found


def test_most_conversations_run_here() -> None:
    assert len(scenarios()) >= 45


@pytest.mark.parametrize("path", scenarios(), ids=lambda path: path.stem)
async def test_conversation(hub: Hub, path: pathlib.Path) -> None:
    await play(hub, path.read_text().replace("${token}", hub.token).replace("${topic}", new_topic().replace(".", "_")))
