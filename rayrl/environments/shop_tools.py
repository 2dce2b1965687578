"""The page's function tools, and a tool call as the shop's action text. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from rayrl.schemas import JsonDict, ToolCall
from rayrl.shop.text import collapse

SEARCH_DESCRIPTION = "Search the shop. Returns a ranked list of products."
QUERY_DESCRIPTION = "Search words, in the language of the catalogue."
CLICK_DESCRIPTION = "Click one of the elements that the current page offers."
VALUE_DESCRIPTION = "The element, exactly as it is listed."


def page_tools(state: JsonDict, *, max_query_length: int | None = None) -> list[JsonDict]:
    """OpenAI function tools that are legal on a page; the same page gives equal tools.

    Args:
        state: ``observation_state`` of a page that is not the end of an episode.
        max_query_length: limit in characters that the schema of ``search`` states.
    """
    tools: list[JsonDict] = []
    if state.get("search_available"):
        tools.append(_search_tool(max_query_length))
    actions = state.get("actions") or []
    if actions:
        tools.append(_click_tool(list(actions)))
    return tools


@lru_cache(maxsize=16)
def _search_tool(max_query_length: int | None) -> JsonDict:
    query: JsonDict = {"type": "string", "description": QUERY_DESCRIPTION, "minLength": 1}
    if max_query_length is not None:
        query["maxLength"] = max_query_length
    return _function("search", SEARCH_DESCRIPTION, "query", query)


def _click_tool(actions: list[str]) -> JsonDict:
    value: JsonDict = {"type": "string", "description": VALUE_DESCRIPTION, "enum": actions}
    return _function("click", CLICK_DESCRIPTION, "value", value)


def _function(name: str, description: str, parameter: str, schema: JsonDict) -> JsonDict:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {parameter: schema},
                "required": [parameter],
                "additionalProperties": False,
            },
        },
    }


def action_text(call: ToolCall) -> str:
    """``search[words]`` or ``click[value]``. A query is put on one line, so that no part of it reads as an action
    line."""
    if call.name == "search":
        return f"search[{collapse(_argument(call, 'query'))}]"
    if call.name == "click":
        return f"click[{_argument(call, 'value').strip()}]"
    # not one of ours: the shop answers that this is no action
    return f"{call.name}[]"


def _argument(call: ToolCall, name: str) -> str:
    value: Any = call.arguments.get(name, "")
    return value if isinstance(value, str) else str(value)
