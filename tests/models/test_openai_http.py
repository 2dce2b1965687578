"""Every outcome of a request has exactly one owner; the mock's counters prove how many requests were made."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rayrl.errors import ConfigError, ContextOverflowError, ModelTransportError
from rayrl.models.config import ModelConfig
from rayrl.models.openai_http import OpenAIChatModel
from rayrl.schemas import ModelOutput
from tests.models.conftest import FAST, IMPATIENT, MESSAGES, SEARCH, click


async def test_a_call_comes_back_with_usage_and_is_one_request(mock, make):
    output = await make().generate(MESSAGES, [SEARCH], seed=5)
    assert [(c.name, c.arguments) for c in output.tool_calls] == [("search", {"query": "mock query"})]
    assert output.protocol_error is None and output.policy_failure is None and output.raw_response is None
    assert output.usage.prompt_tokens and output.usage.completion_tokens
    assert output.response_id == "mock-1" and output.finish_reason == "tool_calls"
    assert output.latency_ms > 0 and output.metadata["attempts"] == 1
    assert mock.stats()["requests"] == 1


async def test_what_is_sent(mock, make):
    model = make(
        temperature=0.5,
        top_p=0.9,
        top_k=20,
        max_tokens=77,
        extra_body={"enable_thinking": False},
        checkpoint_id="step-80",
    )
    await model.generate(MESSAGES, [SEARCH], seed=123)
    sent = mock.last_request
    assert sent == {
        "model": "mock",
        "messages": MESSAGES,
        "tools": [SEARCH],
        "tool_choice": "required",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "max_tokens": 77,
        "enable_thinking": False,
        "seed": 123,
    }
    assert mock.last_authorization is None


@pytest.mark.parametrize(
    ("settings", "present", "absent"),
    [
        ({"tool_choice": "omit"}, {}, ["tool_choice"]),
        ({"tool_choice": "auto"}, {"tool_choice": "auto"}, []),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}, []),
        ({"send_seed": False}, {}, ["seed"]),
        ({"temperature": None, "max_tokens": None}, {}, ["temperature", "max_tokens"]),
        ({"max_tokens_field": "max_completion_tokens", "max_tokens": 9}, {"max_completion_tokens": 9}, ["max_tokens"]),
        ({"logprobs": True}, {"logprobs": True}, []),
        ({"token_ids": True}, {"return_token_ids": True}, []),
    ],
)
async def test_each_knob_changes_the_request(mock, make, settings, present, absent):
    await make(**settings).generate(MESSAGES, [SEARCH], seed=1)
    assert mock.last_request is not None
    assert present.items() <= mock.last_request.items()
    assert not [key for key in absent if key in mock.last_request]


PROTOCOL = {
    "no_call": "no_tool_call",
    "two_calls": "multiple_tool_calls",
    "unknown_tool": "unknown_tool",
    "bad_json_args": "invalid_arguments_json",
    "list_args": "invalid_arguments",
    "wrong_type_args": "invalid_arguments",
    "missing_args": "invalid_arguments",
    "extra_args": "invalid_arguments",
    "no_choices": "no_choices",
    "no_message": "no_choices",
    "truncated_json": "invalid_body",
    "not_json": "invalid_body",
    "json_list": "invalid_body",
    "cut_body": "invalid_body",
    "reset_body": "invalid_body",
}


@pytest.mark.parametrize(("behaviour", "code"), PROTOCOL.items())
async def test_a_200_is_never_sampled_again(mock, make, behaviour, code):
    mock.default = behaviour
    output: ModelOutput = await make().generate(MESSAGES, [SEARCH], seed=9)
    assert output.protocol_error is not None and output.protocol_error.code == code
    assert output.tool_calls == [] and output.policy_failure is None and output.raw_response is not None
    assert mock.stats()["requests"] == 1


async def test_text_beside_a_call_is_an_error_only_where_forbidden(mock, make):
    mock.default = "text_beside_call"
    allowed = await make().generate(MESSAGES, [SEARCH], seed=1)
    assert allowed.tool_calls and allowed.content == "Let me search."
    refused = await make(allow_text_beside_call=False).generate(MESSAGES, [SEARCH], seed=1)
    assert refused.protocol_error is not None and refused.protocol_error.code == "text_beside_call"
    assert refused.tool_calls == []
    mock.default = "think"  # reasoning is no text
    assert (await make(allow_text_beside_call=False).generate(MESSAGES, [SEARCH], seed=1)).tool_calls


async def test_a_click_outside_the_enum_is_left_to_the_environment(mock, make):
    mock.default = "click_elsewhere"
    output = await make().generate(MESSAGES, [click("a", "b")], seed=1)
    assert output.protocol_error is None
    assert output.tool_calls[0].arguments == {"value": "something that is not on the page"}


@pytest.mark.parametrize("behaviour", ["length", "length_broken_call", "length_parsed_call", "length_second_call"])
async def test_a_cut_completion_is_never_executed(mock, make, behaviour):
    mock.default = behaviour
    output = await make().generate(MESSAGES, [SEARCH], seed=1)
    assert output.policy_failure is not None and output.policy_failure.code == "generation_length"
    assert output.tool_calls == [] and output.protocol_error is None and output.raw_response is not None
    assert mock.stats()["requests"] == 1


async def test_one_whole_call_counts_even_when_the_limit_was_reached_after_it(mock, make):
    mock.default = "length_whole_call"
    output = await make().generate(MESSAGES, [SEARCH], seed=1)
    assert output.policy_failure is None and len(output.tool_calls) == 1 and output.finish_reason == "length"


async def test_reasoning_is_split_off(mock, make):
    mock.default = "reasoning"
    output = await make().generate(MESSAGES, [SEARCH], seed=1)
    assert output.reasoning == "first the category, then the price" and not output.content
    mock.default = "think"
    output = await make().generate(MESSAGES, [SEARCH], seed=1)
    assert output.reasoning == "first the category" and not output.content
    mock.default = "length"
    output = await make().generate(MESSAGES, [SEARCH], seed=1)
    assert output.reasoning == "so many words" and not output.content


async def test_token_ids_and_logprobs_are_kept_as_returned(mock, make):
    mock.default = "token_ids"
    tokens = (await make().generate(MESSAGES, [SEARCH], seed=1)).tokens
    assert tokens is not None
    assert tokens.completion_ids == [11, 12, 13] and tokens.completion_logprobs == [-0.25, -0.5, 0.0]
    mock.default = "ok"
    assert (await make().generate(MESSAGES, [SEARCH], seed=1)).tokens is None


@pytest.mark.parametrize("status", ["408", "409", "425", "429", "500", "502", "503", "504"])
async def test_retryable_statuses_are_retried_and_bounded(mock, make, status):
    mock.script.extend([status, status])
    output = await make().generate(MESSAGES, [SEARCH], seed=3)
    assert output.tool_calls and output.metadata["attempts"] == 3 and output.metadata["retried"] == [status, status]
    assert mock.stats()["most_per_seed"] == 3
    mock.default = status
    with pytest.raises(ModelTransportError) as caught:
        await make().generate(MESSAGES, [SEARCH], seed=4)
    assert caught.value.code == "retries_exhausted" and caught.value.detail["attempts"] == 3
    assert mock.stats()["per_seed"]["4"] == 3


@pytest.mark.parametrize("status", ["400", "401", "404", "422"])
async def test_other_4xx_fail_at_once(mock, make, status):
    mock.default = status
    with pytest.raises(ModelTransportError) as caught:
        await make().generate(MESSAGES, [SEARCH], seed=3)
    assert caught.value.detail["status"] == int(status) and caught.value.code == "http_status"
    assert mock.stats()["requests"] == 1


@pytest.mark.parametrize("behaviour", ["reset", "never"])
async def test_network_faults_are_retried_and_bounded(mock, make, behaviour):
    mock.script.append(behaviour)
    timeouts = IMPATIENT if behaviour == "never" else FAST["timeouts"]
    assert (await make(timeouts=timeouts).generate(MESSAGES, [SEARCH], seed=3)).metadata["attempts"] >= 2
    mock.default = behaviour
    with pytest.raises(ModelTransportError) as caught:
        await make(timeouts=timeouts).generate(MESSAGES, [SEARCH], seed=4)
    assert caught.value.detail["trail"] == [{"reset": "network", "never": "timeout"}[behaviour]] * 3
    assert mock.stats()["per_seed"]["4"] == 3


async def test_nobody_listens(make, mock):
    model = OpenAIChatModel(ModelConfig.model_validate({"base_url": "http://127.0.0.1:9/v1", **FAST}))
    with pytest.raises(ModelTransportError) as caught:
        await model.generate(MESSAGES, [SEARCH], seed=1)
    assert caught.value.detail["trail"] == ["network"] * 3
    await model.aclose()


async def test_a_dripping_endpoint_ends_and_is_not_sampled_again(mock, make):
    mock.default = "drip"
    started = time.monotonic()
    with pytest.raises(ModelTransportError) as caught:
        await make(timeouts=IMPATIENT).generate(MESSAGES, [SEARCH], seed=1)
    assert caught.value.code == "body_timeout" and time.monotonic() - started < 8
    assert mock.stats()["requests"] == 1


async def test_total_time_is_bounded_whatever_the_attempts(mock, make):
    mock.default = "never"
    retries = {"max_attempts": 100, "backoff_initial_s": 0.01, "backoff_max_s": 0.01}
    timeouts = {**FAST["timeouts"], "read_s": 0.2, "total_s": 0.7}
    started = time.monotonic()
    with pytest.raises(ModelTransportError) as caught:
        await make(retries=retries, timeouts=timeouts).generate(MESSAGES, [SEARCH], seed=1)
    assert time.monotonic() - started < 8 and caught.value.detail["spent"] == "time"
    assert mock.stats()["requests"] <= 5


@pytest.mark.parametrize("behaviour", ["429:0.3", "503:0.3"])
async def test_retry_after_seconds_are_obeyed(mock, make, behaviour):
    mock.script.append(behaviour)
    started = time.monotonic()
    assert (await make().generate(MESSAGES, [SEARCH], seed=1)).tool_calls
    assert time.monotonic() - started >= 0.3


async def test_retry_after_date_is_obeyed(mock, make):
    mock.script.append("429:date")
    events: list[tuple[str, dict[str, Any]]] = []
    assert (await make(on_event=lambda *e: events.append(e)).generate(MESSAGES, [SEARCH], seed=1)).tool_calls
    # HTTP dates have whole seconds: "a second ahead" is between 0 and 1 s
    assert [kind for kind, _ in events] == ["model_throttled", "model_retry"] and events[1][1]["wait_s"] <= 1.0


async def test_a_retry_after_beyond_the_allowed_time_fails_at_once(mock, make):
    mock.default = "429:3600"
    model = make()
    started = time.monotonic()
    with pytest.raises(ModelTransportError) as caught:
        await model.generate(MESSAGES, [SEARCH], seed=1)
    assert caught.value.detail["retry_after_s"] == 3600
    with pytest.raises(ModelTransportError) as caught:  # everybody else is told at once as well
        await model.generate(MESSAGES, [SEARCH], seed=2)
    assert caught.value.code == "queue_timeout" and time.monotonic() - started < 20
    assert mock.stats()["requests"] == 1


async def test_a_429_storm_settles(mock, make):
    mock.script.extend(["429:0.05"] * 10)
    model = make(max_concurrency=16)
    outputs = await asyncio.gather(*(model.generate(MESSAGES, [SEARCH], seed=s) for s in range(60)))
    assert all(output.tool_calls for output in outputs)
    stats = mock.stats()
    assert stats["requests"] == 70 and stats["most_in_flight"] <= 16 and stats["most_per_seed"] <= 3
    assert model.stats()["limiter_in_flight"] == 0 and model.stats()["limiter_cuts"] == 1


@pytest.mark.parametrize("server", ["openai", "vllm", "sglang", "llama_cpp", "wrapped_200"])
async def test_each_servers_context_error_is_known(mock, make, server):
    mock.default = f"context_{server}"
    with pytest.raises(ContextOverflowError):
        await make().generate(MESSAGES, [SEARCH], seed=1)
    assert mock.stats()["requests"] == 1


async def test_a_hopeless_conversation_is_refused_without_a_request(mock, make):
    long = [*MESSAGES, {"role": "user", "content": "word " * 5000}]
    with pytest.raises(ContextOverflowError) as caught:
        await make(context_limit=2000).generate(long, [SEARCH], seed=1)
    assert caught.value.detail["known_beforehand"] and mock.stats()["requests"] == 0
    assert (await make(context_limit=8000).generate(long, [SEARCH], seed=1)).tool_calls  # might fit: the server decides


async def test_a_large_response_schema_is_not_taken_for_prompt(mock, make):
    many = click(*(f"70000000{i:04d}" for i in range(500)))
    settings = {"context_limit": 1000, "tool_protocol": "json_schema"}
    assert (await make(**settings).generate(MESSAGES, [SEARCH, many], seed=1)).tool_calls


async def test_cancelling_gives_the_permit_back(mock, make):
    mock.default = "never"
    model = make(max_concurrency=1)
    task = asyncio.create_task(model.generate(MESSAGES, [SEARCH], seed=1))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    mock.default = "ok"
    assert (await model.generate(MESSAGES, [SEARCH], seed=2)).tool_calls


async def test_closing_is_idempotent_and_final(make):
    model = make()
    await model.generate(MESSAGES, [SEARCH], seed=1)
    await model.aclose()
    await model.aclose()
    with pytest.raises(RuntimeError):
        await model.generate(MESSAGES, [SEARCH], seed=1)


async def test_a_lone_surrogate_does_not_kill_the_call(mock, make):
    assert (await make().generate([{"role": "user", "content": "broken \ud800 page"}], [SEARCH], seed=1)).tool_calls


async def test_proxies_of_the_environment_are_off_for_loopback(mock, make, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert (await make().generate(MESSAGES, [SEARCH], seed=1)).tool_calls
    with pytest.raises(ModelTransportError):
        await make(trust_env=True).generate(MESSAGES, [SEARCH], seed=1)


def test_a_missing_key_variable_is_said_at_once(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        OpenAIChatModel(ModelConfig(base_url="http://127.0.0.1:1/v1", api_key_env="NO_SUCH_KEY"))
