"""The record of an attempt as its page shows it: steps in short, and the whole of it in parts.

A record may have 50 MB. It is read once, a large one in a process of its own, kept for the pages that follow, and shown
a part at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import select

from rayrl.errors import DataError
from rayrl.schemas import JsonDict
from rayrl.studio.context import Context
from rayrl.studio.pages.apart import apart
from rayrl.studio.pages.background import Background
from rayrl.traces.schema import expand
from rayrl.workbench import tables
from rayrl.workbench.results import trace
from rayrl.workbench.workbench import Workbench

PART = 20_000
"""Characters of the record shown at once."""
MAX_STEPS = 200
CLIP = 4_000
QUICK = 256 * 1024
RECORDS = Background(workers=1, kept=3)
_A = tables.case_runs


@dataclass(frozen=True)
class Record:
    """A record made ready: its steps in short, and its JSON text."""

    steps: list[JsonDict]
    n_steps: int
    text: str
    facts: JsonDict

    @property
    def parts(self) -> int:
        """How many parts the text has."""
        return max(1, -(-len(self.text) // PART))

    def part(self, number: int) -> str:
        """One of the parts, the last one for a number that is too high."""
        number = min(number, self.parts - 1)
        return self.text[number * PART : (number + 1) * PART]


def record_of(ctx: Context, experiment_id: str, ordinal: int, repeat: int, attempt: int | None) -> Record | None:
    """The record of an attempt (the newest with one); ``None`` while a large one is being read.

    Raises:
        DataError: there is none, or it is damaged.
    """
    mine = (_A.c.experiment_id == experiment_id) & (_A.c.ordinal == ordinal) & (_A.c.repeat == repeat)
    query = select(_A.c.trace, _A.c.trace_sha256).where(mine & _A.c.trace.is_not(None)).order_by(_A.c.id.desc())
    if attempt is not None:
        query = query.where(_A.c.attempt == attempt)
    with ctx.bench.store.read() as connection:
        row = connection.execute(query.limit(1)).first()
    path = ctx.bench.store.root / row[0] if row else None
    quick = path is None or not path.exists() or path.stat().st_size <= QUICK
    key = (str(ctx.bench.store.root), experiment_id, ordinal, repeat, attempt)

    def make() -> Record:
        if quick:
            return prepare(trace(ctx.bench, experiment_id, ordinal, repeat, attempt))
        # parsing a large record would hold up every other page for as long as it takes
        return apart(prepare_apart, str(ctx.bench.store.root), experiment_id, ordinal, repeat, attempt)

    found: Record | None = RECORDS.get(key, row[1] if row else "", make, wait_s=30.0 if quick else 0.0)
    return found


def prepare_apart(root: str, experiment_id: str, ordinal: int, repeat: int, attempt: int | None) -> Record:
    """The record made ready, over the store opened anew."""
    bench = Workbench(root, seed_models=False)
    try:
        return prepare(trace(bench, experiment_id, ordinal, repeat, attempt))
    finally:
        bench.close()


def prepare(record: JsonDict) -> Record:
    """What the page needs of a record.

    Raises:
        DataError: it refers to something it does not hold.
    """
    text = orjson.dumps(record, option=orjson.OPT_INDENT_2).decode("utf-8", "replace")
    try:
        steps = expand(record).get("steps", [])
    except (KeyError, IndexError, TypeError):
        raise DataError("the record is damaged: it refers to something it does not hold") from None
    facts = {name: record.get(name) for name in ("status", "duration_s", "started_at", "attempt")}
    facts["tokens"] = sum((record.get("usage") or {}).get(n) or 0 for n in ("prompt_tokens", "completion_tokens"))
    return Record([step_of(step) for step in steps[:MAX_STEPS]], len(steps), text, facts)


def step_of(step: JsonDict) -> JsonDict:
    """One step: what was called with what, what came back, and whether it was right in form."""
    model = step.get("model") or {}
    calls = model.get("tool_calls") or []
    arguments = calls[0].get("arguments", {}) if calls else {}
    feedback = step.get("action_feedback") or {}
    fault = step.get("protocol_error") or step.get("policy_failure")
    after = ((step.get("environment") or {}).get("observation") or {}).get("text")
    if isinstance(fault, dict):
        fault = fault.get("message") or fault.get("code")
    latency = model.get("latency_ms")
    return {
        "index": step.get("index"),
        "name": calls[0]["name"] if calls else "",
        "arguments": clip(arguments if isinstance(arguments, str) else orjson.dumps(arguments, option=2).decode()),
        "about": about(arguments) if isinstance(arguments, dict) else "",
        "content": clip(str(model.get("content") or "")),
        "reasoning": clip(str(model.get("reasoning") or "")),
        "valid": bool(feedback.get("valid", True)) and not fault,
        "fault": clip(str(fault or (feedback.get("message") if not feedback.get("valid", True) else "") or "")),
        "result": clip(after if isinstance(after, str) else ""),
        "duration_s": latency / 1000 if isinstance(latency, int | float) else None,
    }


def about(arguments: dict[str, Any]) -> str:
    """The arguments of a call in one line."""
    if "prediction" in arguments:
        return clip(f"{arguments.get('prediction')} · {arguments.get('reason', '')}", 160)
    return clip(" · ".join(str(v) for v in arguments.values() if isinstance(v, str | int | float)), 160)


def clip(text: str, length: int = CLIP) -> str:
    """Text cut to a length, with what was left out stated."""
    return text if len(text) <= length else f"{text[:length]} … (+{len(text) - length:,})"
