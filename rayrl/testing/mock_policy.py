"""What the mock endpoint answers when it behaves: the plain walk, in the protocol the request asks for. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from rayrl.models import walk

JsonDict = dict[str, Any]


def functions_of(request: JsonDict) -> dict[str, JsonDict]:
    """Name to parameters of the offered functions, from ``tools`` or from the response schema."""
    if isinstance(request.get("tools"), list):
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in request["tools"]}
    schema = ((request.get("response_format") or {}).get("json_schema") or {}).get("schema") or {}
    actions = schema.get("anyOf", [schema] if schema else [])
    return {action["properties"]["tool"]["const"]: action["properties"]["arguments"] for action in actions}


def next_call(request: JsonDict, *, calls: int | None) -> tuple[str, JsonDict] | None:
    """The behaving answer: ``(tool, arguments)``, or None for a closing text."""
    return walk.next_call(functions_of(request), request.get("messages") or [], calls=calls)


def completion(request: JsonDict, call: tuple[str, JsonDict] | None, *, number: int) -> JsonDict:
    """A chat completion holding ``call`` in the protocol the request asks for."""
    text = orjson.dumps({"tool": call[0], "arguments": call[1]}).decode() if call else "done"
    if call is None or "response_format" in request:
        message: JsonDict = {"role": "assistant", "content": text}
        finish = "stop"
    else:
        message = {"role": "assistant", "content": None, "tool_calls": [tool_call(number, *call)]}
        finish = "tool_calls"
    prompt = max(1, len(orjson.dumps(request.get("messages"))) // 4)
    spoken = max(1, len(text) // 4)
    return {
        "id": f"mock-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": request.get("model", "mock"),
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": spoken, "total_tokens": prompt + spoken},
    }


def tool_call(number: int, name: str, arguments: JsonDict | str) -> JsonDict:
    """One OpenAI tool call; text arguments are passed on as they are, broken or not."""
    raw = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": raw}}
