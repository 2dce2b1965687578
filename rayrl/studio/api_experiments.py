"""Routes of experiments: creation, running, results, reviews, comparison, exports, events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi import Path as PathPart
from fastapi.responses import StreamingResponse
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool

from rayrl.environments.skill_case_tools import BUILT_IN
from rayrl.errors import ConfigError
from rayrl.schemas import JsonDict, canonical_json
from rayrl.studio.context import Context, Ctx, Key
from rayrl.studio.requests import (
    CloneRequest,
    CompareRequest,
    ExperimentId,
    ExperimentRequest,
    MatrixRequest,
    PatchRequest,
    RepairRequest,
    ResultQuery,
    RetryRequest,
    ReviewRequest,
    SingleRequest,
)
from rayrl.studio.responses import CaseDetail, Comparison, Experiment, Metrics, ResultPage, Review
from rayrl.workbench import tables
from rayrl.workbench.cases import Case, automatic_id
from rayrl.workbench.compare import compare
from rayrl.workbench.experiments import ENDED, Params, changed_params
from rayrl.workbench.exports import COLUMNS, bundle, compare_rows, export, result_rows, review_rows
from rayrl.workbench.matrix import create_matrix, matrix_table
from rayrl.workbench.metrics import experiment_metrics
from rayrl.workbench.results import case_detail, page, trace
from rayrl.workbench.reviews import add_review, list_reviews, repair

router = APIRouter(prefix="/api/evaluations", tags=["experiments"])
Ordinal = Annotated[int, PathPart(ge=0, le=10**9)]
Repeat = Annotated[int, Query(ge=0, le=1000)]
Kind = Literal["csv", "xlsx", "jsonl"]
_EV = tables.events
POLL_S = 0.5


@router.post("", response_model=Experiment, status_code=201)
def create(ctx: Ctx, body: ExperimentRequest, key: Key = None) -> JsonDict:
    """Create an experiment; with ``start`` it runs at once."""

    def make() -> JsonDict:
        made = ctx.bench.experiments.create(
            **body.model_dump(exclude={"params", "concurrency", "start"}),
            params=_safe(body.params),
            concurrency=body.concurrency or ctx.config.batch_concurrency,
        )
        return ctx.bench.experiments.move(made["id"], "start") if body.start else made

    made = ctx.once(key, "experiment", body.model_dump(), make)
    ctx.wake()
    return made


@router.get("", response_model=list[Experiment])
def list_experiments(
    ctx: Ctx,
    search: Annotated[str, Query(max_length=200)] = "",
    state: Annotated[str | None, Query(max_length=20)] = None,
    before: ExperimentId | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> list[JsonDict]:
    """Experiments, newest first; ``before`` is the last id of the page before."""
    return ctx.bench.experiments.page(search=search, state=state, before=before, limit=limit)


@router.post("/run", tags=["single"], status_code=201)
async def run_single(ctx: Ctx, body: SingleRequest, key: Key = None) -> dict[str, Any]:
    """Run one input: an experiment of a single case. Waits up to ``wait_s`` for its result."""
    made = await run_in_threadpool(
        lambda: ctx.once(key, "run", body.model_dump(exclude={"wait_s"}), lambda: _single(ctx, body))
    )
    ctx.wake()
    until = time.monotonic() + body.wait_s
    while True:
        found = await run_in_threadpool(ctx.bench.experiments.get, made["experiment_id"])
        if found["state"] not in ("running", "created") or time.monotonic() >= until:
            break
        await asyncio.sleep(0.1)
    detail = await run_in_threadpool(case_detail, ctx.bench, made["experiment_id"], 0)
    return {
        "experiment_id": found["id"],
        "state": found["state"],
        "reason": found["reason"],
        "result": detail["result"],
    }


@router.post("/matrix", response_model=list[Experiment], tags=["compare"], status_code=201)
def make_matrix(ctx: Ctx, body: MatrixRequest, key: Key = None) -> list[JsonDict]:
    """One experiment per Skill and model over one data set; with ``start`` they run at once."""

    def make() -> JsonDict:
        made = create_matrix(
            ctx.bench,
            **body.model_dump(exclude={"params", "concurrency", "start"}),
            params=_safe(body.params),
            concurrency=body.concurrency or ctx.config.batch_concurrency,
        )
        return {"items": [ctx.bench.experiments.move(e["id"], "start") for e in made] if body.start else made}

    made: list[JsonDict] = ctx.once(key, "matrix", body.model_dump(), make)["items"]
    ctx.wake()
    return made


@router.get("/matrix", tags=["compare"])
def show_matrix(ctx: Ctx, id: Annotated[list[ExperimentId], Query(max_length=64)]) -> list[dict[str, Any]]:
    """Headline figures of several experiments side by side."""
    return matrix_table(ctx.bench, id)


@router.get("/compare", response_model=Comparison, tags=["compare"])
def compare_get(
    ctx: Ctx,
    a: ExperimentId,
    b: ExperimentId,
    reason_threshold: Annotated[float, Query(ge=0, le=1)] = 0.6,
    examples: Annotated[int, Query(ge=0, le=100_000)] = 200,
) -> JsonDict:
    """Compare experiment ``b`` with ``a``."""
    return compare(ctx.bench, a, b, reason_threshold=reason_threshold, examples=examples)


@router.post("/compare", response_model=Comparison, tags=["compare"])
def compare_post(ctx: Ctx, body: CompareRequest) -> JsonDict:
    """Compare experiment ``b`` with ``a``."""
    return compare(ctx.bench, body.a, body.b, reason_threshold=body.reason_threshold, examples=body.examples)


@router.get("/compare/export", response_class=Response, tags=["compare", "exports"])
def compare_export(ctx: Ctx, a: ExperimentId, b: ExperimentId, format: Kind = "csv") -> Response:
    """The comparison, one row per case and group."""
    return _attachment(*export(compare_rows(ctx.bench, a, b), format, f"compare-{a}-{b}", COLUMNS["compare"]))


@router.get("/{experiment_id}", response_model=Experiment)
def get_experiment(ctx: Ctx, experiment_id: ExperimentId) -> JsonDict:
    """One experiment with the counts of its cases."""
    return ctx.bench.experiments.get(experiment_id)


@router.patch("/{experiment_id}", response_model=Experiment)
def patch(ctx: Ctx, experiment_id: ExperimentId, body: PatchRequest) -> JsonDict:
    """Change the concurrency, also while it runs; noted in the events."""
    return ctx.bench.experiments.set_concurrency(experiment_id, body.concurrency)


@router.post("/{experiment_id}/clone", response_model=Experiment, status_code=201)
def clone(ctx: Ctx, experiment_id: ExperimentId, body: CloneRequest, key: Key = None) -> JsonDict:
    """A new experiment like this one, with some parts exchanged."""
    changes = body.model_dump(exclude_none=True)
    if body.params is not None:
        base = ctx.bench.experiments.get(experiment_id)
        _safe(changed_params(base["params"], body.params))
    return ctx.once(key, f"clone {experiment_id}", changes, lambda: ctx.bench.experiments.clone(experiment_id, changes))


def _move(ctx: Context, experiment_id: str, action: str) -> JsonDict:
    moved = ctx.bench.experiments.move(experiment_id, action)
    ctx.wake()
    return moved


@router.post("/{experiment_id}/start", response_model=Experiment)
def start(ctx: Ctx, experiment_id: ExperimentId) -> JsonDict:
    """Start; an experiment that runs already goes on."""
    return _move(ctx, experiment_id, "start")


@router.post("/{experiment_id}/pause", response_model=Experiment)
def pause(ctx: Ctx, experiment_id: ExperimentId) -> JsonDict:
    """Start no further cases; those that run end."""
    return _move(ctx, experiment_id, "pause")


@router.post("/{experiment_id}/resume", response_model=Experiment)
def resume(ctx: Ctx, experiment_id: ExperimentId) -> JsonDict:
    """Go on after a pause."""
    return _move(ctx, experiment_id, "resume")


@router.post("/{experiment_id}/cancel", response_model=Experiment)
def cancel(ctx: Ctx, experiment_id: ExperimentId) -> JsonDict:
    """End for good; what was not done is cancelled and can be chosen for a retry."""
    return _move(ctx, experiment_id, "cancel")


@router.get("/{experiment_id}/results", response_model=ResultPage, tags=["results"])
def results(ctx: Ctx, experiment_id: ExperimentId, query: Annotated[ResultQuery, Query()]) -> JsonDict:
    """A page of results under filters."""
    return page(ctx.bench, experiment_id, query, limit=query.limit, cursor=query.cursor)


@router.get("/{experiment_id}/cases/{ordinal}", response_model=CaseDetail, tags=["results"])
def case(ctx: Ctx, response: Response, experiment_id: ExperimentId, ordinal: Ordinal, repeat: Repeat = 0) -> JsonDict:
    """One case: source, input, verdict, evidence with passages, attempts, reviews. The ETag is the review version."""
    found = case_detail(ctx.bench, experiment_id, ordinal, repeat)
    response.headers["ETag"] = _etag(found["reviews"][-1]["version"] if found["reviews"] else 0)
    return found


@router.get("/{experiment_id}/cases/{ordinal}/trace", tags=["results"])
def case_trace(
    ctx: Ctx,
    experiment_id: ExperimentId,
    ordinal: Ordinal,
    repeat: Repeat = 0,
    attempt: Annotated[int | None, Query(ge=1, le=10**6)] = None,
) -> dict[str, Any]:
    """The full record of an attempt, checked against its digest."""
    return trace(ctx.bench, experiment_id, ordinal, repeat, attempt)


@router.post("/{experiment_id}/retry", tags=["results"], name="retry_cases")
def retry(ctx: Ctx, experiment_id: ExperimentId, body: RetryRequest) -> dict[str, Any]:
    """Run cases again: the failed, the disagreements, the cancelled, or chosen ones."""
    n = ctx.bench.experiments.retry(experiment_id, body.which, body.cases)
    ctx.wake()
    return {"cases": n}


@router.get("/{experiment_id}/metrics", response_model=Metrics, tags=["results"])
def metrics(
    ctx: Ctx, experiment_id: ExperimentId, view: Literal["original", "reviewed", "ambiguous_removed"] = "original"
) -> JsonDict:
    """Figures under the labels as they were, as reviewed, or without the ambiguous cases."""
    experiment = ctx.bench.experiments.get(experiment_id)
    classes = ctx.bench.datasets.get(experiment["dataset_id"])["classes"]
    return experiment_metrics(ctx.bench.store, experiment, classes, view=view)


@router.post("/{experiment_id}/reviews", response_model=Review, status_code=201, tags=["reviews"], name="add_review")
def review(
    ctx: Ctx,
    response: Response,
    experiment_id: ExperimentId,
    body: ReviewRequest,
    if_match: Annotated[str | None, Header(max_length=40, pattern=r'^(\*|"\d{1,9}")$')] = None,
) -> JsonDict:
    """Review a case. ``If-Match`` with the case's ETag guards against overwriting somebody else's review."""
    expected = None if if_match is None or if_match == "*" else int(if_match.strip('"'))
    made = add_review(ctx.bench, experiment_id, **body.model_dump(), expected_version=expected)
    response.headers["ETag"] = _etag(made["version"])
    return made


@router.get("/{experiment_id}/reviews", response_model=list[Review], tags=["reviews"])
def reviews(ctx: Ctx, experiment_id: ExperimentId, history: bool = False) -> list[JsonDict]:
    """The newest review of each case, or all of them."""
    return list_reviews(ctx.bench, experiment_id, history=history)


@router.post("/{experiment_id}/repair", tags=["reviews"], name="repair_labels", status_code=201)
def repair_labels(ctx: Ctx, experiment_id: ExperimentId, body: RepairRequest) -> dict[str, Any]:
    """A new version of the data set with the labels as reviewed."""
    return repair(ctx.bench, experiment_id, drop_ambiguous=body.drop_ambiguous)


@router.get("/{experiment_id}/export", response_class=Response, tags=["exports"])
def export_results(
    ctx: Ctx, experiment_id: ExperimentId, kind: Literal["results", "reviews"] = "results", format: Kind = "csv"
) -> Response:
    """Raw results or reviews as CSV, XLSX or JSONL."""
    ctx.bench.experiments.get(experiment_id)
    rows = result_rows(ctx.bench, experiment_id) if kind == "results" else review_rows(ctx.bench, experiment_id)
    return _attachment(*export(rows, format, f"{experiment_id}-{kind}", COLUMNS[kind]))


@router.get("/{experiment_id}/bundle", response_class=Response, tags=["exports"])
def export_bundle(ctx: Ctx, experiment_id: ExperimentId) -> Response:
    """Everything that makes the experiment, with a script that verifies it offline."""
    return _attachment(bundle(ctx.bench, experiment_id), f"{experiment_id}.zip", "application/zip")


@router.get("/{experiment_id}/events", response_class=StreamingResponse, tags=["results"])
async def events(
    ctx: Ctx,
    request: Request,
    experiment_id: ExperimentId,
    last_event_id: Annotated[str | None, Header(max_length=20, pattern=r"^\d{0,18}$")] = None,
    follow: bool = True,
) -> StreamingResponse:
    """Server-sent events from after ``Last-Event-ID``, until the experiment has ended (``follow=false``: until now)."""
    await run_in_threadpool(ctx.bench.experiments.get, experiment_id)
    stream = _stream(ctx, request, experiment_id, int(last_event_id or 0), follow)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def _stream(ctx: Context, request: Request, experiment_id: str, after: int, follow: bool) -> AsyncIterator[str]:
    shown: dict[str, int] = {}
    quiet = time.monotonic()
    while True:
        rows, experiment = await run_in_threadpool(_news, ctx, experiment_id, after)
        for row in rows:
            after = row["id"]
            data = json.dumps({"kind": row["kind"], "at": row["created_at"], **row["data"]}, ensure_ascii=False)
            yield f"id: {after}\nevent: {row['kind']}\ndata: {data}\n\n"
        if experiment["counts"] != shown:
            shown = experiment["counts"]
            yield f"event: progress\ndata: {json.dumps({'state': experiment['state'], **shown})}\n\n"
            quiet = time.monotonic()
        ended = experiment["state"] in ENDED
        if not rows and (ended or not follow):
            yield f"event: end\ndata: {json.dumps({'state': experiment['state']})}\n\n"
            return
        if await request.is_disconnected():
            return
        if not rows:
            if time.monotonic() - quiet > 15:
                quiet = time.monotonic()
                yield ": still here\n\n"
            await asyncio.sleep(POLL_S)


def _news(ctx: Context, experiment_id: str, after: int) -> tuple[list[JsonDict], JsonDict]:
    with ctx.bench.store.read() as connection:
        query = select(_EV).where(_EV.c.experiment_id == experiment_id, _EV.c.id > after).order_by(_EV.c.id).limit(500)
        rows = [dict(r) for r in connection.execute(query).mappings()]
    return rows, ctx.bench.experiments.get(experiment_id)


def _single(ctx: Context, body: SingleRequest) -> JsonDict:
    case_id = automatic_id(body.query, body.history, body.context, "", "")
    facts = {"query": body.query, "history": body.history, "context": body.context}
    made = Case(case_id=case_id, **facts, source_row=facts, source_place="single run")
    dataset = ctx.bench.datasets.freeze(
        name="single run",
        cases=[made],
        classes=list(dict.fromkeys(body.classes)),
        upload=ctx.bench.store.put_blob(canonical_json(facts)),
        options={},
        profile=("single run", 0),
    )
    name = f"single: {''.join(c for c in body.query if c.isprintable())[:60]}"
    experiment = ctx.bench.experiments.create(
        name=name, dataset_id=dataset["id"], snapshot_id=body.snapshot_id, model=body.model, concurrency=1
    )
    ctx.bench.experiments.move(experiment["id"], "start")
    return {"experiment_id": experiment["id"]}


def _safe(params: Params) -> Params:
    """Parameters from outside may name shipped tools only: a dotted path would import what a request says."""
    for tool in params.tools:
        if tool not in BUILT_IN:
            raise ConfigError(f"tool {tool[:100]!r} is not known here; known: {', '.join(BUILT_IN)}")
    return params


def _etag(version: int) -> str:
    return f'"{version}"'


def _attachment(data: bytes, name: str, media_type: str) -> Response:
    return Response(data, media_type=media_type, headers={"content-disposition": f'attachment; filename="{name}"'})
