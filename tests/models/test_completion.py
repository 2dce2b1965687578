"""Bodies no mock needs to send: the judge must classify anything without raising."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrl.models.completion import Rules, read_completion, split_reasoning
from tests.models.conftest import SEARCH, click

TOOLS = [SEARCH, click("a")]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "message",
                    "tool_calls",
                    "function",
                    "name",
                    "arguments",
                    "content",
                    "usage",
                    "finish_reason",
                ]
            )
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "content": JSON,
        "reasoning_content": JSON,
        "tool_calls": JSON
        | st.lists(
            st.fixed_dictionaries(
                {
                    "function": st.fixed_dictionaries(
                        {"name": st.sampled_from(["search", "click", "x"]), "arguments": JSON}
                    )
                }
            ),
            max_size=2,
        ),
    },
)
BODIES = JSON | st.fixed_dictionaries(
    {
        "choices": st.lists(
            st.fixed_dictionaries(
                {"message": MESSAGES | JSON, "finish_reason": JSON | st.just("length")}, optional={"logprobs": JSON}
            ),
            max_size=2,
        ),
        "usage": JSON,
    }
)


@given(BODIES, st.booleans(), st.booleans())
def test_every_body_has_exactly_one_outcome(data, json_schema, text_allowed):
    rules = Rules(json_schema=json_schema, allow_text_beside_call=text_allowed)
    output = read_completion(orjson.dumps(data), TOOLS, rules, seed=1, latency_ms=0.0, metadata={})
    outcomes = [len(output.tool_calls) == 1, output.protocol_error is not None, output.policy_failure is not None]
    assert sum(outcomes) == 1 and len(output.tool_calls) <= 1
    assert (output.raw_response is not None) == (not output.tool_calls)


@given(st.binary(max_size=200))
def test_any_bytes_are_classified(body):
    output = read_completion(body, TOOLS, Rules(), seed=1, latency_ms=0.0, metadata={})
    assert output.protocol_error is not None and output.protocol_error.code in ("invalid_body", "no_choices")


@pytest.mark.parametrize(
    ("message", "reasoning", "content"),
    [
        ({"content": "plain"}, None, "plain"),
        ({"content": None, "reasoning": "r"}, "r", None),
        ({"content": "a", "reasoning_content": "r", "reasoning": "r"}, "r", "a"),
        ({"content": "<think>x</think>y"}, "x", "y"),
        ({"content": "x\n</think>\ny"}, "x", "y"),
        ({"content": "<think>cut off"}, "cut off", ""),
        ({"content": "<think></think>y"}, None, "y"),
        ({"content": "pre <think>x</think> y", "reasoning": "r"}, "r\nx", "pre  y"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "image"}]}, None, "ab"),
    ],
)
def test_where_reasoning_hides(message, reasoning, content):
    assert split_reasoning(message) == (reasoning, content)


def test_llama_cpp_and_named_token_ids():
    def tokens(entries):
        choice = {"message": {"content": "x"}, "finish_reason": "stop", "logprobs": {"content": entries}}
        body = orjson.dumps({"choices": [choice], "prompt_token_ids": [1, 2]})
        return read_completion(body, TOOLS, Rules(), seed=1, latency_ms=0.0, metadata={}).tokens

    found = tokens([{"id": 5, "token": "a", "logprob": -1.0}, {"id": 6, "token": "b", "logprob": -2}])
    assert found.completion_ids == [5, 6] and found.completion_logprobs == [-1.0, -2.0] and found.prompt_ids == [1, 2]
    assert tokens([{"token": "token_id:7", "logprob": 0.0}]).completion_ids == [7]
    partial = tokens([{"token": "a", "logprob": -1.0}, {"token": "b"}])
    assert partial.completion_ids is None and partial.completion_logprobs is None
