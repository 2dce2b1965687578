"""Bodies of the mock endpoint's faults: what servers really send when they answer, but not with one valid call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from rayrl.testing.mock_policy import completion, next_call, tool_call

JsonDict = dict[str, Any]
Body = Callable[[JsonDict, int, str], tuple[int, bytes]]
"""``(request, number, authorization header) -> (status, body)``."""

STATUSES = ("400", "401", "404", "408", "409", "422", "425", "429", "500", "502", "503", "504")

VLLM_CONTEXT = (
    "This model's maximum context length is 8192 tokens. However, you requested 9001 tokens "
    "(8001 in the messages, 1000 in the completion). Please reduce the length of the messages or completion."
)
CONTEXT_ERRORS: dict[str, tuple[int, JsonDict]] = {
    "openai": (
        400,
        {
            "error": {
                "message": "Your input is too big.",
                "type": "invalid_request_error",
                "code": "context_length_exceeded",
            }
        },
    ),
    "vllm": (400, {"object": "error", "message": VLLM_CONTEXT, "type": "BadRequestError", "param": None, "code": 400}),
    "sglang": (
        400,
        {
            "object": "error",
            "message": "The input (9001 tokens) is longer than the model's context length (8192 tokens).",
        },
    ),
    "llama_cpp": (
        400,
        {
            "error": {
                "code": 400,
                "message": "the request exceeds the available context size. try increasing the context size",
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 9001,
                "n_ctx": 8192,
            }
        },
    ),
    "wrapped_200": (200, {"error": {"message": VLLM_CONTEXT, "code": 400}}),
}


def _ok(request: JsonDict, number: int) -> tuple[JsonDict, tuple[str, JsonDict]]:
    call = next_call(request, calls=None) or ("search", {"query": "mock"})
    return completion(request, call, number=number), call


def _edited(edit: Callable[[JsonDict, JsonDict, tuple[str, JsonDict]], None]) -> Body:
    """A fault that changes the behaving completion: ``edit(choice, message, call)``."""

    def body(request: JsonDict, number: int, _: str) -> tuple[int, bytes]:
        data, call = _ok(request, number)
        choice = data["choices"][0]
        edit(choice, choice["message"], call)
        return 200, orjson.dumps(data)

    return body


def _set_call(message: JsonDict, name: str, arguments: JsonDict | str) -> None:
    if "tool_calls" in message:
        message["tool_calls"] = [tool_call(1, name, arguments)]
    elif isinstance(arguments, str):
        message["content"] = f'{{"tool": "{name}", "arguments": {arguments}'
    else:
        message["content"] = orjson.dumps({"tool": name, "arguments": arguments}).decode()


def _two_calls(choice: JsonDict, message: JsonDict, call: tuple[str, JsonDict]) -> None:
    message["tool_calls"] = [tool_call(1, *call), tool_call(2, *call)]


def _no_call(choice: JsonDict, message: JsonDict, call: tuple[str, JsonDict]) -> None:
    message.pop("tool_calls", None)
    message["content"] = "I would rather talk about it."
    choice["finish_reason"] = "stop"


def _length(choice: JsonDict, message: JsonDict, call: tuple[str, JsonDict]) -> None:
    message.pop("tool_calls", None)
    message["content"] = "<think>so many words"
    choice["finish_reason"] = "length"


def _length_broken_call(choice: JsonDict, message: JsonDict, call: tuple[str, JsonDict]) -> None:
    _set_call(message, call[0], '{"query": "cut in the mid')
    choice["finish_reason"] = "length"


def _length_whole_call(choice: JsonDict, message: JsonDict, call: tuple[str, JsonDict]) -> None:
    choice["finish_reason"] = "length"


def _length_parsed_call(choice: JsonDict, message: JsonDict, call: tuple[str, JsonDict]) -> None:
    message["tool_calls"][0]["function"]["arguments"] = call[1]
    choice["finish_reason"] = "length"


def _length_second_call(choice: JsonDict, message: JsonDict, call: tuple[str, JsonDict]) -> None:
    message["content"] = '<tool_call>{"name": "click", "arg'
    choice["finish_reason"] = "length"


def _reasoning(choice: JsonDict, message: JsonDict, call: tuple[str, JsonDict]) -> None:
    message["reasoning_content"] = "first the category, then the price"


def _think(choice: JsonDict, message: JsonDict, call: tuple[str, JsonDict]) -> None:
    message["content"] = f"<think>\nfirst the category\n</think>\n{message['content'] or ''}"


def _text_beside(choice: JsonDict, message: JsonDict, call: tuple[str, JsonDict]) -> None:
    message["content"] = "Let me search."


def _token_ids(choice: JsonDict, message: JsonDict, call: tuple[str, JsonDict]) -> None:
    choice["token_ids"] = [11, 12, 13]
    choice["logprobs"] = {
        "content": [{"token": "a", "logprob": -0.25}, {"token": "b", "logprob": -0.5}, {"token": "c", "logprob": 0.0}]
    }


def _click_elsewhere(choice: JsonDict, message: JsonDict, call: tuple[str, JsonDict]) -> None:
    _set_call(message, "click", {"value": "something that is not on the page"})


def _context(name: str) -> Body:
    status, data = CONTEXT_ERRORS[name]
    return lambda request, number, authorization: (status, orjson.dumps(data))


def _fixed(status: int, body: bytes) -> Body:
    return lambda request, number, authorization: (status, body)


def _truncated_json(request: JsonDict, number: int, _: str) -> tuple[int, bytes]:
    whole = orjson.dumps(_ok(request, number)[0])
    return 200, whole[: len(whole) // 2]


def _echo_key(status: int) -> Body:
    def body(request: JsonDict, number: int, authorization: str) -> tuple[int, bytes]:
        message = f"Incorrect API key provided: {authorization.removeprefix('Bearer ')}. Header was {authorization!r}."
        return status, orjson.dumps({"error": {"message": message, "type": "invalid_request_error"}})

    return body


BODIES: dict[str, Body] = {
    "truncated_json": _truncated_json,
    "not_json": _fixed(200, b"<html>proxy says hello</html>"),
    "json_list": _fixed(200, b"[]"),
    "no_choices": _fixed(200, b'{"id": "mock", "object": "chat.completion", "choices": []}'),
    "no_message": _fixed(200, b'{"id": "mock", "choices": [{"index": 0, "finish_reason": "stop"}]}'),
    "two_calls": _edited(_two_calls),
    "no_call": _edited(_no_call),
    "unknown_tool": _edited(lambda choice, message, call: _set_call(message, "purchase_everything", {})),
    "bad_json_args": _edited(lambda choice, message, call: _set_call(message, call[0], '{"query": ')),
    "list_args": _edited(lambda choice, message, call: _set_call(message, call[0], "[1, 2]")),
    "wrong_type_args": _edited(lambda choice, message, call: _set_call(message, call[0], dict.fromkeys(call[1], 7))),
    "missing_args": _edited(lambda choice, message, call: _set_call(message, call[0], {})),
    "extra_args": _edited(lambda choice, message, call: _set_call(message, call[0], {**call[1], "force": True})),
    "click_elsewhere": _edited(_click_elsewhere),
    "text_beside_call": _edited(_text_beside),
    "length": _edited(_length),
    "length_broken_call": _edited(_length_broken_call),
    "length_whole_call": _edited(_length_whole_call),
    "length_parsed_call": _edited(_length_parsed_call),
    "length_second_call": _edited(_length_second_call),
    "reasoning": _edited(_reasoning),
    "think": _edited(_think),
    "token_ids": _edited(_token_ids),
    "context": _context("vllm"),
    **{f"context_{name}": _context(name) for name in CONTEXT_ERRORS},
    "echo_key": _echo_key(401),
    "echo_key_500": _echo_key(500),
    "echo_key_200": _echo_key(200),
}
