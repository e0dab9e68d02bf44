"""A hub for tests. Copy this file: it needs nothing but the program eventhub, in PATH or named by EVENTHUB."""

import json
import os
import subprocess

import pytest

EVENTHUB = os.environ.get("EVENTHUB", "eventhub")


@pytest.fixture
def hub():
    """A hub that keeps everything in memory: its addresses (websocket, http, ops, nats) and its token."""
    # It ends when its standard input is closed, also when this process is killed.
    process = subprocess.Popen(
        [EVENTHUB, "serve", "--ephemeral", "--log-level=warn"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:  # closes its input, and waits for it
        line = process.stdout.readline()
        assert line, "the hub did not start"
        yield json.loads(line)


@pytest.fixture
def events(hub):
    """A function that returns the first events of a topic."""

    def first(topic, count):
        command = [EVENTHUB, "sub", topic, "--group=test", "--from=earliest", f"--count={count}", f"--url={hub['websocket']}"]
        environment = {**os.environ, "WS_TOKEN": hub["token"]}
        out = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=30, check=True).stdout
        return [json.loads(line) for line in out.splitlines()]

    return first
