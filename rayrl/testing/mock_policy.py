"""What the mock endpoint answers when it behaves: a fixed walk over whatever tools a page offers. Pure.

The walk searches, opens the first product, chooses a value on every axis and buys. With ``calls`` set, the n-th call of
a conversation is the last one: an ending tool when the page has one, otherwise a plain text answer.
"""

from __future__ import annotations

from typing import Any

import orjson

JsonDict = dict[str, Any]

_NAVIGATION = frozenset({"back to search", "< prev", "next >"})
_ENDING = ("finish", "submit", "submit_verdict", "done")


def calls_so_far(messages: list[JsonDict]) -> int:
    """How many completions the conversation already holds."""
    return sum(message.get("role") == "assistant" for message in messages)


def tools_of(request: JsonDict) -> list[JsonDict]:
    """The offered functions, from ``tools`` or from the response schema."""
    if isinstance(request.get("tools"), list):
        return [tool["function"] for tool in request["tools"]]
    schema = ((request.get("response_format") or {}).get("json_schema") or {}).get("schema") or {}
    return [
        {"name": part["properties"]["tool"]["const"], "parameters": part["properties"]["arguments"]}
        for part in schema.get("anyOf", [schema] if schema else [])
    ]


def next_call(request: JsonDict, *, calls: int | None) -> tuple[str, JsonDict] | None:
    """The behaving answer: ``(tool, arguments)``, or None for a closing text."""
    functions = {function["name"]: function for function in tools_of(request)}
    done = calls_so_far(request.get("messages") or [])
    if calls is not None and done + 1 >= calls:
        for name in _ENDING:
            if name in functions:
                return name, sample(functions[name].get("parameters") or {})
    if not functions or (calls is not None and done >= calls):
        return None
    if "search" in functions:
        return "search", sample(functions["search"].get("parameters") or {}, text="mock query")
    if "click" in functions:
        values = functions["click"]["parameters"]["properties"]["value"].get("enum") or [""]
        return "click", {"value": _target(values, request.get("messages") or [])}
    name = next((name for name in functions if name not in _ENDING), next(iter(functions)))
    return name, sample(functions[name].get("parameters") or {})


def _target(values: list[str], messages: list[JsonDict]) -> str:
    if "buy now" in values:
        return "buy now"
    used = {
        orjson.loads(call["function"]["arguments"]).get("value", "").partition("=")[0]
        for message in messages
        for call in message.get("tool_calls") or []
        if call["function"]["name"] == "click"
    }
    targets = [value for value in values if value not in _NAVIGATION]
    fresh = [value for value in targets if value.partition("=")[0] not in used]
    return (fresh or targets or values)[0]


def sample(schema: JsonDict, *, text: str = "mock") -> Any:
    """The plainest value a JSON schema admits."""
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "object")
    if kind == "object":
        properties = schema.get("properties") or {}
        names = schema.get("required") or list(properties)
        return {name: sample(properties.get(name) or {"type": "string"}, text=text) for name in names}
    if kind == "array":
        return [sample(schema.get("items") or {"type": "string"}) for _ in range(schema.get("minItems", 0))]
    if kind == "string":
        return text[: schema.get("maxLength", len(text))].ljust(schema.get("minLength", 0), "x")
    if kind in ("integer", "number"):
        return max(0, schema.get("minimum", 0))
    return False if kind == "boolean" else None


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
