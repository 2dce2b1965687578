"""Import of ``shopsimrl-episode-v4`` traces (the public ShopSimRL project) into ``rayrl-episode-v1``.

What the foreign format does not hold is left empty, never invented: attempt numbers are counted in file order, seeds
and
splits are taken from the foreign job. A private goal inside the foreign ``final`` goes to the private file. A line that
cannot be converted is reported with its number and counted; it never stops the import and is never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from rayrl.errors import DataError
from rayrl.schemas import EPISODE_SCHEMA, EpisodeJob, JsonDict, Observation
from rayrl.traces.schema import Interner
from rayrl.traces.store import TraceLine, iter_lines

FOREIGN_SCHEMA = "shopsimrl-episode-v4"
PRIVATE_KEYS = ("goal", "private_goal", "goal_options", "private_task_instruction", "reason_key", "lease_id")


@dataclass
class ImportReport:
    """What an import did."""

    imported: int = 0
    skipped: list[str] = field(default_factory=list)
    """``line N: reason`` of every line that was not converted."""


def import_episodes(path: Path, report: ImportReport) -> Iterator[TraceLine]:
    """Convert a foreign trace file line by line.

    Raises:
        DataError: the file is missing or holds not a single line of the foreign schema.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    attempts: dict[str, int] = {}
    for number, line in enumerate(iter_lines(path), start=1):
        if not line.strip():
            continue
        try:
            foreign = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            report.skipped.append(f"line {number}: not JSON ({error.msg})")
            continue
        schema = _schema_of(foreign)
        if schema != FOREIGN_SCHEMA:
            report.skipped.append(f"line {number}: schema is {schema!r}, expected {FOREIGN_SCHEMA!r}")
            continue
        try:
            record, goal = convert(foreign, attempts)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            report.skipped.append(f"line {number}: {type(error).__name__}: {error}")
            continue
        private = None
        if goal:
            private = orjson.dumps({"episode_id": record["episode_id"], "attempt": record["attempt"], "goal": goal})
        report.imported += 1
        yield TraceLine(orjson.dumps(record), private)
    if not report.imported:
        first = report.skipped[0] if report.skipped else "the file is empty"
        raise DataError(f"{path}: nothing could be imported ({first})")


def convert(foreign: JsonDict, attempts: dict[str, int]) -> tuple[JsonDict, JsonDict | None]:
    """One foreign episode as a record and its private goal."""
    source = foreign["job"]
    job = EpisodeJob(
        task_id=int(source["task_id"]),
        sample_id=int(source.get("sample_id", 0)),
        seed=int(source.get("seed", 0)),
        split=str(source.get("split", "unknown")),
    )
    attempt = attempts[job.episode_id] = attempts.get(job.episode_id, 0) + 1
    intern = Interner()
    reset, final = foreign.get("reset") or {}, foreign.get("final")
    status = foreign["status"] if foreign["status"] in ("completed", "failed", "cancelled") else "failed"
    steps = [_step(index, step, intern) for index, step in enumerate(foreign.get("steps") or [])]
    conversation = [intern.message(dict(message)) for message in foreign.get("conversation") or []]
    goal = (final or {}).get("goal") or foreign.get("goal")
    record: JsonDict = {
        "schema": EPISODE_SCHEMA,
        "episode_id": job.episode_id,
        "attempt": attempt,
        "status": status,
        "job": job.model_dump(),
        "provenance": {**(foreign.get("provenance") or {}), "imported_from": FOREIGN_SCHEMA},
        "started_at": foreign.get("started_at"),
        "ended_at": foreign.get("ended_at") or foreign.get("finished_at"),
        "duration_s": float(foreign.get("duration_s") or foreign.get("duration_seconds") or 0.0),
        "reset": {
            "instruction": str(reset.get("task_instruction") or reset.get("instruction") or ""),
            "persona": reset.get("user_persona") or reset.get("persona") or {},
            "environment_version": str(reset.get("environment_version") or ""),
            "public": {},
            "observation": intern.observation(_observation(reset)),
        },
        "selected_skills": foreign.get("selected_skills") or [],
        "conversation": conversation,
        "steps": steps,
        "final": _final(final) if status == "completed" and final else None,
        "error": _error(foreign.get("error")),
        "usage": _usage(steps),
        "interned": intern.dump(),
    }
    return record, goal if isinstance(goal, dict) and goal else None


def _public(value: JsonDict) -> JsonDict:
    return {k: v for k, v in value.items() if k not in PRIVATE_KEYS}


def _schema_of(foreign: Any) -> Any:
    if not isinstance(foreign, dict):
        return type(foreign).__name__
    return foreign.get("schema") or foreign.get("schema_version")


def _observation(value: JsonDict) -> Observation:
    state = _public(value.get("observation_state") or {})
    return Observation(
        text=str(value.get("observation") or ""),
        state=state,
        version=str(state.get("observation_version") or ""),
        tools=[],
    )


def _step(index: int, step: JsonDict, intern: Interner) -> JsonDict:
    model = step.get("model") or step.get("model_output") or {}
    calls = []
    for call in model.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = orjson.loads(arguments)
        calls.append({"id": str(call.get("id", f"call-{index}")), "name": function["name"], "arguments": arguments})
    usage = model.get("usage") or {}
    out: JsonDict = {
        "index": index,
        "seed": int(step.get("seed") or 0),
        "observation": intern.observation(
            _observation(
                {
                    "observation": step.get("observation"),
                    "observation_state": step.get("observation_state") or step.get("state"),
                }
            )
        ),
        "tools": intern.toolset(list(step.get("tools") or [])),
        "model": {
            "tool_calls": calls,
            "reasoning": model.get("reasoning") or model.get("reasoning_content"),
            "content": model.get("content"),
            "finish_reason": model.get("finish_reason"),
            "usage": {k: usage[k] for k in ("prompt_tokens", "completion_tokens") if isinstance(usage.get(k), int)},
        },
    }
    for key in ("protocol_error", "protocol_feedback", "policy_failure"):
        if step.get(key):
            out[key] = step[key]
    if step.get("action") is not None:
        out["action"] = step["action"]
    environment = step.get("environment") or step.get("environment_result")
    if environment:
        out["environment"] = {
            "observation": intern.observation(_observation(environment)),
            "done": bool(environment.get("done")),
            "reward": float(environment.get("reward") or 0.0),
            **{k: _public(environment[k]) for k in ("reward_detail", "purchase") if environment.get(k)},
            **{k: environment[k] for k in ("termination_reason",) if environment.get(k)},
        }
        out["action_feedback"] = step.get("action_feedback") or environment.get("action_feedback") or {}
    return out


def _final(final: JsonDict) -> JsonDict:
    return {
        "done": bool(final.get("done")),
        "reward": float(final.get("reward") or 0.0),
        "reward_detail": _public(final.get("reward_detail") or {}),
        "purchase": _public(final.get("purchase") or {}),
        "termination_reason": final.get("termination_reason"),
    }


def _error(error: Any) -> JsonDict | None:
    if not error:
        return None
    if not isinstance(error, dict):
        return {"class": "infrastructure", "code": "imported", "stage": "", "type": "", "message": str(error)}
    return {
        "class": "infrastructure",
        "code": "imported",
        "stage": str(error.get("stage") or ""),
        "type": str(error.get("type") or error.get("exception_type") or ""),
        "message": str(error.get("message") or ""),
        "traceback": str(error.get("traceback") or ""),
    }


def _usage(steps: list[JsonDict]) -> JsonDict:
    usages = [step["model"]["usage"] for step in steps]
    return {
        "prompt_tokens": sum(u.get("prompt_tokens", 0) for u in usages),
        "completion_tokens": sum(u.get("completion_tokens", 0) for u in usages),
        "model_calls": len(steps),
    }
