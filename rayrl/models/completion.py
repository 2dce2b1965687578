"""From the body of an HTTP 200 to a :class:`~rayrl.schemas.ModelOutput`. Pure; the one place that judges a completion.

A completion is exactly one of three things:

* one valid call: ``tool_calls`` has one element;
* ``policy_failure`` ``generation_length``: cut by the token limit before exactly one valid call was complete;
* ``protocol_error`` with a code: anything else. It is recorded and answered, never sampled again.

A call from a completion cut by length counts only when its arguments arrived as one complete JSON text and nothing of a
second call trails in the visible text. Arguments that arrive already parsed in a cut completion are not trusted: the
server may have closed the brackets itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from rayrl.errors import ContextOverflowError
from rayrl.models.context import is_context_error
from rayrl.models.json_schema import read_action
from rayrl.models.toolcheck import argument_error
from rayrl.schemas import JsonDict, ModelOutput, PolicyFailure, ProtocolError, TokenTrace, ToolCall, Usage

_CALL_MARKUP = ("<tool_call", "<function=", "[TOOL_CALLS]", "<|tool_call", "<|python_tag|>", '{"name":')
_BODY_EXCERPT = 2000


@dataclass(frozen=True)
class Rules:
    """What a completion is judged by."""

    json_schema: bool = False
    allow_text_beside_call: bool = True


def tool_parameters(tools: list[JsonDict]) -> dict[str, JsonDict]:
    """Name to parameter schema of OpenAI function tools."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def read_completion(
    body: bytes, tools: list[JsonDict], rules: Rules, *, seed: int, latency_ms: float, metadata: JsonDict
) -> ModelOutput:
    """Normalise the body of an HTTP 200.

    Raises:
        ContextOverflowError: the server wrapped a context error into a 200.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        data = None
    if not isinstance(data, dict):
        return unreadable(
            body, f"HTTP 200 with a body that is no JSON object ({len(body)} bytes)", latency_ms, metadata
        )
    choices = data.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        if "error" in data and is_context_error(excerpt := orjson.dumps(data["error"]).decode()[:_BODY_EXCERPT]):
            raise ContextOverflowError(excerpt[:500], code="context_overflow", stage="model", detail={"status": 200})
        return ModelOutput(
            protocol_error=ProtocolError(code="no_choices", message="the completion has no choices with a message"),
            raw_response=_bounded(data),
            usage=read_usage(data),
            response_id=_text(data.get("id")),
            latency_ms=latency_ms,
            metadata=metadata,
        )
    reasoning, content = split_reasoning(message)
    finish = _text(choice.get("finish_reason"))
    calls, problem, complete = (
        _schema_calls(content, tools, seed) if rules.json_schema else _native_calls(message, tools, seed)
    )
    failure: PolicyFailure | None = None
    if finish == "length" and (problem is not None or not complete or _markup(content, rules)):
        failure = PolicyFailure(
            code="generation_length", message="the token limit cut the completion before exactly one valid call"
        )
        calls, problem = [], None
    elif problem is None and not rules.json_schema and not rules.allow_text_beside_call and (content or "").strip():
        calls, problem = [], ProtocolError(code="text_beside_call", message="visible text beside the tool call")
    return ModelOutput(
        tool_calls=calls,
        reasoning=reasoning,
        content=None if rules.json_schema and calls else content,
        finish_reason=finish,
        usage=read_usage(data),
        response_id=_text(data.get("id")),
        latency_ms=latency_ms,
        metadata=_facts(data, metadata),
        protocol_error=problem,
        policy_failure=failure,
        raw_response=_bounded(message) if problem or failure else None,
        tokens=read_tokens(data, choice),
    )


def unreadable(body: bytes, reason: str, latency_ms: float, metadata: JsonDict) -> ModelOutput:
    """The output for a 200 whose body cannot be read: an ``invalid_body`` protocol error, never a second sample."""
    return ModelOutput(
        protocol_error=ProtocolError(code="invalid_body", message=reason),
        raw_response={"body": body[:_BODY_EXCERPT].decode("utf-8", "replace")},
        latency_ms=latency_ms,
        metadata=metadata,
    )


Judged = tuple[list[ToolCall], ProtocolError | None, bool]
"""The calls (one or none), what is wrong with them, and whether the one call surely arrived whole."""


def _refuse(code: str, message: str) -> Judged:
    return [], ProtocolError(code=code, message=message), False


def _native_calls(message: JsonDict, tools: list[JsonDict], seed: int) -> Judged:
    raw_calls = message.get("tool_calls") or []
    if not isinstance(raw_calls, list) or not raw_calls:
        return _refuse("no_tool_call", "the completion holds no tool call; exactly one is expected")
    if len(raw_calls) > 1:
        return _refuse(
            "multiple_tool_calls", f"the completion holds {len(raw_calls)} tool calls; exactly one is expected"
        )
    raw = raw_calls[0]
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict):
        return _refuse("no_tool_call", "the tool call holds no function")
    arguments = function.get("arguments")
    whole = isinstance(arguments, str)
    return _judge(_text(function.get("name")) or "", arguments, whole, _text(raw.get("id")), tools, seed)


def _schema_calls(content: str | None, tools: list[JsonDict], seed: int) -> Judged:
    action = read_action(content or "")
    if isinstance(action, str):
        return _refuse("invalid_arguments_json" if (content or "").strip() else "no_tool_call", action)
    return _judge(action[0], action[1], True, None, tools, seed)


def _judge(name: str, arguments: Any, whole: bool, call_id: str | None, tools: list[JsonDict], seed: int) -> Judged:
    parameters = tool_parameters(tools)
    if name not in parameters:
        known = ", ".join(parameters) or "none"
        return _refuse("unknown_tool", f"tool {name[:60]!r} is not offered on this page; offered: {known}")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return _refuse("invalid_arguments_json", f"the arguments of {name} are no valid JSON")
    if not isinstance(arguments, dict):
        return _refuse("invalid_arguments", f"the arguments of {name} are no JSON object")
    problem = argument_error(arguments, parameters[name])
    if problem:
        return _refuse("invalid_arguments", f"{name}: {problem}")
    return [ToolCall(id=call_id or f"call_{seed:08x}", name=name, arguments=arguments)], None, whole


def _markup(content: str | None, rules: Rules) -> bool:
    """Whether visible text looks like the start of a further call that was cut."""
    return not rules.json_schema and any(mark in (content or "") for mark in _CALL_MARKUP)


def split_reasoning(message: JsonDict) -> tuple[str | None, str | None]:
    """Reasoning and visible content of a message.

    Reasoning comes as ``reasoning_content`` (vLLM, SGLang, DeepSeek, SiliconFlow), as ``reasoning`` (OpenRouter, newer
    vLLM), or inside ``<think>`` in the content; templates that open the tag in the prompt leave only its end, and a
    completion cut by length only its beginning.
    """
    parts = [text for key in ("reasoning_content", "reasoning") if (text := _text(message.get(key)))][:1]
    content = _content_text(message.get("content"))
    if content and ("<think>" in content or "</think>" in content):
        head, end, tail = content.partition("</think>")
        before, start, thought = head.partition("<think>")
        if end:
            inner, content = (thought, before + tail) if start else (head, tail)
        else:
            inner, content = thought, before
        parts.append(inner.strip())
        content = content.strip()
    return "\n".join(part for part in parts if part) or None, content


def _content_text(content: Any) -> str | None:
    if isinstance(content, list):  # content parts
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return _text(content)


def read_usage(data: JsonDict) -> Usage:
    """Token counts of a response; what is missing or no count stays None."""
    usage = data.get("usage")
    if not isinstance(usage, dict):
        return Usage()
    details = usage.get("completion_tokens_details")
    reasoning = details.get("reasoning_tokens") if isinstance(details, dict) else usage.get("reasoning_tokens")
    return Usage(
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        reasoning_tokens=_count(reasoning),
    )


def read_tokens(data: JsonDict, choice: JsonDict) -> TokenTrace | None:
    """Token ids and log-probs as the server returned them: vLLM ``token_ids``, llama.cpp ids, ``token_id:N`` names."""
    logprobs = choice.get("logprobs")
    entries = logprobs.get("content") if isinstance(logprobs, dict) else None
    entries = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    values = [entry.get("logprob") for entry in entries]
    ids = _ids(choice.get("token_ids")) or _ids([_entry_id(entry) for entry in entries])
    prompt = _ids(data.get("prompt_token_ids")) or _ids(choice.get("prompt_token_ids"))
    good = values and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if not (ids or prompt or good):
        return None
    return TokenTrace(
        prompt_ids=prompt,
        completion_ids=ids,
        completion_logprobs=[float(v) for v in values if v is not None] if good else None,
    )


def _entry_id(entry: JsonDict) -> Any:
    token = entry.get("token")
    if isinstance(token, str) and token.startswith("token_id:") and token[9:].isdigit():
        return int(token[9:])
    return entry.get("id")


def _ids(value: Any) -> list[int] | None:
    if isinstance(value, list) and value and all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        return list(value)
    return None


def _facts(data: JsonDict, metadata: JsonDict) -> JsonDict:
    facts = {key: data[key] for key in ("model", "system_fingerprint") if isinstance(data.get(key), str)}
    return {**facts, **metadata}


def _bounded(value: JsonDict) -> JsonDict:
    """A raw message as it was, unless it is absurdly large."""
    try:
        dumped = orjson.dumps(value)
    except TypeError:
        return {"body": str(value)[:_BODY_EXCERPT]}
    return value if len(dumped) <= 262_144 else {"body": dumped[:_BODY_EXCERPT].decode("utf-8", "replace")}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
