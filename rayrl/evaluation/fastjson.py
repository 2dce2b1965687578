"""Decoding only what an episode row needs; the rest of a line is checked as JSON and skipped, which saves most work.

Uses ``msgspec`` where it is installed; without it, or where a record has an unexpected shape, the whole line is
decoded. Either way the row is the same: what is skipped is never read by
:func:`rayrl.evaluation.rows.episode_values`. (Skipped text is not checked for valid UTF-8; writers emit nothing else.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import orjson

try:
    import msgspec
except ImportError:  # optional: only speed depends on it
    msgspec = None  # type: ignore[assignment]


class _Model(TypedDict, total=False):
    latency_ms: Any
    usage: Any


class _Step(TypedDict, total=False):
    action: Any
    action_feedback: Any
    protocol_error: Any
    policy_failure: Any
    model: _Model | None
    model_output: _Model | None


class _Reset(TypedDict, total=False):
    public: Any
    instruction: Any
    task_instruction: Any
    environment_version: Any


class _Skill(TypedDict, total=False):
    skill_id: Any
    id: Any


class _Record(TypedDict, total=False):
    schema: Any
    schema_version: Any
    episode_id: Any
    attempt: Any
    status: Any
    job: Any
    provenance: Any
    started_at: Any
    duration_s: Any
    duration_seconds: Any
    reset: _Reset | None
    selected_skills: list[_Skill] | None
    steps: list[_Step] | None
    final: Any
    error: Any
    cleanup_errors: Any
    usage: Any


def _selective() -> Callable[[bytes], Any]:
    if msgspec is None:
        return orjson.loads
    decode = msgspec.json.Decoder(_Record).decode
    mismatch = msgspec.ValidationError

    def loads(line: bytes) -> Any:
        try:
            return decode(line)
        except mismatch:
            return orjson.loads(line)
        except msgspec.DecodeError as error:
            # one kind of error for callers, whichever decoder met it
            raise orjson.JSONDecodeError(str(error), "", 0) from None

    return loads


loads_for_row: Callable[[bytes], Any] = _selective()
"""Decode a line for :func:`rayrl.evaluation.rows.episode_values`.

Raises ``orjson.JSONDecodeError`` for a line that is no JSON.
"""
