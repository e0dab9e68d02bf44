"""The package as users get it, its examples, and its README."""

from __future__ import annotations

import asyncio
import os
import pathlib
import re
import signal
import sys
import tomllib
from collections.abc import Iterator

import pytest
from hubs import Hub, new_topic

import eventhub_client
from eventhub_client.ids import new_id_maker
from eventhub_client.tokens import expiry, refresh_delay

HERE = pathlib.Path(__file__).parents[1]
EXAMPLES = sorted((HERE / "examples").glob("*.py"))


def test_the_package_says_what_it_is() -> None:
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["websockets>=10.4"]
    assert (HERE / "eventhub_client/py.typed").exists()
    assert eventhub_client.__all__ == sorted(eventhub_client.__all__)
    assert all(hasattr(eventhub_client, name) for name in eventhub_client.__all__)


def test_ids_rise_also_when_the_clock_is_set_back_or_a_millisecond_is_full() -> None:
    now = 1_800_000_000_000
    new_id = new_id_maker(lambda: now)
    ids = [new_id() for _ in range(10_000)]
    now -= 60_000
    ids += [new_id(), new_id()]
    now += 120_000
    ids.append(new_id())
    assert ids == sorted(set(ids))
    for one in ids:
        assert re.fullmatch("[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", one)
    assert len({new_id_maker()()[19:] for _ in range(1_000)}) == 1_000


def test_expiry_is_known_of_jwts_only() -> None:
    assert expiry("a.eyJleHAiOjEyM30.c") == 123
    for token in ("", "opaque", "a.b.c", "a.eyJleHAiOiIxIn0.c", "a.W10.c", "a.eyJleHAiOnRydWV9.c", "a.\u00fc.c"):
        assert expiry(token) is None, token
    assert refresh_delay(100, 0) == 80
    assert refresh_delay(10_000, 0) == 9_940
    assert refresh_delay(0, 100) == 0
    assert refresh_delay(1e12, 0) < 2**31


# -- the examples


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
async def test_example(hub: Hub, path: pathlib.Path) -> None:
    code, out, err = await run(hub, str(path))
    assert (code, err) == (0, "")
    assert out.splitlines() == re.findall("^# Prints: (.*)$", path.read_text(), re.MULTILINE)


async def run(hub: Hub, *args: str) -> tuple[int | None, str, str]:
    """Runs a program with this package, and returns its exit code and what it prints."""
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "EVENTHUB_URL": hub.websocket, "EVENTHUB_HTTP": hub.http, "EVENTHUB_TOKEN": hub.token, "PYTHONPATH": paths}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-W", "error", *args, stdout=pipe, stderr=pipe, env=env)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


BUSY = """
import asyncio, os, signal
from eventhub_client import connect

async def main():
    begun = asyncio.Event()

    async def handle(delivery):
        begun.set()
        await asyncio.sleep(SECONDS)
        print("finished")

    hub = await connect(os.environ["EVENTHUB_URL"], token=os.environ["EVENTHUB_TOKEN"])
    await hub.subscribe("TOPIC", "g", handle)
    await hub.publish("TOPIC", 1)
    await begun.wait()
    END

asyncio.run(main())
"""


def busy(seconds: float, end: str) -> str:
    return BUSY.replace("SECONDS", str(seconds)).replace("TOPIC", new_topic()).replace("END", end)


async def test_an_interrupted_program_lets_its_handlers_finish(hub: Hub) -> None:
    end = """
    async with hub:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
"""
    code, out, err = await run(hub, "-c", busy(0.2, end))
    assert (code, out) == (-signal.SIGINT, "finished\n")
    assert err.endswith("KeyboardInterrupt\n") and "Warning" not in err


async def test_a_program_that_forgets_to_close_its_client_ends_without_complaint(hub: Hub) -> None:
    assert await run(hub, "-c", busy(600, "return")) == (0, "", "")


def blocks(text: str) -> Iterator[str]:
    return (match[1].strip("\n") for match in re.finditer("```python\n(.*?)```", text, re.DOTALL))


def test_readme_shows_the_examples_as_they_are() -> None:
    readme = (HERE / "README.md").read_text()
    code = [path.read_text() for path in EXAMPLES]
    shown = list(blocks(readme))
    assert len(shown) >= 2
    for block in shown:
        assert any(block in text for text in code), block
    for path in EXAMPLES:
        assert f"(examples/{path.name})" in readme, path.name
