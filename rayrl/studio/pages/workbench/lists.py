"""The list of experiments, the data sets and models they are made of, and the sample that shows it all at once."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from sqlalchemy import func, select
from starlette.datastructures import FormData

from rayrl.errors import DataError, UserError
from rayrl.schemas import JsonDict
from rayrl.studio.context import Context, Ctx
from rayrl.studio.pages.shell import back, page, texts, url_with
from rayrl.studio.pages.workbench.analysis import headlines
from rayrl.studio.pages.workbench.common import field, form_of, made_once, parts, url
from rayrl.studio.pages.workbench.said import said
from rayrl.studio.requests import DatasetId
from rayrl.workbench import tables
from rayrl.workbench.experiments import STATES
from rayrl.workbench.readers.rows import Options
from rayrl.workbench.samples import SKILL, sample_file, sample_profile, skill_folder

router = APIRouter(include_in_schema=False)
PAGE = 30
ROWS = 50
MAX_MODEL_NAME = 80
SAMPLE_NAME = f"{SKILL} v1 · reader"


@router.get("/workbench")
def experiments(request: Request, ctx: Ctx, q: str = "", state: str = "", before: str = "", pick: str = "") -> Response:
    """Experiments, newest first."""
    known = state if state in STATES else None
    found = ctx.bench.experiments.page(search=q.strip(), state=known, before=before or None, limit=PAGE + 1)
    shown = found[:PAGE]
    rows = [
        {**row, **parts(ctx, row), "accuracy": accuracy}
        for row, accuracy in zip(shown, headlines(ctx, shown), strict=True)
    ]
    following = url_with(request, before=found[PAGE - 1]["id"]) if len(found) > PAGE else None
    return page(
        request,
        "workbench/list.html",
        rows=rows,
        q=q,
        state=known or "",
        states=STATES,
        next_url=following,
        first_url=url_with(request, before=None) if before else None,
        filtered=bool(q.strip() or known or before),
        pick=pick,
        totals=totals(ctx),
    )


def totals(ctx: Context) -> dict[str, int]:
    """How many of each thing there are."""
    with ctx.bench.store.read() as connection:
        out = {}
        for name, table in (("datasets", tables.datasets), ("skills", tables.snapshots)):
            out[name] = int(connection.execute(select(func.count()).select_from(table)).scalar() or 0)
    return out


@router.post("/workbench/sample")
def sample(ctx: Ctx, form: Annotated[FormData, Depends(form_of)]) -> Response:
    """The shipped data set and the shipped Skill in both its versions, run with the scripted reader."""
    experiment_id = made_once(ctx, form, "sample", lambda: make_sample(ctx)["id"])
    ctx.wake()
    return back(url(experiment_id), "sample")


def make_sample(ctx: Context, n: int = 600) -> JsonDict:
    """A started experiment on the sample; its second Skill version is there to be cloned with."""
    bench = ctx.bench
    name, data = sample_file("csv", n)
    upload = bench.uploads.add(name, data)
    bench.datasets.save_profile("sample", sample_profile("csv"), [])
    dataset = bench.datasets.create(
        name="sample routing", upload=upload["sha256"], options=Options(), profile_name="sample"
    )
    bench.snapshots.add_folder(skill_folder(2))
    snapshot = bench.snapshots.add_folder(skill_folder(1))
    made = bench.experiments.create(
        name=SAMPLE_NAME,
        dataset_id=dataset["id"],
        snapshot_id=snapshot["id"],
        model="reader",
        concurrency=ctx.config.batch_concurrency,
    )
    return bench.experiments.move(made["id"], "start")


@router.get("/workbench/datasets")
def datasets(request: Request, ctx: Ctx) -> Response:
    """All data sets."""
    return page(request, "workbench/datasets.html", rows=ctx.bench.datasets.all())


@router.get("/workbench/datasets/{dataset_id}")
def dataset(
    request: Request, ctx: Ctx, dataset_id: DatasetId, cursor: Annotated[int, Query(ge=0, le=10**9)] = 0
) -> Response:
    """A data set and its cases."""
    found = ctx.bench.datasets.get(dataset_id)
    cases = ctx.bench.datasets.cases(dataset_id, start=cursor, limit=ROWS)
    e = tables.experiments
    with ctx.bench.store.read() as connection:
        query = select(e.c.id, e.c.name, e.c.state).where(e.c.dataset_id == dataset_id).order_by(e.c.created_at.desc())
        used = [dict(row) for row in connection.execute(query.limit(20)).mappings()]
    more = cursor + len(cases) < found["n_cases"]
    return page(
        request,
        "workbench/dataset.html",
        dataset=found,
        cases=cases,
        said=partial(said, texts(request)),
        used=used,
        start=cursor,
        next_url=url_with(request, cursor=cursor + ROWS) if more else None,
        first_url=url_with(request, cursor=None) if cursor else None,
    )


@router.get("/workbench/models")
def models(request: Request, ctx: Ctx) -> Response:
    """Model profiles."""
    facts: JsonDict = {"rows": ctx.bench.models.all(), "problem": "", "given": {}}
    return page(request, "workbench/models.html", most=MAX_MODEL_NAME, **facts)


@router.post("/workbench/models")
def add_model(request: Request, ctx: Ctx, form: Annotated[FormData, Depends(form_of)]) -> Response:
    """A further profile: an OpenAI-compatible endpoint, or any other model section that names no code."""
    name, body = field(form, "name"), field(form, "body")
    try:
        if not name:
            raise DataError("a profile needs a name")
        if len(name) > MAX_MODEL_NAME:
            raise DataError(texts(request)("workbench.model_name_long", most=MAX_MODEL_NAME, n=len(name)))
        try:
            section = json.loads(body)
        except ValueError as error:
            raise DataError(f"the model section is no JSON: {error}") from None
        if not isinstance(section, dict):
            raise DataError("the model section must be a JSON object")
        ctx.bench.models.save(name, section)
    except UserError as error:
        given = {"name": name, "body": body}
        facts: JsonDict = {"rows": ctx.bench.models.all(), "problem": str(error), "given": given}
        return page(request, "workbench/models.html", status=422, most=MAX_MODEL_NAME, **facts)
    return back("/workbench/models", "model_saved")
