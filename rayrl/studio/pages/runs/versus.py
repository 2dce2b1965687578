"""Two runs compared: the answer in one sentence, differences with intervals, episodes won and lost."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response

from rayrl.errors import DataError
from rayrl.studio.context import Ctx
from rayrl.studio.pages.charts import intervals
from rayrl.studio.pages.places import SEPARATOR
from rayrl.studio.pages.runs import facts as of
from rayrl.studio.pages.runs.comparing import (
    MOVES,
    PAGE,
    answer,
    compared,
    lacking,
    metric_rows,
    moves,
    partner,
    undeclared,
)
from rayrl.studio.pages.runs.episodes import episode_url
from rayrl.studio.pages.runs.lists import likely_pair, open_index
from rayrl.studio.pages.shell import page, texts

router = APIRouter()


@router.get("/runs/-/compare")
def compare(
    request: Request,
    ctx: Ctx,
    a: Annotated[str, Query(max_length=1000)] = "",
    b: Annotated[str, Query(max_length=1000)] = "",
    metric: Annotated[str, Query(max_length=100)] = "",
    show: Annotated[str, Query(max_length=20)] = "",
    start: Annotated[int, Query(alias="from", ge=0)] = 0,
) -> Response:
    """Run ``b`` against run ``a``."""
    runs = [run for run in of.runs_of(ctx) if run["trace_bytes"]]
    every = [(run["slug"], run["name"]) for run in sorted(runs, key=lambda run: run["inside"] is not None)][:500]
    # the names of the list are as good as those of the form
    a, b = (name.strip("/").replace("/", SEPARATOR) for name in (a, b))
    if not a and not b:
        a, b = likely_pair([run for run in runs if not run["inside"]])
        return page(request, "runs/compare.html", every=every, a=a, b=b, found=None, picking=True, problem=None)
    if not a or not b:
        given = next((run for run in runs if run["slug"] == (a or b)), None)
        found_slug = partner(given, runs) if given else ""
        a, b = a or found_slug, b or found_slug
        return page(request, "runs/compare.html", every=every, a=a, b=b, found=None, picking=True, problem=None)
    t = texts(request)
    left, right = of.one_run(ctx, a), of.one_run(ctx, b)
    opened = [open_index(ctx, run) for run in (left, right)]
    for run, (index, _, _) in zip((left, right), opened, strict=True):
        of.recount(run, index)
    problem = next((text for _, text, _ in opened if text), None)
    found = None
    if problem is None:
        try:
            found = compared(left, right, metric or "reward")
        except DataError as error:
            problem = str(error)
    values: dict[str, Any] = {
        "every": every,
        "a": a,
        "b": b,
        "picking": False,
        "left": left,
        "right": right,
        "problem": problem,
    }
    values |= {"waiting": found is None and problem is None, "found": found, "metric": metric or "reward"}
    if found is not None:
        rows = metric_rows(found)
        scores = [row for row in rows if row["name"] == "reward" or row["name"].startswith("r_")]
        changed = moves(opened[0][0], opened[1][0])
        show = show if show in MOVES else "won" if changed["won"] else "lost" if changed["lost"] else "both"
        values |= {
            "answer": answer(t, found),
            "rows": rows,
            "chart": intervals(
                [row["name"] for row in scores],
                [row["difference"] for row in scores],
                x=t("runs.compare.difference"),
                percent=False,
            ),
            "others": undeclared(t, found),
            "short": [run for run, (index, _, _) in zip((left, right), opened, strict=True) if lacking(run, index)],
            "changed": changed,
            "show": show,
            "shown": changed[show][start : start + PAGE],
            "start": start,
            "following": start + PAGE if start + PAGE < len(changed[show]) else None,
            "moves": MOVES,
            "episode_url": episode_url,
            "quote": quote,
            "ready": all(ready for _, _, ready in opened),
        }
    return page(request, "runs/compare.html", **values)
