"""A planted API key is in no file of a run, whatever the endpoint does; not on the terminal either."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import orjson
import pytest

from rayrl.testing.mock_endpoint import MockEndpoint, serve

KEY = "sk-planted-in-a-run-0123456789"


@pytest.fixture
def endpoint():
    """A mock endpoint on a thread of its own."""
    mock, ready, stop = MockEndpoint(), threading.Event(), threading.Event()

    async def work():
        async with serve(mock):
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    assert ready.wait(10)
    yield mock
    stop.set()
    thread.join(10)


@pytest.mark.parametrize("behaviour", ["ok", "401", "echo_key_500", "echo_key_200", "not_json"])
def test_the_key_reaches_the_endpoint_and_nothing_else(behaviour, endpoint, command, plain_run, monkeypatch):
    monkeypatch.setenv("PLANTED", KEY)
    monkeypatch.setenv("WANDB_SILENT", "true")
    endpoint.default = behaviour
    model = {
        "kind": "openai",
        "base_url": endpoint.url,
        "api_key_env": "PLANTED",
        "retries": {"max_attempts": 2, "backoff_initial_s": 0.01, "backoff_max_s": 0.02},
    }
    mirrored = "offline" if behaviour == "echo_key_500" else "disabled"
    path = plain_run(model=model, execution__max_attempts=1, runtime={"max_actions": 2}, tracking__wandb=mirrored)
    code, result = command("run", path)
    assert code in (0, 6)
    assert endpoint.last_authorization == f"Bearer {KEY}"
    assert KEY not in orjson.dumps(result).decode()
    for file in Path(result["run_dir"]).rglob("*"):
        if file.is_file():
            assert KEY.encode() not in file.read_bytes(), file
    assert os.environ["PLANTED"] == KEY


def test_a_key_that_is_missing_is_named_by_its_variable(endpoint, command, plain_run, monkeypatch):
    monkeypatch.delenv("PLANTED", raising=False)
    path = plain_run(model={"kind": "openai", "base_url": endpoint.url, "api_key_env": "PLANTED"})
    code, found = command("run", path)
    assert code == 2 and "PLANTED" in found["error"]["message"]
    assert endpoint.requests == 0


def test_a_refused_request_is_not_repeated(endpoint, command, plain_run, monkeypatch):
    monkeypatch.setenv("PLANTED", KEY)
    endpoint.default = "401"
    path = plain_run(model={"kind": "openai", "base_url": endpoint.url, "api_key_env": "PLANTED"})
    code, result = command("run", path, "execution.max_attempts=5")
    assert code == 6 and result["ledger"]["gave_up"] == {"http_status": 4}
    assert endpoint.requests == 4, "one request per episode, no second attempt at what cannot be mended"
