"""One episode step by step, one of its long texts in pieces, and two episodes beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Request, Response

from rayrl.errors import DataError
from rayrl.schemas import JsonDict
from rayrl.studio.context import Context, Ctx
from rayrl.studio.pages.places import UnknownError
from rayrl.studio.pages.runs import facts as of
from rayrl.studio.pages.runs.episodes import (
    PARTS,
    PIECE,
    STEPS,
    choice_of,
    episode_url,
    locate,
    part_of,
    positions,
    rows_at,
    step_views,
    text_of,
    whole,
)
from rayrl.studio.pages.runs.index import RunIndex
from rayrl.studio.pages.runs.lists import Slug, open_index
from rayrl.studio.pages.runs.wish import brand_of, goal_of, wish_of
from rayrl.studio.pages.shell import page
from rayrl.workbench.store import MissingError

router = APIRouter()
From = Annotated[int, Query(alias="from", ge=0, le=10**9)]
Attempt = Annotated[int | None, Query(ge=0, le=10**6)]
SCORES = ("r_type", "r_att", "r_option", "r_price", "r_success", "r_loose", "r_strict")
ELSEWHERE = 12


def load(ctx: Context, slug: str, episode: str, attempt: int | None = None) -> JsonDict:
    """An episode's row, record in the clear, and where it lies.

    Raises:
        MissingError: no such run or episode.
        DataError: the traces or the record are damaged.
    """
    run = of.one_run(ctx, slug)
    index, problem, ready = open_index(ctx, run)
    if problem:
        raise DataError(problem)
    try:
        row, attempts = locate(index, episode, attempt)
    except MissingError:
        if ready:
            raise
        raise DataError(f"{run['name']} is still being read ({index.share():.0%}); load the page again") from None
    return {
        "run": run,
        "index": index,
        "row": row,
        "attempts": attempts,
        "record": whole(index.record(row["position"], row["length"])),
    }


@router.get("/runs/{slug}/episodes/{episode:path}")
def show(request: Request, ctx: Ctx, slug: Slug, episode: str, attempt: Attempt = None, start: From = 0) -> Response:
    """An episode: why it failed, then every step."""
    found = load(ctx, slug, episode, attempt)
    record, row, index = found["record"], found["row"], found["index"]
    choice = choice_of(request.query_params)
    near = neighbours(index, positions(index, choice), row["position"]) if attempt is None else (None, None)
    base = f"/runs/{quote(slug)}"
    asked = {"episode": episode, **({"attempt": attempt} if attempt is not None else {})}
    text_url = f"{base}/text?{urlencode(asked)}"
    n = len(record["steps"])
    start = min(start, max(0, n - 1)) // STEPS * STEPS
    values: dict[str, Any] = {
        **found,
        "base": base,
        "slug": slug,
        "episode": episode,
        "choice": choice,
        "steps": step_views(record, row["labels"], start, start + STEPS, text_url),
        "n_steps": n,
        "start": start,
        "pages": [(at, min(at + STEPS, n) - 1) for at in range(0, n, STEPS)][:400] if n > STEPS else [],
        "text_url": text_url,
        "before": near[0],
        "after": near[1],
        "facts": episode_facts(record),
        "scores": scores_of(record),
        "wish": wish(found["run"]["path"], row, record),
        "elsewhere": elsewhere(ctx, slug, row, record),
        "episode_url": episode_url,
        "skills": record.get("selected_skills") or [],
        "system": bool(part_of(record, None, "system")),
    }
    return page(request, "runs/episode.html", **values)


def neighbours(index: RunIndex, chosen: list[int], position: int) -> tuple[str | None, str | None]:
    """Ids of the episodes before and after one in a list."""
    try:
        at = chosen.index(position)
    except ValueError:
        return None, None
    beside = [chosen[i] for i in (at - 1, at + 1) if 0 <= i < len(chosen)]
    names = {row["position"]: row["episode"] for row in rows_at(index, beside)}
    before = names.get(chosen[at - 1]) if at > 0 else None
    return before, names.get(chosen[at + 1]) if at + 1 < len(chosen) else None


def episode_facts(record: JsonDict) -> JsonDict:
    """Small facts beside the steps."""
    job, final, usage = record.get("job") or {}, record.get("final") or {}, record.get("usage") or {}
    provenance = record.get("provenance") or {}
    return {
        "seed": job.get("seed"),
        "split": job.get("split"),
        "task": job.get("task_id"),
        "sample": job.get("sample_id"),
        "model": provenance.get("model"),
        "checkpoint": provenance.get("checkpoint_id"),
        "environment": provenance.get("environment_version"),
        "started": record.get("started_at"),
        "duration": record.get("duration_s"),
        "tokens": (usage.get("prompt_tokens") or 0) + (usage.get("completion_tokens") or 0),
        "ended": final.get("termination_reason"),
        "reward": final.get("reward"),
        "purchase": final.get("purchase") or {},
        "error": record.get("error") or {},
        "persona": (record.get("reset") or {}).get("persona"),
        "instruction": text_of((record.get("reset") or {}).get("instruction")),
    }


def wish(run_dir: Path, row: JsonDict, record: JsonDict) -> JsonDict | None:
    """Wanted against bought, where the episode is complete and its private goal is at hand."""
    goal = goal_of(run_dir, row["episode"]) if row["complete"] else None
    if not goal:
        return None
    final = record.get("final") or {}
    purchase = final.get("purchase")
    asin = purchase.get("asin") if isinstance(purchase, dict) else None
    return wish_of(goal, final, brand_of(record, asin))


def scores_of(record: JsonDict) -> list[tuple[str, Any]]:
    """Parts of the reward, known ones first."""
    detail = (record.get("final") or {}).get("reward_detail") or {}
    if not isinstance(detail, dict):
        return []
    known = [(name, detail[name]) for name in SCORES if name in detail]
    return (
        known + [(k, v) for k, v in sorted(detail.items()) if k not in SCORES and not isinstance(v, dict | list)][:20]
    )


def elsewhere(ctx: Context, slug: str, row: JsonDict, record: JsonDict) -> list[JsonDict]:
    """The same task in other runs and samples, as far as their indices are there."""
    job = record.get("job") or {}
    out: list[JsonDict] = []
    for run in of.runs_of(ctx):
        if len(out) >= ELSEWHERE:
            break
        index = of.run_index(ctx, run["path"])
        if not index.meta():
            continue
        rows = index.query(
            "SELECT episode, success, reward FROM attempts WHERE result AND task = ? AND split = ?"
            " ORDER BY sample LIMIT 4",
            (job.get("task_id"), job.get("split") or ""),
        )
        out += [
            {"slug": run["slug"], "name": run["name"], "episode": e, "success": s, "reward": r}
            for e, s, r in rows
            if (run["slug"], e) != (slug, row["episode"])
        ]
    return out[:ELSEWHERE]


@router.get("/runs/{slug}/text")
def text(
    request: Request,
    ctx: Ctx,
    slug: Slug,
    episode: Annotated[str, Query(max_length=1000)],
    part: Annotated[str, Query(max_length=20)],
    step: Annotated[int | None, Query(ge=0)] = None,
    attempt: Attempt = None,
    piece: Annotated[int, Query(ge=0, le=10**6)] = 0,
) -> Response:
    """One text of an episode, however long, in pieces."""
    found = load(ctx, slug, episode, attempt)
    if part not in PARTS:
        known = ", ".join(PARTS)
        text = f"an episode has no part {part!r}; parts: {known}"
        raise UnknownError("shell.missing.part", text, name=part, known=known)
    value = text_of(part_of(found["record"], step, part))
    pieces = max(1, -(-len(value) // PIECE))
    piece = min(piece, pieces - 1)
    return page(
        request,
        "runs/text.html",
        **found,
        slug=slug,
        base=f"/runs/{quote(slug)}",
        episode=episode,
        part=part,
        step=step,
        piece=piece,
        pieces=pieces,
        length=len(value),
        shown=value[piece * PIECE : (piece + 1) * PIECE],
        episode_url=episode_url,
    )


@router.get("/runs/-/side")
def side(
    request: Request,
    ctx: Ctx,
    left: Annotated[str, Query(max_length=2000)],
    right: Annotated[str, Query(max_length=2000)],
    start: From = 0,
) -> Response:
    """Two episodes step by step beside each other; each is named ``RUN/EPISODE``."""
    sides = []
    for given in (left, right):
        slug, _, episode = given.partition("/")
        found = load(ctx, slug, episode)
        asked = urlencode({"episode": episode})
        base = f"/runs/{quote(slug)}/text?{asked}"
        steps = step_views(found["record"], found["row"]["labels"], start, start + STEPS, base)
        sides.append({**found, "slug": slug, "episode": episode, "steps": steps, "n": len(found["record"]["steps"])})
    most = max(one["n"] for one in sides)
    pairs = [
        tuple(one["steps"][i] if i < len(one["steps"]) else None for one in sides)
        for i in range(max(len(one["steps"]) for one in sides))
    ]
    actions = [[step.get("action") for step in one["record"]["steps"]] for one in sides]
    apart = next((i for i, (a, b) in enumerate(zip(*actions, strict=False)) if a != b), None)
    if apart is None and len(actions[0]) != len(actions[1]):
        apart = min(map(len, actions))
    return page(
        request,
        "runs/side.html",
        sides=sides,
        pairs=pairs,
        start=start,
        apart=apart,
        following=start + STEPS if start + STEPS < most else None,
        episode_url=episode_url,
        quote=quote,
        same_task=sides[0]["row"]["instruction"] == sides[1]["row"]["instruction"],
    )
