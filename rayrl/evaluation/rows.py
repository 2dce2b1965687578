"""A trace record becomes one flat episode row and one row per step, with explicit Arrow schemas.

Invariants:

* the schemas are fixed: a field that is null in the first record and a string in the second cannot change a type
  (nested and free-form parts are JSON strings);
* a row holds nothing private and no observation text; 100,000 rows are some tens of megabytes;
* what is missing stays null, it never becomes 0; a failed episode has no reward;
* both ``rayrl-episode-v1`` and the public project's ``shopsimrl-episode-v4`` records are understood.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
import pyarrow as pa

from rayrl.errors import DataError
from rayrl.schemas import EPISODE_SCHEMA, JsonDict
from rayrl.traces.schema import interned

EpisodeRow = dict[str, Any]
StepRow = dict[str, Any]

KNOWN_SCHEMAS = frozenset({EPISODE_SCHEMA, "shopsimrl-episode-v4"})
COMPONENTS = ("r_strict", "r_loose", "r_success", "r_type", "r_att", "r_option", "r_price")
"""Reward components with a column of their own; any further ``r_*`` number goes to ``components_json``."""

_COMPONENT_SET = frozenset(COMPONENTS)
_INT_LIMIT = 2**63
_S, _I, _F, _B = pa.string(), pa.int64(), pa.float64(), pa.bool_()

EPISODE_ARROW = pa.schema(
    [
        ("run", _S),
        ("position", _I),
        ("schema", _S),
        ("episode_id", _S),
        ("split", _S),
        ("task_id", _I),
        ("sample_id", _I),
        ("seed", _I),
        ("attempt", _I),
        ("status", _S),
        ("complete", _B),
        ("experiment", _S),
        ("fingerprint", _S),
        ("model", _S),
        ("checkpoint_id", _S),
        ("environment_version", _S),
        ("prompt_sha256", _S),
        ("scripted", _B),
        ("skill_ids", _S),
        ("n_skills", _I),
        ("category", _S),
        ("started_at", _S),
        ("duration_s", _F),
        ("reward", _F),
        *[(name, _F) for name in COMPONENTS],
        ("components_json", _S),
        ("done", _B),
        ("termination_reason", _S),
        ("model_steps", _I),
        ("protocol_errors", _I),
        ("total_actions", _I),
        ("invalid_actions", _I),
        ("policy_failure", _S),
        ("prompt_tokens", _I),
        ("completion_tokens", _I),
        ("model_calls", _I),
        ("model_latency_ms", _F),
        ("error_class", _S),
        ("error_code", _S),
        ("error_stage", _S),
        ("error_type", _S),
        ("error_message", _S),
        ("cleanup_errors", _I),
        ("instruction", _S),
        ("purchase_json", _S),
        ("reward_detail_json", _S),
    ]
)
"""One row per attempt. ``position`` orders the attempts of a run as they were written (byte offset in the file)."""

STEP_ARROW = pa.schema(
    [
        ("run", _S),
        ("episode_id", _S),
        ("attempt", _I),
        ("split", _S),
        ("task_id", _I),
        ("sample_id", _I),
        ("step", _I),
        ("page_type", _S),
        ("tool", _S),
        ("arguments_json", _S),
        ("action", _S),
        ("valid", _B),
        ("feedback_reason", _S),
        ("protocol_error", _S),
        ("policy_failure", _S),
        ("finish_reason", _S),
        ("prompt_tokens", _I),
        ("completion_tokens", _I),
        ("latency_ms", _F),
        ("reward", _F),
        ("done", _B),
    ]
)

EPISODE_FIELDS: tuple[str, ...] = tuple(EPISODE_ARROW.names)
_ID, _TASK, _SAMPLE = (EPISODE_FIELDS.index(name) for name in ("episode_id", "task_id", "sample_id"))
STEP_FIELDS: tuple[str, ...] = tuple(STEP_ARROW.names)


def number(value: Any) -> float | None:
    """A finite float, or ``None`` for anything else (null, text, NaN)."""
    if type(value) is float:  # nearly always
        return value if math.isfinite(value) else None
    return float(value) if isinstance(value, int) else None


def _whole(value: Any) -> int | None:
    if type(value) is float and not math.isfinite(value):
        return None
    if isinstance(value, int | float) and -_INT_LIMIT <= value < _INT_LIMIT:
        return int(value)
    return None


def _text(value: Any) -> str | None:
    """Text as it is; a structured value as compact JSON; null stays null."""
    if value is None or isinstance(value, str):
        return value
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def _json(value: Any) -> str | None:
    return orjson.dumps(value).decode() if value else None


def _code(value: Any) -> str | None:
    """``code`` of a protocol error or policy failure, whether it is an object or already a word."""
    if not value:
        return None
    return _text(value.get("code")) if isinstance(value, dict) else str(value)


def is_complete_row(record: JsonDict) -> bool:
    """Known schema, status ``completed`` and a final result that is done."""
    final = record.get("final")
    return record.get("status") == "completed" and isinstance(final, dict) and final.get("done") is True


def check_record(record: Any, where: str) -> JsonDict:
    """The record if it is an episode of a known schema.

    Raises:
        DataError: it is not; the message names ``where`` and the schema found.
    """
    found = record.get("schema", record.get("schema_version")) if isinstance(record, dict) else type(record).__name__
    if not isinstance(record, dict) or found not in KNOWN_SCHEMAS:
        raise DataError(f"{where}: not an episode record (schema {found!r}; known: {', '.join(sorted(KNOWN_SCHEMAS))})")
    return record


def episode_values(record: JsonDict, run: str = "", position: int = 0, wide: bool = True) -> tuple[Any, ...]:
    """The values of an episode row in the order of :data:`EPISODE_ARROW`.

    With ``wide=False`` the last three (instruction, purchase, reward detail), which no summary needs, stay null.
    """
    get = record.get
    job = get("job") or {}
    provenance = get("provenance") or {}
    reset = get("reset") or {}
    public = reset.get("public") or {}
    final = get("final") or {}
    error = get("error") or {}
    usage = get("usage") or {}
    detail = final.get("reward_detail") or {}
    skills = get("selected_skills") or ()
    steps = get("steps") or ()
    complete = is_complete_row(record)

    protocol_errors = actions = invalid = 0
    latency = 0.0
    prompt = completion = 0
    failure: str | None = None
    for step in steps:
        sget = step.get
        if sget("protocol_error"):
            protocol_errors += 1
        if sget("action") is not None:
            actions += 1
            feedback = sget("action_feedback")
            if feedback and feedback.get("valid") is False:
                invalid += 1
        broken = sget("policy_failure")
        if broken:
            failure = _code(broken)
        model = sget("model") or sget("model_output")
        if model:
            latency += model.get("latency_ms") or 0.0
            if not usage:
                tokens = model.get("usage") or {}
                prompt += tokens.get("prompt_tokens") or 0
                completion += tokens.get("completion_tokens") or 0
    if not usage:
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "model_calls": len(steps)}
    extra = None
    if complete:
        others = [k for k in detail if k[:2] == "r_" and k not in _COMPONENT_SET and number(detail[k]) is not None]
        extra = _json({k: detail[k] for k in others})
    else:
        detail = {}
    dget = detail.get
    return (
        run,
        position,
        get("schema") or get("schema_version"),
        _text(get("episode_id")),
        _text(job.get("split")),
        _whole(job.get("task_id")),
        _whole(job.get("sample_id")),
        _whole(job.get("seed")),
        _whole(get("attempt")) or 1,
        _text(get("status")),
        complete,
        _text(provenance.get("experiment")),
        _text(provenance.get("fingerprint")),
        _text(provenance.get("model")),
        _text(provenance.get("checkpoint_id")),
        _text(provenance.get("environment_version") or reset.get("environment_version")),
        _text(provenance.get("prompt_sha256")),
        bool(provenance.get("scripted")),
        _json([s.get("skill_id") or s.get("id") for s in skills]),
        len(skills),
        _text(public.get("category")),
        _text(get("started_at")),
        number(get("duration_s", get("duration_seconds"))),
        number(final.get("reward")) if complete else None,
        number(dget("r_strict")),
        number(dget("r_loose")),
        number(dget("r_success")),
        number(dget("r_type")),
        number(dget("r_att")),
        number(dget("r_option")),
        number(dget("r_price")),
        extra,
        final.get("done") is True,
        _text(final.get("termination_reason")),
        len(steps),
        protocol_errors,
        actions,
        invalid,
        failure,
        _whole(usage.get("prompt_tokens")),
        _whole(usage.get("completion_tokens")),
        _whole(usage.get("model_calls")),
        latency,
        _text(error.get("class")),
        _text(error.get("code")),
        _text(error.get("stage")),
        _text(error.get("type")),
        _text(error.get("message")) if wide or error else None,
        len(error.get("cleanup_errors") or get("cleanup_errors") or ()),
        _text(reset.get("instruction", reset.get("task_instruction"))) if wide else None,
        _json(final.get("purchase")) if wide else None,
        _json(final.get("reward_detail")) if wide else None,
    )


def values_or_none(record: JsonDict, run: str, position: int, wide: bool) -> tuple[Any, ...] | None:
    """As :func:`episode_values`, but ``None`` for a record so damaged that it names no episode or has no row.

    One such record must not end a pass over a million others; callers count it as malformed.
    """
    try:
        values = episode_values(record, run, position, wide)
    except (AttributeError, TypeError, ValueError, KeyError):
        return None
    return None if values[_ID] is None or values[_TASK] is None or values[_SAMPLE] is None else values


def episode_row(record: JsonDict, *, run: str = "", position: int = 0) -> EpisodeRow:
    """The flat row of one attempt as a dict; see :data:`EPISODE_ARROW`."""
    return dict(zip(EPISODE_FIELDS, episode_values(record, run, position), strict=True))


def episode_rows(records: Iterable[JsonDict], *, run: str = "") -> list[EpisodeRow]:
    """Rows of records in file order."""
    return [episode_row(record, run=run, position=index) for index, record in enumerate(records)]


def values_table(
    values: list[tuple[Any, ...]], schema: pa.Schema = EPISODE_ARROW, columns: Sequence[str] | None = None
) -> pa.Table:
    """An Arrow table from row tuples in schema order; with ``columns`` only those are made."""
    wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
    if not values:
        return wanted.empty_table()
    made = dict(zip(schema.names, zip(*values, strict=True), strict=True))
    return pa.Table.from_arrays([pa.array(made[field.name], type=field.type) for field in wanted], schema=wanted)


def to_table(rows: Iterable[EpisodeRow], schema: pa.Schema = EPISODE_ARROW) -> pa.Table:
    """An Arrow table from row dicts; absent fields become null, and a missing ``position`` the row's index."""
    names = schema.names
    values = []
    for index, row in enumerate(rows):
        unknown = row.keys() - set(names)
        if unknown:
            raise DataError(f"row {index}: unknown fields {sorted(unknown)}")
        if schema is EPISODE_ARROW and row.get("position") is None:
            row = {**row, "position": index}
        values.append(tuple(row.get(name) for name in names))
    return values_table(values, schema)


def step_rows(record: JsonDict, *, run: str = "") -> list[StepRow]:
    """The flat rows of an attempt's steps, in order; see :data:`STEP_ARROW`."""
    job = record.get("job") or {}
    states = interned(record).get("states") or []
    rows = []
    for index, step in enumerate(record.get("steps") or ()):
        model = step.get("model") or step.get("model_output") or {}
        calls = model.get("tool_calls") or []
        call = calls[0] if len(calls) == 1 else {}
        observation = step.get("observation") or {}
        state = observation.get("state") if isinstance(observation, dict) else None
        if isinstance(state, int):
            state = states[state] if 0 <= state < len(states) else None
        feedback = step.get("action_feedback") or {}
        usage = model.get("usage") or {}
        environment = step.get("environment") or {}
        found = step.get("index", step.get("step"))
        rows.append(
            {
                "run": run,
                "episode_id": record.get("episode_id"),
                "attempt": _whole(record.get("attempt")) or 1,
                "split": job.get("split"),
                "task_id": _whole(job.get("task_id")),
                "sample_id": _whole(job.get("sample_id")),
                "step": found if isinstance(found, int) else index,
                "page_type": (state or {}).get("page_type"),
                "tool": call.get("name"),
                "arguments_json": _json(call.get("arguments")),
                "action": _text(step.get("action")),
                "valid": feedback.get("valid"),
                "feedback_reason": _text(feedback.get("reason")),
                "protocol_error": _code(step.get("protocol_error")),
                "policy_failure": _code(step.get("policy_failure")),
                "finish_reason": _text(model.get("finish_reason")),
                "prompt_tokens": _whole(usage.get("prompt_tokens")),
                "completion_tokens": _whole(usage.get("completion_tokens")),
                "latency_ms": number(model.get("latency_ms")),
                "reward": number(environment.get("reward")),
                "done": environment.get("done"),
            }
        )
    return rows
