"""A trace record as a training conversation in OpenAI form, without what must not leave.

Invariants:

* reasoning and persona are taken out unless asked for; the private goal is not in a trace to begin with;
* replies that broke the protocol, and the feedback to them, are taken out unless asked for (the page did not change, so
  the conversation stays whole);
* tool-call arguments are JSON text, as on the wire: one column type whatever the tool.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import orjson

from rayrl.prompts import PromptTemplate
from rayrl.schemas import JsonDict
from rayrl.traces.schema import interned

DEFAULT_STUB: str = PromptTemplate.model_fields["stub"].default
"""What an omitted observation reads like, unless the prompt file says otherwise."""


@dataclass(frozen=True)
class ConversationOptions:
    """What a training conversation may hold beyond the default."""

    reasoning: bool = False
    """Keep the model's reasoning, as ``reasoning_content`` of its turns."""
    persona: bool = False
    """Keep the persona block of the first message."""
    protocol_errors: bool = False
    """Keep replies that broke the protocol and the feedback they got."""
    last_n: int | None = None
    """In per-step records, show the history as the run's prompt did (``None`` = everything)."""
    stub: str = DEFAULT_STUB
    """Text of an omitted observation."""


def messages_of(record: JsonDict, options: ConversationOptions) -> list[JsonDict]:
    """The conversation as OpenAI messages."""
    texts = interned(record).get("texts") or []
    persona = (record.get("reset") or {}).get("persona") or {}
    replies = _replies(record)
    out: list[JsonDict] = []
    turn = 0
    skip_feedback = False
    for message in record.get("conversation") or []:
        content = texts[message["content_ref"]] if "content_ref" in message else message.get("content")
        role = message["role"]
        if role == "assistant":
            step = replies[turn] if turn < len(replies) else {}
            turn += 1
            skip_feedback = bool(step.get("protocol_error")) and not options.protocol_errors
            if skip_feedback:
                continue
            out.append(_assistant(message, content, step, options))
            continue
        if role == "user" and skip_feedback:
            skip_feedback = False
            continue
        text = content if isinstance(content, str) else "" if content is None else json.dumps(content)
        if persona and not options.persona and role in ("system", "user"):
            text = without_persona(text, persona)
        kept: JsonDict = {"role": role, "content": text}
        if role == "tool":
            kept["tool_call_id"] = message.get("tool_call_id")
        out.append(kept)
    return out


def _replies(record: JsonDict) -> list[JsonDict]:
    """Steps whose reply entered the conversation, in order (a reply cut by length never does)."""
    return [s for s in record.get("steps") or [] if s.get("protocol_error") or s.get("action") is not None]


def _assistant(message: JsonDict, content: Any, step: JsonDict, options: ConversationOptions) -> JsonDict:
    out: JsonDict = {"role": "assistant", "content": content or ""}
    calls = message.get("tool_calls")
    if calls:
        out["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": _text(call["function"]["arguments"])},
            }
            for call in calls
        ]
    reasoning = (step.get("model") or {}).get("reasoning")
    if options.reasoning and reasoning:
        out["reasoning_content"] = reasoning
    return out


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()


def persona_texts(persona: JsonDict) -> list[str]:
    """How a persona may be written in a prompt: the forms rayrl's prompt builder and common JSON writers produce."""
    forms = [json.dumps(persona, ensure_ascii=a, sort_keys=s) for a in (False, True) for s in (True, False)]
    forms += [orjson.dumps(persona).decode(), json.dumps(persona, ensure_ascii=False, indent=2)]
    return list(dict.fromkeys(forms))


def without_persona(text: str, persona: JsonDict) -> str:
    """``text`` without the line (and its heading) that holds the persona.

    What the policy itself wrote, a query with a preferred brand for instance, is its behaviour and stays.
    """
    for form in persona_texts(persona):
        at = text.find(form)
        if at < 0:
            continue
        start = text.rfind("\n", 0, at) + 1
        end = text.find("\n", at + len(form))
        end = len(text) if end < 0 else end + 1
        if not text[start:at].strip() and start > 0:
            above = text.rfind("\n", 0, start - 1) + 1
            if text[above : start - 1].rstrip().endswith((":", "：")):
                start = above
        return (text[:start] + text[end:]).rstrip("\n") + ("\n" if text.endswith("\n") else "")
    return text


def tools_of(record: JsonDict) -> list[JsonDict]:
    """One tool list for a whole conversation: every tool met, enums (which change from page to page) taken out.

    The first schema of a tool wins for everything else.
    """
    toolsets = interned(record).get("toolsets")
    if not toolsets:  # the other schema keeps the tools in the steps
        toolsets = [step.get("tools") or [] for step in record.get("steps") or []]
    found: dict[str, JsonDict] = {}
    for toolset in toolsets:
        for tool in toolset if isinstance(toolset, list) else []:
            name = tool["function"]["name"]
            if name not in found:
                found[name] = without_enums(tool)
    return [found[name] for name in sorted(found)]


def without_enums(value: Any) -> Any:
    """A JSON schema without its enums."""
    if isinstance(value, dict):
        return {k: without_enums(v) for k, v in value.items() if k != "enum" or not isinstance(v, list)}
    if isinstance(value, list):
        return [without_enums(v) for v in value]
    return value


def step_tools(record: JsonDict, step: JsonDict) -> list[JsonDict]:
    """The exact tools of one step."""
    tools = step.get("tools")
    if isinstance(tools, int):
        found: list[JsonDict] = interned(record)["toolsets"][tools]
        return found
    return tools or []


def visible(messages: list[JsonDict], last_n: int | None, stub: str = DEFAULT_STUB) -> list[JsonDict]:
    """What the policy saw under ``history: last_n`` (``None`` = full): older observations as one-line stubs.

    The same rule as :meth:`rayrl.prompts.PromptBuilder.visible`.
    """
    if last_n is None:
        return messages
    observations = [i for i, m in enumerate(messages) if m["role"] == "tool"]
    hidden = set(observations[:-last_n])
    return [
        {**m, "content": stub.replace("{first_line}", str(m["content"]).strip().split("\n", 1)[0][:80])}
        if i in hidden
        else m
        for i, m in enumerate(messages)
    ]


def split_prompt(messages: list[JsonDict]) -> tuple[list[JsonDict], list[JsonDict]]:
    """The messages before the first reply, and the rest."""
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    return messages[:first], messages[first:]
