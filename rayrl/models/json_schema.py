"""Tool calls for servers without dependable tool calling: the page's tools become a response schema.

The model replies with one JSON object ``{"tool": name, "arguments": {...}}`` that the server's grammar enforces; it is
normalised to the same tool call as native calling gives. The recorded conversation keeps its OpenAI form; only what is
sent differs: calls are rendered as that JSON, tool results as user messages, and the system message lists the tools.
"""

from __future__ import annotations

import contextlib
from typing import Any

import orjson

from rayrl.schemas import JsonDict


def response_format(tools: list[JsonDict], max_string: int) -> JsonDict:
    """``response_format`` that admits exactly one call of one tool; free strings are bounded by ``max_string``."""
    actions = [
        {
            "type": "object",
            "properties": {
                "tool": {"const": tool["function"]["name"]},
                "arguments": _bound_strings(tool["function"].get("parameters") or {"type": "object"}, max_string),
            },
            "required": ["tool", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema = actions[0] if len(actions) == 1 else {"anyOf": actions}
    return {"type": "json_schema", "json_schema": {"name": "action", "strict": True, "schema": schema}}


def _bound_strings(schema: Any, limit: int) -> Any:
    """Bound every free string: a small model otherwise fills a query until the token limit cuts it."""
    if isinstance(schema, list):
        return [_bound_strings(part, limit) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {
        key: value if key in ("enum", "const", "required", "default", "examples") else _bound_strings(value, limit)
        for key, value in schema.items()
    }
    if out.get("type") == "string" and not {"enum", "const", "maxLength", "pattern", "format"} & out.keys():
        out["maxLength"] = limit
    return out


def read_action(content: str) -> tuple[str, Any] | str:
    """``(tool, arguments)`` of a reply, or what is wrong with it. Nothing is ever picked out of prose."""
    if not content.strip():
        return "the completion is empty; one JSON object is expected"
    try:
        data = orjson.loads(content)
    except orjson.JSONDecodeError:
        return "the completion is not one JSON object"
    if not isinstance(data, dict) or not isinstance(data.get("tool"), str) or "arguments" not in data:
        return 'the completion is not of the form {"tool": ..., "arguments": ...}'
    return data["tool"], data["arguments"]


def render_messages(messages: list[JsonDict], tools: list[JsonDict]) -> list[JsonDict]:
    """The conversation for a chat template that knows no tools: roles system, user, assistant only, alternating."""
    out: list[JsonDict] = []
    for message in messages:
        role = message["role"]
        text = _text_of(message.get("content"))
        if role == "assistant" and message.get("tool_calls"):
            text = "\n".join(_render_call(call) for call in message["tool_calls"])
        elif role in ("tool", "function"):
            role = "user"
        elif role == "developer":
            role = "system"
        if out and out[-1]["role"] == role:
            out[-1] = {"role": role, "content": f"{out[-1]['content']}\n\n{text}"}
        else:
            out.append({"role": role, "content": text})
    if not tools:
        return out
    guide = _guide(tools)
    if out and out[0]["role"] == "system":
        out[0] = {"role": "system", "content": f"{out[0]['content']}\n\n{guide}"}
    else:
        out.insert(0, {"role": "system", "content": guide})
    return out


def _guide(tools: list[JsonDict]) -> str:
    lines = ['Reply with one JSON object {"tool": NAME, "arguments": {...}} and nothing else. Tools:']
    for tool in tools:
        function = tool["function"]
        names = ", ".join((function.get("parameters") or {}).get("properties") or {})
        description = str(function.get("description") or "").strip()
        lines.append(f"- {function['name']}({names}){': ' + description if description else ''}")
    return "\n".join(lines)


def _render_call(call: JsonDict) -> str:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(orjson.JSONDecodeError):  # what is no JSON is shown as the text it was
            arguments = orjson.loads(arguments)
    return orjson.dumps({"tool": function.get("name"), "arguments": arguments}).decode()


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
