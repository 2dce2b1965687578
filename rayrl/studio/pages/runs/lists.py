"""The list of runs, a run's page, its episodes and its manifest."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from rayrl.errors import DataError, UserError
from rayrl.export.filters import NAMES
from rayrl.schemas import JsonDict
from rayrl.studio.context import Context, Ctx
from rayrl.studio.pages.charts import lines
from rayrl.studio.pages.language import Translate
from rayrl.studio.pages.places import guarded, read_object
from rayrl.studio.pages.runs import facts as of
from rayrl.studio.pages.runs.episodes import OUTCOMES, PAGE, SORTS, choice_of, episode_url, positions, rows_at
from rayrl.studio.pages.runs.index import BRIEF_S, LARGE, RunIndex
from rayrl.studio.pages.shell import page, texts
from rayrl.traces.manifest import MANIFEST, flatten
from rayrl.traces.store import TRACES

router = APIRouter()
Slug = Annotated[str, Path(max_length=1000)]
LIST = 50
FOLLOW_S = 3600.0


def open_index(ctx: Context, run: JsonDict, wait_s: float | None = None) -> tuple[RunIndex, str | None, bool]:
    """The index of a run, a problem with its traces, and whether it is complete."""
    index = of.run_index(ctx, run["path"])
    if not run["trace_bytes"]:
        return index, None, True
    if wait_s is None:
        wait_s = 8.0 if run["trace_bytes"] < LARGE else BRIEF_S
    try:
        return index, None, index.update(wait_s)
    except DataError as error:
        return index, str(error), True


def head(ctx: Context, t: Translate, slug: str, current: str) -> JsonDict:
    """What every page of a run shows above its content."""
    run = of.one_run(ctx, slug)
    if not (run["path"] / MANIFEST).exists() and not (run["path"] / TRACES).exists():
        raise DataError(f"{run['name']}: is no rollout run; it holds neither {MANIFEST} nor {TRACES}")
    index, problem, ready = open_index(ctx, run)
    of.recount(run, index)
    base = f"/runs/{quote(slug)}"
    n = index.query("SELECT count(*) FROM attempts WHERE result")[0][0] if index.meta() else None
    tabs = [
        {"label": t("runs.tab.overview"), "href": base, "current": current == "overview"},
        {"label": t("runs.tab.episodes"), "href": f"{base}/episodes", "current": current == "episodes", "n": n},
        {"label": t("runs.tab.manifest"), "href": f"{base}/manifest", "current": current == "manifest"},
    ]
    meta = index.meta()
    unusable = {kind: int(meta.get(kind, 0)) for kind in ("malformed", "foreign")}
    unusable["torn"] = int(meta.get("torn_size", "-1") != "-1" and run["state"] != "running")
    return {
        "run": run,
        "index": index,
        "trouble": problem,
        "ready": ready,
        "share": index.share() if not ready else 1.0,
        "tabs": tabs,
        "base": base,
        "unusable": {kind: count for kind, count in unusable.items() if count},
        "events": None if ready and run["state"] != "running" else f"{base}/events",
        "episode_url": episode_url,
    }


@router.get("/runs")
def index_page(
    request: Request, ctx: Ctx, q: str = "", state: str = "", cursor: str = "", inside: str = ""
) -> Response:
    """All runs, newest first."""
    every = of.runs_of(ctx, patience_s=1.0)
    found = [run for run in every if q.lower() in f"{run['name']} {run['model']} {run['split']}".lower()]
    found = [run for run in found if not state or run["state"] == state]
    folded: Counter[str] = Counter()
    if inside:
        found = [run for run in found if run["inside"] == inside]
    elif not q and not state:
        folded = Counter(run["inside"] for run in found if run["inside"])
        found = [run for run in found if not run["inside"]]
    first = next((at + 1 for at, run in enumerate(found) if run["slug"] == cursor), 0)
    shown = found[first : first + LIST]
    following = shown[-1]["slug"] if shown and first + LIST < len(found) else None
    return page(
        request,
        "runs/index.html",
        runs=shown,
        total=len(found),
        every=len(every),
        root=str(of.runs_root(ctx)),
        q=q,
        state=state,
        folded=sorted(folded.items()),
        inside=inside,
        following=following,
        cursor=cursor,
        pair=likely_pair(shown),
        quote=quote,
    )


def likely_pair(shown: list[JsonDict]) -> tuple[str, str]:
    """The newest two runs of as many episodes of one split: most likely what somebody wants to compare."""
    seen: dict[tuple[Any, Any], str] = {}
    for run in shown:
        if run["trace_bytes"] and run["expected"]:
            key = (run["split"], run["expected"])
            if key in seen:
                return run["slug"], seen[key]
            seen[key] = run["slug"]
    return "", ""


@router.get("/runs/{slug}")
def show(request: Request, ctx: Ctx, slug: Slug) -> Response:
    """A run: what to know first, figures, why episodes failed."""
    t = texts(request)
    values = head(ctx, t, slug, "overview")
    run, index = values["run"], values["index"]
    summary, problem = guarded(lambda: of.summary_of(run, index))
    diagnosis, trouble = (None, None) if values["trouble"] else guarded(lambda: of.diagnosis_of(run, index))
    points = of.progress_points(run["path"])
    chart = None
    if len(points["seconds"]) > 2:
        chart = lines(
            points["seconds"],
            {t("runs.live.complete"): points["complete"]},
            x_title=t("runs.live.seconds"),
            y_title=t("runs.live.complete"),
        )
    kinds, newest = of.events_of(run["path"])
    values |= {
        "summary": summary,
        "diagnosis": diagnosis,
        "label_rows": by_harm(diagnosis["labels"]) if diagnosis else [],
        "problems": [text for text in (run["problem"], problem, trouble, values["trouble"]) if text],
        "chart": chart,
        "kinds": kinds,
        "newest": newest,
        "rate": of.rate,
        "score_rows": score_rows(summary) if summary else [],
        "spread": {**summary["counts"], **summary["costs"]} if summary else {},
    }
    return page(request, "runs/show.html", **values)


def by_harm(labels: JsonDict) -> list[tuple[str, JsonDict]]:
    """Labels that occur, first those with which success is lowest compared with without; ties: the more frequent."""

    def key(item: tuple[str, JsonDict]) -> tuple[bool, float, int]:
        found = item[1]
        inside, outside = found["success_with"], found["success_without"]
        lost = None if inside is None or outside is None else outside - inside
        return lost is None, -(lost or 0.0), -found["episodes"]

    return sorted(((name, found) for name, found in labels.items() if found["episodes"]), key=key)


def score_rows(summary: JsonDict) -> list[JsonDict]:
    """Scores with intervals, pass@k and flake rate among them where tasks were played several times."""
    items = dict(summary["metrics"])
    items |= {f"pass@{k}": v for k, v in (summary.get("pass_at_k") or {}).items()}
    if summary.get("flake_rate"):
        items["flake_rate"] = summary["flake_rate"]
    return [{"name": name, "rate": of.rate(v), "n": v["n"], "tasks": v["clusters"]} for name, v in items.items()]


@router.get("/runs/{slug}/episodes")
def episodes(request: Request, ctx: Ctx, slug: Slug, cursor: Annotated[int, "position"] = -1) -> Response:
    """The episodes of a run, filtered and sorted on the server, a page at a time."""
    t = texts(request)
    values = head(ctx, t, slug, "episodes")
    index, problem, wrong = values["index"], None, None
    try:
        choice = choice_of(request.query_params)
        chosen = positions(index, choice)
    except UserError as error:
        # the field keeps what was typed, so that it can be mended
        choice, chosen, problem = choice_of({}), [], str(error)
        wrong = request.query_params.get("filter", "")
    first = chosen.index(cursor) + 1 if cursor >= 0 and cursor in chosen else 0
    shown = chosen[first : first + PAGE]
    labels = index.query(
        "SELECT label, count(*) FROM found WHERE position NOT IN (SELECT position FROM attempts WHERE result = 0)"
        " GROUP BY label ORDER BY 2 DESC"
    )
    causes = index.query(
        "SELECT cause, count(*) FROM attempts WHERE result AND cause IS NOT NULL GROUP BY 1 ORDER BY 2 DESC"
    )
    values |= {
        "choice": choice,
        "wrong": wrong,
        "problem": problem,
        "rows": rows_at(index, shown),
        "first": first,
        "total": len(chosen),
        "following": shown[-1] if first + PAGE < len(chosen) else None,
        "cursor": cursor,
        "labels": labels,
        "causes": causes,
        "outcomes": list(OUTCOMES),
        "sorts": list(SORTS),
        "names": sorted(NAMES),
    }
    return page(request, "runs/episodes.html", **values)


@router.get("/runs/{slug}/manifest")
def manifest(request: Request, ctx: Ctx, slug: Slug) -> Response:
    """What was run."""
    values = head(ctx, texts(request), slug, "manifest")
    found, problem = guarded(lambda: _manifest_rows(read_object(values["run"]["path"] / MANIFEST)))
    config = values["run"]["path"] / "config.yaml"
    text = ""
    if config.is_file():
        text = config.read_text(encoding="utf-8", errors="replace")[:60_000]
    return page(request, "runs/manifest.html", **values, parts_of=found or {}, problem=problem, config_text=text)


def _manifest_rows(manifest: JsonDict) -> dict[str, list[tuple[str, Any]]]:
    semantic = {k: v for k, v in manifest["semantic"].items() if k != "jobs"}
    top = {k: manifest.get(k) for k in ("experiment", "fingerprint", "created_at", "schema")}
    parts = {"what": top | {"jobs": len(manifest["semantic"]["jobs"])}, "semantic": semantic}
    parts |= {"operational": manifest.get("operational") or {}, "versions": manifest.get("versions") or {}}
    return {name: [(k, _plain(v)) for k, v in flatten(values).items()] for name, values in parts.items()}


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 500 else text[:499] + "…"


@router.get("/runs/{slug}/events")
async def events(request: Request, ctx: Ctx, slug: Slug) -> StreamingResponse:
    """Server-sent events: ``progress`` when the run or its index has moved on, ``end`` when nothing more will come."""
    await run_in_threadpool(of.one_run, ctx, slug)
    stream = _stream(request, ctx, slug)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def _stream(request: Request, ctx: Context, slug: str) -> AsyncIterator[str]:
    shown: Any = None
    until = time.monotonic() + FOLLOW_S
    while time.monotonic() < until and not await request.is_disconnected():
        now, busy = await run_in_threadpool(_position, ctx, slug)
        if now != shown:
            yield f"event: progress\ndata: {json.dumps(now)}\n\n"
            shown = now
        else:
            yield ": still here\n\n"
        if not busy:
            break
        await asyncio.sleep(1.0)
    yield "event: end\ndata: {}\n\n"


def _position(ctx: Context, slug: str) -> tuple[JsonDict, bool]:
    run = of.one_run(ctx, slug)
    _, _, ready = open_index(ctx, run, 0.0)
    now = {"state": run["state"], "complete": run["complete"], "bytes": run["trace_bytes"], "ready": ready}
    return now, run["state"] == "running" or not ready
