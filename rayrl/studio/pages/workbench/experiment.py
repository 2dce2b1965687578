"""An experiment: its configuration, its progress, its figures, its disagreements, all its cases, its siblings."""

from __future__ import annotations

from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from sqlalchemy import select
from starlette.datastructures import FormData

from rayrl.errors import DataError, RunConflictError, UserError
from rayrl.schemas import JsonDict
from rayrl.studio.context import Context, Ctx
from rayrl.studio.pages.charts import Figure, grouped_bars, intervals
from rayrl.studio.pages.language import Translate
from rayrl.studio.pages.shell import back, page, texts, url_with
from rayrl.studio.pages.workbench.analysis import files_read, headlines, overview, rules
from rayrl.studio.pages.workbench.common import (
    FILTERS,
    ExperimentId,
    concurrency_of,
    day,
    field,
    file_url,
    filters_of,
    form_of,
    head,
    made_once,
    parts,
    url,
    whole,
)
from rayrl.workbench import tables
from rayrl.workbench.experiments import ENDED, get_experiment
from rayrl.workbench.metrics import NONE, OTHER
from rayrl.workbench.results import page as result_page
from rayrl.workbench.reviews import repair
from rayrl.workbench.snapshots import distinct_contents, snapshot_label

router = APIRouter(include_in_schema=False)
BASE = "/workbench/experiments/{experiment_id}"
View = Literal["original", "reviewed", "ambiguous_removed"]
Cursor = Annotated[str, Query(max_length=100)]
Ref = Annotated[str, Query(max_length=4000)]
ROWS = 50
TOP_RULES = 12
PASSING = ("start", "resume", "pause", "retry", "concurrency")
"""Notes that hold only until the experiment has ended."""


@router.get(BASE)
def show(request: Request, ctx: Ctx, experiment_id: ExperimentId, view: View = "original") -> Response:
    """The overview: progress, figures with their intervals, confusion matrix, distribution, domains."""
    t = texts(request)
    top = head(ctx, t, experiment_id, "overview")
    if top["experiment"]["state"] in ENDED and request.query_params.get("note") in PASSING:
        top["note"] = ""
    found = overview(ctx, top["experiment"], view)
    worst = rules(ctx, top["experiment"])

    def cell(gold: str, said: str) -> str:
        """The cases behind a cell of the matrix; those without a verdict have no value to filter by."""
        wanted = {"state": "failed"} if said == NONE else {"prediction": said} if said != OTHER else {"agrees": "0"}
        return url(experiment_id, "/cases", gold=gold, **wanted)

    return page(
        request,
        "workbench/overview.html",
        **top,
        found=found,
        view=view,
        views=("original", "reviewed", "ambiguous_removed"),
        cell=cell,
        distribution=distribution(t, found) if found else None,
        rules=worst[:5] if worst else worst,
        file_url=file_url,
    )


def distribution(t: Translate, found: JsonDict) -> Figure:
    """How often each class was labelled and said, over the scored cases."""
    labels, matrix = found["overall"]["confusion"]["labels"], found["overall"]["confusion"]["matrix"]
    human = [sum(row) for row in matrix]
    model = [sum(row[i] for row in matrix) for i in range(len(labels))]
    kept = [i for i in range(len(labels)) if human[i] or model[i]]
    names = [t(f"shell.class.{labels[i]}") for i in kept]
    series = {t("workbench.human"): [human[i] for i in kept], t("workbench.model_said"): [model[i] for i in kept]}
    return grouped_bars(names, series, y=t("workbench.cases"))


@router.get(BASE + "/disagreements")
def disagreements(
    request: Request, ctx: Ctx, experiment_id: ExperimentId, cursor: Cursor = "", rule: Ref = "", read: Ref = ""
) -> Response:
    """Human and model differ, low confidence, or no explicit basis; and the rules the wrong verdicts rest on."""
    t = texts(request)
    top = head(ctx, t, experiment_id, "disagreements")
    filters, given = filters_of(request, "disagreements")
    found = rules(ctx, top["experiment"])
    only = cases_of_rule(ctx, experiment_id, rule, read) if rule or read else None
    listed = result_page(ctx.bench, experiment_id, filters, limit=ROWS if only is None else 500, cursor=cursor or None)
    if only is not None:
        listed = {"items": only, "next": None}
    return page(
        request,
        "workbench/disagreements.html",
        **top,
        rows=listed["items"],
        rule=rule,
        read=read,
        rules=found[:TOP_RULES] if found else found,
        more_rules=max(0, len(found or []) - TOP_RULES),
        given=given,
        file_url=file_url,
        next_url=url_with(request, cursor=listed["next"]) if listed["next"] else None,
        first_url=url_with(request, cursor=None) if cursor else None,
        query={name: value for name, value in given.items() if name != "sort"},
    )


def cases_of_rule(ctx: Context, experiment_id: str, ref: str, read: str = "") -> list[JsonDict]:
    """The wrong verdicts (500 at most) that rest on one passage of the Skill.

    Without a passage: those that cite nothing and read just the files of the JSON list ``read``.
    """
    files = files_of(read) if not ref else ()
    r, c = tables.results, tables.cases
    names = ["ordinal", "repeat", "case_id", "domain", "gold", "state", "failure", "prediction", "reason", "confidence"]
    path, _, section = ref.partition("#")
    with ctx.bench.store.read() as connection:
        experiment = get_experiment(connection, experiment_id)
        query = (
            select(*(r.c[name] for name in [*names, "evidence", "agrees", "detail"]), c.c.query)
            .join(c, (c.c.dataset_id == experiment["dataset_id"]) & (c.c.ordinal == r.c.ordinal))
            .where(r.c.experiment_id == experiment_id, r.c.repeat == 0, r.c.agrees == 0)
            .order_by(r.c.ordinal)
        )
        if not ref:
            query = query.where(r.c.evidence == "none")
        out = []
        for row in connection.execute(query).mappings():
            detail = row["detail"] or {}
            basis = detail.get("evidence") or {}
            if ref:
                cited = basis.get("cited", [])
                mine = any((i["path"] or i["ref"]) == path and (i.get("section") or "") == section for i in cited)
            else:
                mine = files_read(basis.get("read_not_cited", [])) == files
            if mine:
                out.append({**row, "agrees": False, "evidence_refs": detail.get("evidence_refs", []), "error": None})
                if len(out) == 500:
                    break
    return out


def files_of(read: str) -> tuple[str, ...]:
    """The files in a query field: a JSON list of names.

    Raises:
        DataError: it is none.
    """
    try:
        return files_read([str(name) for name in orjson.loads(read)])
    except (ValueError, TypeError):
        raise DataError("read: is no list of files; remove it from the address") from None


@router.get(BASE + "/cases")
def cases(request: Request, ctx: Ctx, experiment_id: ExperimentId, cursor: Cursor = "") -> Response:
    """Every case: filtered, sorted, exported."""
    top = head(ctx, texts(request), experiment_id, "cases")
    filters, given = filters_of(request, "cases")
    listed = result_page(ctx.bench, experiment_id, filters, limit=ROWS, cursor=cursor or None)
    return page(
        request,
        "workbench/cases.html",
        **top,
        rows=listed["items"],
        given=given,
        names=FILTERS,
        domains=domains(ctx, experiment_id),
        next_url=url_with(request, cursor=listed["next"]) if listed["next"] else None,
        first_url=url_with(request, cursor=None) if cursor else None,
        query=given,
    )


def domains(ctx: Context, experiment_id: str) -> list[str]:
    """The domains of an experiment's cases, by jumps over the index rather than a look at every row."""
    r = tables.results
    out: list[str] = []
    last = ""
    with ctx.bench.store.read() as connection:
        while len(out) < 200:
            query = select(r.c.domain).where(r.c.experiment_id == experiment_id, r.c.domain > last)
            found = connection.execute(query.order_by(r.c.domain).limit(1)).scalar()
            if found is None:
                break
            out.append(found)
            last = found
    return out


@router.get(BASE + "/versions")
def versions(request: Request, ctx: Ctx, experiment_id: ExperimentId) -> Response:
    """Experiments on the same data set: this one against other Skills and models."""
    t = texts(request)
    top = head(ctx, t, experiment_id, "versions")
    e, d = tables.experiments, tables.datasets
    with ctx.bench.store.read() as connection:
        query = select(e.c.id).join(d, d.c.id == e.c.dataset_id).where(d.c.name == top["dataset"]["name"])
        ids = list(connection.execute(query.order_by(e.c.created_at.desc()).limit(30)).scalars())
    found = [ctx.bench.experiments.get(i) for i in ids]
    rows = [
        {**one, **parts(ctx, one), "accuracy": accuracy}
        for one, accuracy in zip(found, headlines(ctx, found), strict=True)
    ]
    scored = [row for row in rows if row["accuracy"] and row["accuracy"]["value"] is not None]
    names = [f"{row['skill_label']} · {row['model_name']} · {day(row)}" for row in scored]
    rates = [row["accuracy"] for row in scored]
    chart = intervals(names, rates, x=t("workbench.accuracy")) if len(scored) > 1 else None
    return page(request, "workbench/versions.html", **top, rows=rows, chart=chart)


@router.post(BASE + "/{action}")
def act(
    request: Request, ctx: Ctx, experiment_id: ExperimentId, action: str, form: Annotated[FormData, Depends(form_of)]
) -> Response:
    """Start, pause, resume, cancel, retry, change the concurrency, or make a data set of the reviews."""
    experiments = ctx.bench.experiments
    note = action
    if action in ("start", "pause", "resume", "cancel"):
        experiments.move(experiment_id, action)
    elif action == "concurrency":
        experiments.set_concurrency(experiment_id, concurrency_of(request, form))
    elif action == "retry":
        chosen = [value for value in form.getlist("case") if isinstance(value, str)]
        n = experiments.retry(experiment_id, field(form, "which") or "cases", chosen)
        note = "retry" if n else "retry_none"
    elif action == "repair":
        made = repair(ctx.bench, experiment_id, drop_ambiguous=bool(form.get("drop_ambiguous")))
        return back(f"/workbench/configure?dataset={made['dataset']['id']}&from={experiment_id}", "repair")
    elif action == "clone":
        return clone(request, ctx, experiment_id, form)
    else:
        raise RunConflictError(f"there is no action {action[:40]!r}")
    ctx.wake()
    following = field(form, "next")
    return back(following if following.startswith(url(experiment_id)) else url(experiment_id), note)


def clone(request: Request, ctx: Context, experiment_id: str, form: FormData) -> Response:
    """A new experiment like this one with another Skill, model or number of repeats; started at once."""
    try:
        changes: JsonDict = {}
        for name, key in (("snapshot", "snapshot_id"), ("model", "model"), ("dataset", "dataset_id"), ("name", "name")):
            if value := field(form, name):
                changes[key] = value
        if str(changes.get("snapshot_id", "")).startswith("deployed:"):
            folder = ctx.config.skill_folder(changes["snapshot_id"].removeprefix("deployed:"))
            changes["snapshot_id"] = ctx.bench.snapshots.add_folder(folder)["id"]
        if field(form, "repeats"):
            changes["params"] = {"repeats": whole(form, "repeats", 1)}
        base = ctx.bench.experiments.get(experiment_id)
        if "name" not in changes:
            snapshot = ctx.bench.snapshots.get(str(changes.get("snapshot_id", base["snapshot_id"])))
            changes["name"] = f"{snapshot_label(snapshot)} · {changes.get('model', base['model_name'])}"

        def make() -> str:
            made = ctx.bench.experiments.clone(experiment_id, changes)
            ctx.bench.experiments.move(made["id"], "start")
            return str(made["id"])

        made_id = made_once(ctx, form, f"clone {experiment_id}", make)
    except UserError as error:
        return show_clone(request, ctx, experiment_id, str(error))
    ctx.wake()
    return back(url(made_id), "cloned")


@router.get(BASE + "/clone")
def clone_form(request: Request, ctx: Ctx, experiment_id: ExperimentId) -> Response:
    """Choose what the copy has instead."""
    return show_clone(request, ctx, experiment_id)


def show_clone(request: Request, ctx: Context, experiment_id: str, problem: str = "") -> Response:
    """The form of a clone; the other snapshot of the same Skill is suggested."""
    top = head(ctx, texts(request), experiment_id, "")
    snapshots = [
        {**row, "label": snapshot_label(row)}
        for row in distinct_contents(ctx.bench.snapshots.all(), top["snapshot"]["id"])
    ]
    mine = top["snapshot"]
    other = next((s["id"] for s in snapshots if s["id"] != mine["id"] and s["name"] == mine["name"]), mine["id"])
    return page(
        request,
        "workbench/clone.html",
        status=422 if problem else 200,
        **top,
        snapshots=snapshots,
        suggested=other,
        deployed=sorted(ctx.config.skills),
        models=sorted({row["name"] for row in ctx.bench.models.all()}),
        datasets=[row for row in ctx.bench.datasets.all() if row["name"] == top["dataset"]["name"]],
        problem=problem,
    )
