from __future__ import annotations

from itertools import pairwise

import jsonschema
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrl.models.completion import Rules, read_completion
from rayrl.models.json_schema import read_action, render_messages, response_format
from rayrl.models.openai_http import OpenAIChatModel
from tests.models.conftest import MESSAGES, SEARCH, click

TOOLS = [SEARCH, click("a", "颜色=黑 | 白")]


def schema(tools, limit=64):
    return response_format(tools, limit)["json_schema"]["schema"]


@pytest.mark.parametrize(
    ("reply", "legal"),
    [
        ({"tool": "search", "arguments": {"query": "lamp"}}, True),
        ({"tool": "click", "arguments": {"value": "颜色=黑 | 白"}}, True),
        ({"tool": "click", "arguments": {"value": "b"}}, False),
        ({"tool": "search", "arguments": {"value": "a"}}, False),
        ({"tool": "search", "arguments": {"query": "x" * 65}}, False),
        ({"tool": "buy", "arguments": {}}, False),
        ({"tool": "search"}, False),
        ({"tool": "search", "arguments": {"query": "a"}, "why": "b"}, False),
    ],
)
def test_the_schema_admits_exactly_one_call_of_one_tool(reply, legal):
    assert jsonschema.Draft202012Validator(schema(TOOLS)).is_valid(reply) is legal


def test_one_tool_needs_no_anyof_and_given_lengths_stay():
    assert "anyOf" not in schema([SEARCH])
    assert schema([SEARCH], 7)["properties"]["arguments"]["properties"]["query"]["maxLength"] == 7
    own = {"type": "function", "function": {"name": "t", "parameters": {"type": "string", "maxLength": 500}}}
    assert schema([own], 7)["properties"]["arguments"]["maxLength"] == 500
    assert SEARCH["function"]["parameters"]["properties"]["query"] == {"type": "string"}  # the input is not touched


CONVERSATION = [
    {"role": "system", "content": "shop well"},
    {"role": "user", "content": "Task: a lamp"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"query":"台灯"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "page 1"},
    {"role": "assistant", "content": "hm"},
    {"role": "user", "content": "call a tool"},
]


def test_rendering_for_templates_that_know_no_tools():
    before = orjson.dumps(CONVERSATION)
    rendered = render_messages(CONVERSATION, TOOLS)
    assert orjson.dumps(CONVERSATION) == before  # what is recorded stays in OpenAI form
    assert [m["role"] for m in rendered] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert orjson.loads(rendered[2]["content"]) == {"tool": "search", "arguments": {"query": "台灯"}}
    assert rendered[3]["content"] == "page 1" and all(set(m) == {"role", "content"} for m in rendered)
    assert rendered[0]["content"].startswith("shop well") and "search(query)" in rendered[0]["content"]


@given(st.lists(st.sampled_from(["system", "user", "assistant", "tool", "developer"]), max_size=8))
def test_roles_alternate_whatever_comes(roles):
    rendered = render_messages([{"role": role, "content": role} for role in roles], TOOLS)
    names = [m["role"] for m in rendered]
    assert rendered[0]["role"] == "system" and set(names) <= {"system", "user", "assistant"}
    assert all(a != b for a, b in pairwise(names))
    assert sum(m["content"].count(r) for m in rendered for r in ["assistant"]) >= roles.count("assistant")


@pytest.mark.parametrize(
    "text", ["", "  ", "I search", '{"tool": "search"}', "[]", '{"tool": 1, "arguments": {}}', '{"tool":']
)
def test_nothing_is_picked_out_of_prose(text):
    assert isinstance(read_action(text), str)


def body(content, finish="stop"):
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish}
    return orjson.dumps({"id": "x", "choices": [choice]})


@pytest.mark.parametrize(
    ("content", "finish", "outcome"),
    [
        ('{"tool": "search", "arguments": {"query": "lamp"}}', "stop", "call"),
        ('<think>so</think>{"tool": "search", "arguments": {"query": "lamp"}}', "stop", "call"),
        ('{"tool": "search", "arguments": {"query": "lamp"}}', "length", "call"),
        ('{"tool": "search", "arguments": {"query": "la', "length", "generation_length"),
        ("", "length", "generation_length"),
        ('{"tool": "search", "arguments": {"query": "la', "stop", "invalid_arguments_json"),
        ("", "stop", "no_tool_call"),
        ('{"tool": "buy", "arguments": {}}', "stop", "unknown_tool"),
        ('{"tool": "search", "arguments": {"q": 1}}', "stop", "invalid_arguments"),
        ('{"tool": "click", "arguments": {"value": "elsewhere"}}', "stop", "call"),
        ('Sure! {"tool": "search", "arguments": {"query": "lamp"}}', "stop", "invalid_arguments_json"),
    ],
)
def test_replies_are_normalised_to_the_same_outcomes(content, finish, outcome):
    output = read_completion(body(content, finish), TOOLS, Rules(json_schema=True), seed=7, latency_ms=1.0, metadata={})
    if outcome == "call":
        assert len(output.tool_calls) == 1 and output.tool_calls[0].id == "call_00000007" and output.content is None
    elif outcome == "generation_length":
        assert output.policy_failure is not None and output.policy_failure.code == outcome and not output.tool_calls
    else:
        assert output.protocol_error is not None and output.protocol_error.code == outcome and not output.tool_calls


async def test_over_http_the_same_call_comes_back(mock, make):
    model: OpenAIChatModel = make(tool_protocol="json_schema", json_schema_max_string=8)
    output = await model.generate(CONVERSATION, TOOLS, seed=1)
    assert [(c.name, c.arguments) for c in output.tool_calls] == [("search", {"query": "mock que"})]
    sent = mock.last_request
    assert "tools" not in sent and "tool_choice" not in sent and sent["response_format"]["type"] == "json_schema"
    native = await make().generate(MESSAGES, TOOLS, seed=1)
    assert native.tool_calls[0].name == output.tool_calls[0].name
    mock.default = "length_broken_call"
    cut = await model.generate(MESSAGES, TOOLS, seed=1)
    assert cut.policy_failure is not None


def test_without_tools_the_conversation_is_sent_as_it_is():
    assert render_messages([{"role": "user", "content": "Why?"}], []) == [{"role": "user", "content": "Why?"}]
