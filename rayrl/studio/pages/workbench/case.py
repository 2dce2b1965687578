"""One case in its six parts, and its review; the queue goes on to the next case that is open."""

from __future__ import annotations

from functools import partial
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.datastructures import FormData

from rayrl.errors import DataError
from rayrl.schemas import JsonDict
from rayrl.studio.context import Context, Ctx
from rayrl.studio.pages.shell import YEAR, back, page, texts
from rayrl.studio.pages.workbench.common import (
    LISTS,
    ExperimentId,
    Ordinal,
    field,
    file_url,
    filters_of,
    form_of,
    head,
    url,
    whole,
)
from rayrl.studio.pages.workbench.record import record_of
from rayrl.studio.pages.workbench.said import said
from rayrl.workbench.results import Filter, case_detail, listed, neighbours
from rayrl.workbench.results import page as result_page
from rayrl.workbench.reviews import VERDICTS, StaleReviewError, add_review
from rayrl.workbench.store import MissingError

router = APIRouter(include_in_schema=False)
BASE = "/workbench/experiments/{experiment_id}"


@router.get(BASE + "/cases/{ordinal}")
def show(
    request: Request,
    ctx: Ctx,
    experiment_id: ExperimentId,
    ordinal: Ordinal,
    repeat: Annotated[int, Query(ge=0, le=1000)] = 0,
    attempt: Annotated[int | None, Query(ge=1, le=10**6)] = None,
    part: Annotated[int, Query(ge=0, le=10**6)] = 0,
) -> Response:
    """Source and input, verdicts, evidence, what it did, the record, the review."""
    return render(request, ctx, experiment_id, ordinal, repeat=repeat, attempt=attempt, part=part)


def render(
    request: Request,
    ctx: Context,
    experiment_id: str,
    ordinal: int,
    *,
    repeat: int = 0,
    attempt: int | None = None,
    part: int = 0,
    problem: str = "",
    status: int = 200,
    note_text: str | None = None,
) -> Response:
    """The page of a case."""
    t = texts(request)
    listing = request.query_params.get("list", "disagreements")
    listing = listing if listing in LISTS else "disagreements"
    filters, given = filters_of(request, listing)
    top = head(ctx, t, experiment_id, listing)
    detail = case_detail(ctx.bench, experiment_id, ordinal, repeat)
    before, after = neighbours(ctx.bench, experiment_id, filters, ordinal, repeat)
    query = {"list": listing, **given}
    # a review or another run takes a case out of the list it was opened from: only what it never was in is said
    outside = not listed(ctx.bench, experiment_id, filters.model_copy(update={"review": None}), ordinal)

    def at(place: tuple[int, int] | None) -> str | None:
        return None if place is None else url(experiment_id, f"/cases/{place[0]}", **query)

    # the detail's own `evidence` is the triangle; the result's is the state it comes to
    triangle = detail["result"].get("evidence")
    if isinstance(triangle, dict):
        detail["result"] |= {"evidence": triangle["state"], "evidence_triangle": triangle}
    else:
        detail["result"]["evidence_triangle"] = {}
    detail["result"].setdefault("error", None)
    record, missing = None, ""
    if any(row["has_trace"] for row in detail["attempts"]):
        try:
            record = record_of(ctx, experiment_id, ordinal, repeat, attempt)
        except DataError as error:
            missing = str(error)
    return page(
        request,
        "workbench/case.html",
        said=partial(said, texts(request)),
        status=status,
        **top,
        **detail,
        record=record,
        missing=missing,
        part=min(part, record.parts - 1) if record else 0,
        attempt=attempt,
        repeat=repeat,
        listing=listing,
        outside=outside,
        case_ordinal=ordinal,
        query=query,
        back_url=url(experiment_id, f"/{listing}", **given),
        prev_url=at(before),
        next_url=at(after),
        here_url=url(experiment_id, f"/cases/{ordinal}", **query),
        verdicts=verdicts_of(detail["result"]),
        review=detail["reviews"][-1] if detail["reviews"] else None,
        problem=problem,
        note_text=note_text,
        file_url=lambda ref: file_url(top["experiment"]["snapshot_id"], ref),
    )


@router.post(BASE + "/cases/{ordinal}/review")
def review(
    request: Request,
    ctx: Ctx,
    experiment_id: ExperimentId,
    ordinal: Ordinal,
    form: Annotated[FormData, Depends(form_of)],
) -> Response:
    """Keep a review, and go on to the next case of the list it was opened from."""
    reviewer = field(form, "reviewer")[:200]
    try:
        add_review(
            ctx.bench,
            experiment_id,
            ordinal,
            verdict=field(form, "verdict"),
            note=field(form, "note")[:10_000],
            reviewer=reviewer,
            expected_version=whole(form, "version", 0),
        )
    except StaleReviewError:
        stale = texts(request)("workbench.stale_review")
        return render(request, ctx, experiment_id, ordinal, problem=stale, status=412, note_text=field(form, "note"))
    except MissingError:
        raise
    except DataError as error:
        return render(
            request, ctx, experiment_id, ordinal, problem=str(error), status=422, note_text=field(form, "note")
        )
    following = field(form, "next")
    safe = following.startswith(url(experiment_id))
    answer = back(following if safe else url(experiment_id, f"/cases/{ordinal}"), "reviewed")
    # quoted: a cookie holds ASCII only
    answer.set_cookie("rayrl_reviewer", quote(reviewer), max_age=YEAR, samesite="lax", path="/", httponly=True)
    return answer


@router.get(BASE + "/review")
def queue(ctx: Ctx, experiment_id: ExperimentId) -> Response:
    """The first disagreement nobody has reviewed; when there is none, the first of the others that want a look."""
    for more in ({"agrees": "0"}, {}):
        wanted = Filter(disagreements=True, review="none", repeat=0, agrees=False if more else None)
        if found := result_page(ctx.bench, experiment_id, wanted, limit=1)["items"]:
            place = f"/cases/{found[0]['ordinal']}"
            return back(url(experiment_id, place, list="disagreements", **more, review="none"))
    return back(url(experiment_id, "/disagreements"), "queue_empty")


def verdicts_of(result: JsonDict) -> list[tuple[int, str, str]]:
    """The verdicts that make sense for a case: (number of its key, name, message).

    Who is right is a question only where label and verdict differ; a case without a label has none that could be.
    """
    out = []
    for number, name in enumerate(VERDICTS, 1):
        if (result["gold"] is None and name == "gold_right") or (result["agrees"] and name == "model_right"):
            continue
        out.append((number, name, "both_right" if result["agrees"] and name == "gold_right" else name))
    return out
