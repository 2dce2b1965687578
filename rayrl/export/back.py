"""Back again: SFT and GRPO records as episode records, so that exported data can be read like any trace.

A training record holds less than a trace: what it does not hold (page states, latencies, skills) is empty in the record
made here, and ``provenance.converted_from`` says so. What it does hold survives: exporting the result again gives the
same record.
"""

from __future__ import annotations

from typing import Any

import orjson

from rayrl.errors import DataError
from rayrl.schemas import EPISODE_SCHEMA, JsonDict, Observation
from rayrl.traces.schema import Interner


def action_text(name: str, arguments: JsonDict) -> str:
    """``search[words]``: the canonical text of a one-argument call; other calls as ``name{json}``."""
    values = list(arguments.values())
    if len(values) == 1 and isinstance(values[0], str):
        return f"{name}[{values[0]}]"
    return f"{name}{orjson.dumps(arguments).decode()}"


def episode_from_messages(
    messages: list[JsonDict], tools: list[JsonDict], identity: JsonDict, *, converted_from: str, final: JsonDict
) -> JsonDict:
    """An episode record from a conversation.

    Raises:
        DataError: a tool call without readable arguments.
    """
    intern = Interner()
    toolset = intern.toolset(tools)
    steps: list[JsonDict] = []
    seen = ""
    results = {m.get("tool_call_id"): m.get("content") for m in messages if m["role"] == "tool"}

    def observe(text: Any) -> JsonDict:
        return intern.observation(Observation(text=str(text or ""), state={}, version="converted", tools=[]))

    conversation: list[JsonDict] = []
    for message in messages:
        reasoning = message.get("reasoning_content")
        conversation.append(intern.message({k: v for k, v in message.items() if k != "reasoning_content"}))
        if message["role"] in ("user", "tool"):
            seen = message.get("content") or ""
        if message["role"] != "assistant":
            continue
        step: JsonDict = {"index": len(steps), "observation": observe(seen), "tools": toolset, "model": {}}
        if message.get("content"):
            step["model"]["content"] = message["content"]
        if reasoning:
            step["model"]["reasoning"] = reasoning
        calls = message.get("tool_calls") or []
        if len(calls) == 1:
            call = calls[0]
            try:
                arguments = orjson.loads(call["function"]["arguments"])
            except (orjson.JSONDecodeError, KeyError, TypeError) as error:
                raise DataError(f"{identity.get('episode_id')}: a tool call without JSON arguments: {error}") from None
            name = call["function"]["name"]
            step["model"]["tool_calls"] = [{"id": call.get("id"), "name": name, "arguments": arguments}]
            step["action"] = action_text(name, arguments)
            step["environment"] = {"observation": observe(results.get(call.get("id"))), "done": False, "reward": 0.0}
        else:
            step["protocol_error"] = {"code": "no_tool_call", "message": "no single call in the training record"}
        steps.append(step)
    first = observe(next((m.get("content") for m in messages if m["role"] == "user"), ""))
    return {
        "schema": EPISODE_SCHEMA,
        "episode_id": identity["episode_id"],
        "attempt": 1,
        "status": "completed",
        "job": {key: identity.get(key) for key in ("task_id", "sample_id", "seed", "split")},
        "provenance": {
            "fingerprint": identity.get("fingerprint"),
            "checkpoint_id": identity.get("checkpoint_id"),
            "converted_from": converted_from,
        },
        "reset": {"instruction": "", "persona": {}, "environment_version": "", "public": {}, "observation": first},
        "selected_skills": [],
        "conversation": conversation,
        "steps": steps,
        "final": {"done": True, "purchase": {}, "termination_reason": None, "reward_detail": {}, **final},
        "error": None,
        "usage": {},
        "interned": intern.dump(),
    }


def _tools(record: JsonDict) -> list[JsonDict]:
    tools = record.get("tools")
    found: list[JsonDict] = orjson.loads(tools) if isinstance(tools, str) else tools or []
    return found


def episode_from_sft(record: JsonDict) -> JsonDict:
    """The episode of a conversation record made by :func:`rayrl.export.records.sft_record`."""
    return episode_from_messages(
        record["messages"], _tools(record), record, converted_from="sft", final={"reward": record.get("reward")}
    )


def episodes_from_grpo(record: JsonDict) -> list[JsonDict]:
    """The episodes of a group record made by :func:`rayrl.export.records.grpo_record`."""
    return [
        episode_from_messages(
            [*record["prompt"], *sample["completion"]],
            _tools(record),
            sample,
            converted_from="grpo",
            final={
                "reward": sample.get("reward"),
                "reward_detail": orjson.loads(sample.get("reward_detail") or "{}"),
                "termination_reason": sample.get("termination_reason"),
            },
        )
        for sample in record["samples"]
    ]
