"""The plainest legal behaviour on any page: a fixed walk over whatever tools are offered. Pure.

Used by the mock endpoint, and by the scripted shopper on pages that are no shop.
"""

from __future__ import annotations

from typing import Any

import orjson

JsonDict = dict[str, Any]

NAVIGATION = frozenset({"back to search", "< prev", "next >"})
ENDING_TOOLS = ("finish", "submit", "submit_verdict", "done")


def next_call(
    functions: dict[str, JsonDict], messages: list[JsonDict], *, calls: int | None = None
) -> tuple[str, JsonDict] | None:
    """Search, open the first product, choose a value on every axis, buy.

    Args:
        functions: name to parameter schema of the offered tools.
        messages: the conversation so far.
        calls: the n-th call of a conversation is the last one: an ending tool when the page has one, else no call.

    Returns:
        ``(tool, arguments)``, or None where nothing is left to do.
    """
    done = sum(message.get("role") == "assistant" for message in messages)
    if calls is not None and done + 1 >= calls:
        for name in ENDING_TOOLS:
            if name in functions:
                return name, sample(functions[name])
    if not functions or (calls is not None and done >= calls):
        return None
    if "search" in functions:
        return "search", sample(functions["search"], text="mock query")
    values = (functions.get("click", {}).get("properties") or {}).get("value", {}).get("enum")
    if values:
        return "click", {"value": _target(values, messages)}
    name = next((name for name in functions if name not in ENDING_TOOLS), next(iter(functions)))
    return name, sample(functions[name])


def _target(values: list[str], messages: list[JsonDict]) -> str:
    if "buy now" in values:
        return "buy now"
    used: set[str] = set()
    for message in messages:
        for call in message.get("tool_calls") or []:
            if call["function"]["name"] == "click":
                value = orjson.loads(call["function"]["arguments"]).get("value")
                used.add(str(value).partition("=")[0])
    targets = [value for value in values if value not in NAVIGATION]
    fresh = [value for value in targets if value.partition("=")[0] not in used]
    return (fresh or targets or values)[0]


def sample(schema: JsonDict, *, text: str = "mock") -> Any:
    """The plainest value a JSON schema admits (common keywords only)."""
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "object")
    if isinstance(kind, list):
        kind = kind[0]
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
