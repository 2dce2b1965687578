"""Reading results: filtered pages by keyset, one case with its attempts, and the trace behind it."""

from __future__ import annotations

import gzip
import hashlib
from typing import Any, Literal

import orjson
from pydantic import Field
from sqlalchemy import ColumnElement, Select, and_, func, select, true, tuple_

from rayrl.errors import DataError
from rayrl.schemas import Frozen, JsonDict
from rayrl.workbench import tables
from rayrl.workbench.datasets import case_of
from rayrl.workbench.experiments import Params, get_experiment
from rayrl.workbench.store import MissingError
from rayrl.workbench.workbench import Workbench

_R, _C, _A, _V = tables.results, tables.cases, tables.case_runs, tables.reviews


class Filter(Frozen):
    """What to list; empty fields do not restrict."""

    state: str | None = None
    failure: str | None = None
    prediction: str | None = None
    gold: str | None = None
    domain: str | None = None
    evidence: str | None = None
    agrees: bool | None = None
    disagreements: bool = False
    """Verdict other than the label, confidence below the experiment's threshold, or no explicit basis."""
    max_confidence: float | None = Field(None, ge=0, le=1)
    review: str | None = None
    """A review verdict, ``any`` or ``none``."""
    search: str | None = Field(None, max_length=500)
    """Text in the query or case id."""
    repeat: int | None = Field(None, ge=0, le=1000)
    sort: Literal["ordinal", "confidence"] = "ordinal"
    """``ordinal`` or ``confidence`` (lowest first)."""


def page(
    bench: Workbench, experiment_id: str, filters: Filter, *, limit: int = 50, cursor: str | None = None
) -> JsonDict:
    """A page of results with its next cursor (``None`` on the last one).

    Raises:
        DataError: no such experiment, or a cursor that is not ours.
    """
    with bench.store.read() as connection:
        experiment = get_experiment(connection, experiment_id)
        query = _filtered(experiment, filters)
        by_confidence = filters.sort == "confidence"
        if cursor:
            query = query.where(_after(cursor, by_confidence))
        if by_confidence:
            query = query.where(_R.c.confidence.is_not(None)).order_by(_R.c.confidence, _R.c.ordinal, _R.c.repeat)
        else:
            query = query.order_by(_R.c.ordinal, _R.c.repeat)
        rows = [dict(r) for r in connection.execute(query.limit(limit + 1)).mappings()]
    more = len(rows) > limit
    rows = rows[:limit]
    following = None
    if more:
        last = rows[-1]
        following = f"{last['ordinal']}.{last['repeat']}" + (f".{last['confidence']!r}" if by_confidence else "")
    return {"items": [_shown(row) for row in rows], "next": following}


def counts(bench: Workbench, experiment_id: str, filters: dict[str, Filter]) -> dict[str, int]:
    """How many results each of several filters leaves, in one pass over the experiment's results."""
    with bench.store.read() as connection:
        experiment = get_experiment(connection, experiment_id)
        tallies = [
            func.count().filter(and_(true(), *_conditions(experiment, f))).label(f"n{at}")
            for at, f in enumerate(filters.values())
        ]
        row = connection.execute(select(*tallies).where(_R.c.experiment_id == experiment_id)).one()
    return dict(zip(filters, map(int, row), strict=True))


def listed(bench: Workbench, experiment_id: str, filters: Filter, ordinal: int) -> bool:
    """Whether the filters leave this case."""
    with bench.store.read() as connection:
        query = _filtered(get_experiment(connection, experiment_id), filters).where(_R.c.ordinal == ordinal)
        return connection.execute(query.limit(1)).first() is not None


def neighbours(
    bench: Workbench, experiment_id: str, filters: Filter, ordinal: int, repeat: int = 0
) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """(ordinal, repeat) of the result before and after one in the filtered list in order of the data set."""
    key = tuple_(_R.c.ordinal, _R.c.repeat)
    out: list[tuple[int, int] | None] = []
    with bench.store.read() as connection:
        query = _filtered(get_experiment(connection, experiment_id), filters)
        query = query.with_only_columns(_R.c.ordinal, _R.c.repeat).limit(1)
        for there, order in (
            (key < (ordinal, repeat), (_R.c.ordinal.desc(), _R.c.repeat.desc())),
            (key > (ordinal, repeat), (_R.c.ordinal, _R.c.repeat)),
        ):
            row = connection.execute(query.where(there).order_by(*order)).first()
            out.append((row[0], row[1]) if row else None)
    return out[0], out[1]


def _after(cursor: str, by_confidence: bool) -> Any:
    try:
        parts = cursor.split(".", 2)
        ordinal, repeat = int(parts[0]), int(parts[1])
        confidence = float(parts[2]) if by_confidence else 0.0
        if abs(ordinal) > 2**62 or abs(repeat) > 2**62:
            raise ValueError(cursor)
    except (ValueError, IndexError):
        raise DataError(f"{cursor[:40]!r} is no cursor of this list") from None
    # comparisons of whole rows: the index is entered at the place, an OR of columns would be scanned up to it
    if by_confidence:
        return tuple_(_R.c.confidence, _R.c.ordinal, _R.c.repeat) > (confidence, ordinal, repeat)
    return tuple_(_R.c.ordinal, _R.c.repeat) > (ordinal, repeat)


def _filtered(experiment: JsonDict, f: Filter) -> Select[Any]:
    names = ["ordinal", "repeat", "case_id", "domain", "gold", "state", "failure", "attempts", "prediction", "reason"]
    names += ["confidence", "evidence", "agrees", "detail", "session_id", "model_calls", "duration_s", "updated_at"]
    query = (
        select(*(_R.c[name] for name in names), _C.c.query)
        .join(_C, and_(_C.c.dataset_id == experiment["dataset_id"], _C.c.ordinal == _R.c.ordinal))
        .where(_R.c.experiment_id == experiment["id"])
    )
    return query.where(*_conditions(experiment, f))


def _conditions(experiment: JsonDict, f: Filter) -> list[ColumnElement[bool]]:
    """What a filter asks of a row of the results."""
    out: list[ColumnElement[bool]] = []
    for name in ("state", "failure", "prediction", "gold", "domain", "evidence", "repeat"):
        value = getattr(f, name)
        if value is not None:
            out.append(_R.c[name] == value)
    if f.agrees is not None:
        out.append(_R.c.agrees == int(f.agrees))
    if f.max_confidence is not None:
        out.append(_R.c.confidence <= f.max_confidence)
    if f.disagreements:
        low = Params.model_validate(experiment["params"]).low_confidence
        out.append((_R.c.agrees == 0) | (_R.c.confidence < low) | (_R.c.evidence == "none"))
    if f.search:
        hits = select(_C.c.ordinal).where(_C.c.dataset_id == experiment["dataset_id"], _contains(f.search))
        out.append(_R.c.ordinal.in_(hits))
    if f.review is not None:
        newest = select(_V.c.ordinal, _V.c.verdict, func.max(_V.c.version)).group_by(_V.c.ordinal)
        reviewed = newest.where(_V.c.experiment_id == experiment["id"]).subquery()
        if f.review == "none":
            out.append(_R.c.ordinal.not_in(select(reviewed.c.ordinal)))
        else:
            chosen = select(reviewed.c.ordinal)
            out.append(_R.c.ordinal.in_(chosen if f.review == "any" else chosen.where(reviewed.c.verdict == f.review)))
    return out


def _contains(text: str) -> Any:
    """Cases whose query or id holds a text, small and capital letters alike. A covering index serves it."""
    if text.upper() == text.lower():
        return (func.instr(_C.c.query, text) > 0) | (func.instr(_C.c.case_id, text) > 0)
    escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return _C.c.query.like(f"%{escaped}%", escape="\\") | _C.c.case_id.like(f"%{escaped}%", escape="\\")


def _shown(row: JsonDict) -> JsonDict:
    detail = row.pop("detail") or {}
    refs = detail.get("evidence_refs", [])
    return {
        **row,
        "agrees": None if row["agrees"] is None else bool(row["agrees"]),
        "evidence_refs": refs,
        "error": detail.get("error"),
    }


def case_detail(bench: Workbench, experiment_id: str, ordinal: int, repeat: int = 0) -> JsonDict:
    """Everything about one case: the row it came from, input, verdict, evidence with passages, attempts, reviews.

    Raises:
        DataError: no such experiment or case.
    """
    with bench.store.read() as connection:
        experiment = get_experiment(connection, experiment_id)
        key = (_R.c.experiment_id == experiment_id) & (_R.c.ordinal == ordinal) & (_R.c.repeat == repeat)
        row = connection.execute(select(_R).where(key)).mappings().first()
        if row is None:
            raise MissingError(f"experiment {experiment_id} has no case {ordinal} (repeat {repeat})")
        where = (_C.c.dataset_id == experiment["dataset_id"]) & (_C.c.ordinal == ordinal)
        case = connection.execute(select(_C).where(where)).mappings().one()
        runs = (_A.c.experiment_id == experiment_id) & (_A.c.ordinal == ordinal) & (_A.c.repeat == repeat)
        attempts = [dict(r) for r in connection.execute(select(_A).where(runs).order_by(_A.c.id)).mappings()]
        reviewed = (_V.c.experiment_id == experiment_id) & (_V.c.ordinal == ordinal)
        reviews = [dict(r) for r in connection.execute(select(_V).where(reviewed).order_by(_V.c.version)).mappings()]
    detail = row["detail"] or {}
    passages = []
    for item in (detail.get("evidence") or {}).get("cited", []):
        passage = None
        if item["exists"]:
            passage = bench.snapshots.passage(experiment["snapshot_id"], item["ref"].removeprefix("./").strip())
        passages.append({**item, "passage": passage})
    for attempt in attempts:
        attempt["has_trace"] = attempt.pop("trace") is not None
    result = {
        k: v for k, v in dict(row).items() if k not in ("detail", "owner", "lease_until", "token", "experiment_id")
    }
    result["agrees"] = None if row["agrees"] is None else bool(row["agrees"])
    return {
        "experiment_id": experiment_id,
        "case": case_of(dict(case)).model_dump(),
        "result": {**result, **detail},
        "passages": passages,
        "attempts": attempts,
        "reviews": reviews,
    }


def trace(bench: Workbench, experiment_id: str, ordinal: int, repeat: int = 0, attempt: int | None = None) -> JsonDict:
    """The trace record of an attempt (the newest with one), checked against its digest.

    Raises:
        DataError: there is none, or it is damaged.
    """
    where = (
        (_A.c.experiment_id == experiment_id)
        & (_A.c.ordinal == ordinal)
        & (_A.c.repeat == repeat)
        & _A.c.trace.is_not(None)
    )
    if attempt is not None:
        where &= _A.c.attempt == attempt
    with bench.store.read() as connection:
        row = connection.execute(select(_A.c.trace, _A.c.trace_sha256).where(where).order_by(_A.c.id.desc())).first()
    if row is None:
        raise MissingError(f"experiment {experiment_id} has no trace of case {ordinal} (repeat {repeat})")
    path = bench.store.root / row[0]
    try:
        packed = path.read_bytes()
    except OSError:
        raise DataError(f"the trace {row[0]} is missing") from None
    if hashlib.sha256(packed).hexdigest() != row[1]:
        raise DataError(f"the trace {row[0]} is not what was recorded")
    record = orjson.loads(gzip.decompress(packed))
    return record if isinstance(record, dict) else {}
