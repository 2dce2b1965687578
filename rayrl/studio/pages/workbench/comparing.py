"""Two experiments side by side: which is better, how sure that is, what changed in which case and why."""

from __future__ import annotations

import math
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from sqlalchemy import select
from starlette.datastructures import FormData

from rayrl.errors import DataError
from rayrl.schemas import JsonDict
from rayrl.studio.context import Context, Ctx
from rayrl.studio.pages.apart import apart
from rayrl.studio.pages.background import AWAY, BACKGROUND
from rayrl.studio.pages.language import Translate
from rayrl.studio.pages.shell import back, page, texts, url_with
from rayrl.studio.pages.workbench.analysis import SMALL, headlines, last_event, wait
from rayrl.studio.pages.workbench.common import day, field, file_url, form_of, parts, whole
from rayrl.studio.requests import ExperimentId
from rayrl.workbench import tables
from rayrl.workbench.compare import GROUPS, compare
from rayrl.workbench.experiments import Params
from rayrl.workbench.matrix import create_matrix
from rayrl.workbench.metrics import rate
from rayrl.workbench.snapshots import distinct_contents, snapshot_label
from rayrl.workbench.workbench import Workbench

router = APIRouter(include_in_schema=False)
Ids = Annotated[list[ExperimentId] | None, Query(max_length=64)]
ROWS = 50
Z = 1.959964
KEPT = 100_000


@router.get("/workbench/compare")
def show(
    request: Request,
    ctx: Ctx,
    a: Annotated[str, Query(max_length=40)] = "",
    b: Annotated[str, Query(max_length=40)] = "",
    group: Annotated[str, Query(max_length=40)] = "",
    start: Annotated[int, Query(ge=0, le=10**7)] = 0,
) -> Response:
    """The comparison of ``b`` with ``a``; without both of them, the choice."""
    t = texts(request)
    every = ctx.bench.experiments.page(limit=100)
    choices = [(row["id"], f"{row['name']} · {day(row)}") for row in every]
    if not a or not b:
        return page(request, "workbench/compare_choose.html", choices=choices, a=a, b=b, problem="")
    sides = {}
    for name, experiment_id in (("a", a), ("b", b)):
        found = ctx.bench.experiments.get(experiment_id)
        sides[name] = {**found, **parts(ctx, found)}
    compared = figures(ctx, sides["a"], sides["b"])
    facts: JsonDict = {"found": compared, "one": sides["a"], "two": sides["b"], "group": "", "rows": []}
    facts |= {"labels": side_labels(sides["a"], sides["b"]), "file_url": file_url}
    if compared is None:
        return page(request, "workbench/compare.html", **facts)
    group = group if group in GROUPS else next((g for g in ("regressed", "fixed") if compared["counts"][g]), "fixed")
    ids = compared["groups"][group]
    facts |= {"group": group, "rows": rows(ctx, sides, ids[start : start + ROWS], compared)}
    facts["difference"] = difference
    facts["share"] = rate(compared["overall"]["fixed"], compared["overall"]["fixed"] + compared["overall"]["regressed"])
    facts |= {"sentence": sentence(t, compared["overall"], facts["labels"])}
    facts["next_url"] = url_with(request, start=start + ROWS) if start + ROWS < len(ids) else None
    facts["first_url"] = url_with(request, start=None) if start else None
    return page(request, "workbench/compare.html", **facts)


def figures(ctx: Context, one: JsonDict, two: JsonDict) -> JsonDict | None:
    """The comparison, kept while neither experiment changes."""
    key = (str(ctx.bench.store.root), "compare", one["id"], two["id"])
    stamp = tuple((last_event(ctx, e["id"]), tuple(e["counts"].values())) for e in (one, two))
    large = one["n_cases"] + two["n_cases"] > SMALL

    def make() -> JsonDict:
        if not large:
            return compare(ctx.bench, one["id"], two["id"], examples=KEPT)
        return apart(compare_apart, str(ctx.bench.store.root), one["id"], two["id"])

    where, wait_s = (AWAY, 0.0) if large else (BACKGROUND, wait(one, two))
    made: JsonDict | None = where.get(key, stamp, make, wait_s=wait_s)
    return made


def compare_apart(root: str, a: str, b: str) -> JsonDict:
    """The comparison, over the store opened anew."""
    bench = Workbench(root, seed_models=False)
    try:
        return compare(bench, a, b, examples=KEPT)
    finally:
        bench.close()


def difference(overall: JsonDict) -> JsonDict:
    """The paired difference of accuracies with the adjusted Wald interval of Bonett and Price (2012).

    It adds one pair to each kind of discordance, so that it has width even where no case changed.
    """
    n = overall["n"]
    if not n:
        return {"value": None, "low": None, "high": None}
    won, lost = (overall["fixed"] + 1) / (n + 2), (overall["regressed"] + 1) / (n + 2)
    half = Z * math.sqrt((won + lost - (won - lost) ** 2) / (n + 2))
    return {"value": overall["delta"]["accuracy"], "low": won - lost - half, "high": won - lost + half}


def side_labels(one: JsonDict, two: JsonDict) -> tuple[str, str]:
    """What tells the two apart: their names, the Skill, the model, or else the time."""
    if one["name"] != two["name"]:
        return one["name"], two["name"]
    labels = [row["skill_label"] for row in (one, two)]
    if labels[0] == labels[1] or one["model_name"] != two["model_name"]:
        labels = [f"{label} · {row['model_name']}" for label, row in zip(labels, (one, two), strict=True)]
    if labels[0] == labels[1]:
        labels = [f"{label} · {day(row)}" for label, row in zip(labels, (one, two), strict=True)]
    return labels[0], labels[1]


def sentence(t: Translate, overall: JsonDict, labels: tuple[str, str]) -> str:
    """The answer in one sentence, with how sure it is."""
    facts = {name: overall[name] for name in ("n", "fixed", "regressed")}
    delta = overall["delta"]["accuracy"]
    facts |= {"a": labels[0], "b": labels[1], "points": f"{100 * (delta or 0):+.1f}".replace("-", "−")}
    facts |= {"p": f"{overall['p_value']:.2g}"}
    text = t(f"workbench.verdict.{overall['verdict']}", **facts)
    if (
        overall["verdict"] == "not_distinguishable"
        and overall["needed_discordant"]
        and facts["fixed"] + facts["regressed"]
    ):
        have = facts["fixed"] + facts["regressed"]
        text += " " + t("workbench.verdict.needed", needed=overall["needed_discordant"], have=have)
    return text


def rows(ctx: Context, sides: dict[str, JsonDict], ids: list[str], found: JsonDict) -> list[JsonDict]:
    """Both sides of some cases, with the changed sections of the Skill their verdicts rest on."""
    r, c = tables.results, tables.cases
    out: dict[str, JsonDict] = {case_id: {"case_id": case_id, "a": None, "b": None} for case_id in ids}
    names = ("ordinal", "case_id", "domain", "gold", "prediction", "reason", "evidence", "state", "detail")
    changed = {section for change in found["skill_diff"] for section in (change["sections"] or [change["path"]])}
    with ctx.bench.store.read() as connection:
        for name, side in sides.items():
            query = (
                select(*(r.c[n] for n in names), c.c.query)
                .join(c, (c.c.dataset_id == side["dataset_id"]) & (c.c.ordinal == r.c.ordinal))
                .where(r.c.experiment_id == side["id"], r.c.repeat == 0, c.c.case_id.in_(ids))
            )
            for row in connection.execute(query).mappings():
                one = out[row["case_id"]]
                one[name] = {k: row[k] for k in names if k != "detail"}
                one |= {"query": row["query"], "gold": row["gold"], "domain": row["domain"]}
                refs = one.setdefault("changed", [])
                for item in ((row["detail"] or {}).get("evidence") or {}).get("cited", []):
                    ref = f"{item['path']}#{item['section']}" if item.get("section") else str(item.get("path"))
                    if ref in changed and ref not in refs:
                        refs.append(ref)
    return list(out.values())


@router.get("/workbench/matrix")
def matrix(request: Request, ctx: Ctx, id: Ids = None) -> Response:
    """Skills x models over one data set: headline figures side by side, and the form that makes such a matrix."""
    table = []
    experiments = [ctx.bench.experiments.get(experiment_id) for experiment_id in id or []]
    for found, accuracy in zip(experiments, headlines(ctx, experiments), strict=True):
        skill = snapshot_label(ctx.bench.snapshots.get(found["snapshot_id"]))
        model = f"{found['model_name']} v{found['model_version']}"
        table.append({**found, "skill_label": skill, "model_label": model, "accuracy": accuracy})
    return show_matrix(request, ctx, table)


def show_matrix(request: Request, ctx: Context, table: list[JsonDict], problem: str = "") -> Response:
    """The page of a matrix."""
    skills = list(dict.fromkeys(row["skill_label"] for row in table))
    models = list(dict.fromkeys(row["model_label"] for row in table))
    cells = {(row["skill_label"], row["model_label"]): row for row in table}
    return page(
        request,
        "workbench/matrix.html",
        status=422 if problem else 200,
        table=table,
        skills=skills,
        models=models,
        cells=cells,
        problem=problem,
        datasets=ctx.bench.datasets.all(),
        snapshots=[{**row, "label": snapshot_label(row)} for row in distinct_contents(ctx.bench.snapshots.all())],
        profiles=sorted({row["name"] for row in ctx.bench.models.all()}),
        live=any(row["state"] in ("created", "running") or row["accuracy"] is None for row in table),
    )


@router.post("/workbench/matrix")
def make_matrix(request: Request, ctx: Ctx, form: Annotated[FormData, Depends(form_of)]) -> Response:
    """One experiment per chosen Skill and model, all started."""
    try:
        made = create_matrix(
            ctx.bench,
            name=field(form, "name")[:100] or "matrix",
            dataset_id=field(form, "dataset"),
            snapshot_ids=[v for v in form.getlist("snapshot") if isinstance(v, str)],
            models=[v for v in form.getlist("model") if isinstance(v, str)],
            params=Params(repeats=max(1, min(20, whole(form, "repeats", 1)))),
            concurrency=ctx.config.batch_concurrency,
        )
    except DataError as error:
        return show_matrix(request, ctx, [], str(error))
    for one in made:
        ctx.bench.experiments.move(one["id"], "start")
    ctx.wake()
    return back("/workbench/matrix?" + "&".join(f"id={one['id']}" for one in made), "created")
