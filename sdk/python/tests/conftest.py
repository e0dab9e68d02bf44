"""Runs coroutine functions as tests, against hubs that are built from this repository."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

import hubs
import pytest

ROOT = pathlib.Path(__file__).parents[3]
#: A test that hangs fails after this time.
TEST_SECONDS = float(os.environ.get("TEST_SECONDS", "180"))


@pytest.fixture(scope="session", autouse=True)
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The program that EVENTHUB names, else one that is built now."""
    if "EVENTHUB" not in os.environ:
        built = tmp_path_factory.mktemp("bin") / "eventhub"
        subprocess.run(["go", "build", "-o", str(built), "./cmd/eventhub"], cwd=ROOT, check=True)
        os.environ["EVENTHUB"] = str(built)
    gc.freeze()  # what is there now need not be looked at after each test
    yield


@pytest.fixture(scope="session")
def hub(program: None) -> Iterator[hubs.Hub]:
    with hubs.start_hub({"JWT_SECRET": hubs.SECRET, "WS_TOKEN": "the hub's own token"}) as hub:
        yield hub


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    args = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(_run(pyfuncitem.obj, args))
    gc.collect()  # what was not closed warns here, and a warning is a failure
    return True


async def _run(test: Any, args: dict[str, Any]) -> None:
    """A test leaves no task behind, and nothing is raised where nobody sees it."""
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    await asyncio.wait_for(test(**args), TEST_SECONDS)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        await asyncio.wait(left, timeout=5)  # what is about to end
    assert not [task for task in left if not task.done()]
    assert not unseen
