"""The mock is a measuring instrument: its counters and its walk must be right."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import httpx
import pytest

from rayrl.models import walk
from rayrl.testing import mock_endpoint
from rayrl.testing.mock_faults import BODIES, STATUSES
from tests.models.conftest import MESSAGES, SEARCH, click

FINISH = {"type": "function", "function": {"name": "submit", "parameters": {"type": "object", "properties": {}}}}


async def ask(url: str, **fields: object) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        return await client.post(
            f"{url}/chat/completions", json={"model": "m", "messages": MESSAGES, "tools": [SEARCH], **fields}
        )


async def get(url: str, path: str, **order: object) -> dict:
    async with httpx.AsyncClient(trust_env=False, base_url=url.removesuffix("/v1")) as client:
        return (await (client.post(path, json=order) if order or path == "/reset" else client.get(path))).json()


async def test_the_script_is_consumed_in_order_and_counted(mock):
    await get(mock.url, "/script", script=["503", "two_calls"], default="no_call")
    statuses = [(await ask(mock.url, seed=4)).status_code for _ in range(3)]
    stats = await get(mock.url, "/stats")
    assert statuses == [503, 200, 200]
    assert stats["requests"] == 3 and stats["per_seed"] == {"4": 3} and stats["script_left"] == 0
    assert stats["behaviours"] == {"503": 1, "two_calls": 1, "no_call": 1}
    assert (await get(mock.url, "/reset"))["requests"] == 0
    assert (await ask(mock.url)).json()["choices"][0]["message"]["tool_calls"]


async def test_a_marker_in_a_message_selects_the_behaviour_of_that_request(mock):
    mock.script.append("503")
    marked = await ask(mock.url, messages=[{"role": "user", "content": "x [[mock:429:7]]"}])
    assert marked.status_code == 429 and marked.headers["retry-after"] == "7"
    assert (await ask(mock.url)).status_code == 503


async def test_the_same_requests_get_the_same_answers():
    answers = []
    for _ in range(2):
        async with mock_endpoint.serve(calls=3) as mock:
            answers.append([(await ask(mock.url, seed=s)).content for s in range(4)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("protocol", ["native", "json_schema"])
async def test_a_fixed_number_of_calls_then_the_end(make, protocol):
    async with mock_endpoint.serve(calls=3) as mock:
        model = make(base_url=mock.url, tool_protocol=protocol)
        conversation, names = list(MESSAGES), []
        for step in range(3):
            output = await model.generate(conversation, [SEARCH, FINISH], seed=step)
            names.append(output.tool_calls[0].name)
            conversation.append({"role": "assistant", "content": f"call {step}"})
            conversation.append({"role": "user", "content": "result"})
        assert names == ["search", "search", "submit"]
        after = await model.generate(conversation, [SEARCH, FINISH], seed=9)
        assert (after.tool_calls or [None])[0] is None or after.tool_calls[0].name == "submit"


async def test_the_walk_shops(make, mock):
    pages = [
        [SEARCH],
        [click("back to search", "next >", "700000000001", "700000000002")],
        [click("back to search", "< prev", "颜色=黑", "颜色=白")],
        [click("back to search", "buy now", "颜色=白")],
    ]
    conversation, done = list(MESSAGES), []
    for tools in pages:
        call = (await make().generate(conversation, tools, seed=1)).tool_calls[0]
        done.append(next(iter(call.arguments.values())))
        arguments = __import__("orjson").dumps(call.arguments).decode()
        made = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
        conversation.append({"role": "assistant", "content": "", "tool_calls": [made]})
        conversation.append({"role": "tool", "tool_call_id": call.id, "content": "page"})
    assert done == ["mock query", "700000000001", "颜色=黑", "buy now"]


@pytest.mark.parametrize("behaviour", [*BODIES, *STATUSES, "status:418"])
async def test_every_behaviour_answers_something_http(mock, behaviour):
    assert (await ask(mock.url, messages=[{"role": "user", "content": f"[[mock:{behaviour}]]"}])).status_code >= 200


async def test_unknown_behaviours_are_refused(mock):
    mock.default = "dance"
    assert (await ask(mock.url)).status_code == 418


async def test_latency_and_most_in_flight():
    async with mock_endpoint.serve(latency_s=0.1) as mock:
        await asyncio.gather(*(ask(mock.url, seed=s) for s in range(8)))
        assert mock.stats()["most_in_flight"] == 8


def test_sample_satisfies_common_schemas():
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "minLength": 6},
            "b": {"enum": [3]},
            "c": {"type": "array", "minItems": 2, "items": {"type": "integer", "minimum": 4}},
            "d": {"type": ["boolean", "null"]},
        },
    }
    assert walk.sample(schema) == {"a": "mockxx", "b": 3, "c": [4, 4], "d": False}


def test_the_command_line():
    command = [sys.executable, "-m", "rayrl.testing.mock_endpoint", "--port", "0", "--script", "two_calls"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().strip()
            assert len(asyncio.run(ask(url)).json()["choices"][0]["message"]["tool_calls"]) == 2
        finally:
            server.terminate()
    wrong = subprocess.run([*command[:3], "--default", "dance"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "known: " in wrong.stderr
