"""Routes of the section Arena."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from rayrl.errors import DataError
from rayrl.studio.context import Context, Ctx
from rayrl.studio.pages.arena import contests as of
from rayrl.studio.pages.arena.names import method
from rayrl.studio.pages.charts import intervals
from rayrl.studio.pages.places import UnknownError, guarded, resolve
from rayrl.studio.pages.runs.facts import runs_root
from rayrl.studio.pages.shell import page, texts

router = APIRouter(include_in_schema=False)
Slug = Annotated[str, Path(max_length=1000)]
METRICS = ("reward", "success")


@router.get("/arena")
def index(request: Request, ctx: Ctx) -> Response:
    """All contests."""
    t = texts(request)
    return page(
        request, "arena/index.html", contests=of.listed(ctx), root=str(runs_root(ctx)), method=partial(method, t)
    )


@router.get("/arena/{kind}/{slug}")
def show(
    request: Request,
    ctx: Ctx,
    kind: Annotated[str, Path(max_length=20)],
    slug: Slug,
    split: Annotated[str, Query(max_length=100)] = "",
    metric: Annotated[str, Query(max_length=20)] = "reward",
) -> Response:
    """A contest: figures with intervals, and every pair against each other."""
    t = texts(request)
    if kind == "runs":
        if metric not in METRICS:
            raise DataError(f"metric is one of {', '.join(METRICS)}")
        contest = of.rollouts(ctx, slug, metric)
    else:
        contest = _from_file(ctx, kind, slug, split)
    if not contest.versions:
        raise DataError(f"{contest.name}: holds no versions")
    names = [method(t, version.name) for version in contest.versions]
    known = [
        (n, v.rate) for n, v in zip(names, contest.versions, strict=True) if v.rate and v.rate["value"] is not None
    ]
    paired = [v for v in contest.versions if any(v.name in pair for pair in contest.cells)]
    return page(
        request,
        "arena/show.html",
        contest=contest,
        method=partial(method, t),
        chart=intervals([n for n, _ in known], [r for _, r in known], x=t(f"arena.scale.{kind}"), percent=False)
        if known
        else None,
        paired=paired,
        best=best(contest),
        metrics=METRICS,
    )


def _from_file(ctx: Context, kind: str, slug: str, split: str) -> of.Contest:
    path = resolve(runs_root(ctx), slug)
    name = slug.replace("~", "/")
    if kind == "crossfit":
        found, problem = guarded(lambda: of.crossfit(path, slug, name, split or "known"))
    elif kind == "training":
        found, problem = guarded(lambda: of.quick(path, slug, name))
    elif kind == "skills":
        found, problem = guarded(lambda: of.skills(path, slug, name))
    else:
        raise UnknownError("shell.missing.kind", f"there is no contest of kind {kind!r}", name=kind)
    if problem is not None:
        raise DataError(f"{name}: {problem}")
    made: of.Contest = found
    return made


def best(contest: of.Contest) -> tuple[of.Version, list[str], list[str]] | None:
    """The version ahead, and which of the others it clearly beats or cannot be told from, by the intervals at hand.

    Ceilings (what knows the answer) do not take part.
    """
    rivals = [
        v
        for v in contest.versions
        if v.name not in ("oracle", "perfect_gate") and v.rate and v.rate["value"] is not None
    ]
    if len(rivals) < 2:
        return None
    first = max(rivals, key=lambda v: float(v.rate["value"]) if v.rate else 0.0)
    beaten: list[str] = []
    level: list[str] = []
    for other in rivals:
        cell = contest.cell(first.name, other.name) if other is not first else None
        if cell is None or cell["low"] is None:
            continue
        (beaten if cell["low"] > 0 else level).append(other.name)
    return first, beaten, level
