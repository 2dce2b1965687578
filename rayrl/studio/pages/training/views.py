"""Routes of the section Training."""

from __future__ import annotations

from functools import partial
from pathlib import Path as FilePath
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Path, Query, Request, Response

from rayrl.errors import DataError, UserError
from rayrl.schemas import JsonDict
from rayrl.studio.context import Context, Ctx
from rayrl.studio.pages.arena.names import method
from rayrl.studio.pages.charts import intervals
from rayrl.studio.pages.places import Place, guarded, read_object, resolve
from rayrl.studio.pages.runs.facts import held_locks, runs_root
from rayrl.studio.pages.shell import page, texts
from rayrl.studio.pages.training import facts as of
from rayrl.traces.manifest import flatten

router = APIRouter(include_in_schema=False)
Slug = Annotated[str, Path(max_length=1000)]
EXAMPLES: tuple[str, ...] = (
    "How long does the concrete need to cure?",
    "Do I need a permit for a garden shed?",
    "Who painted the Mona Lisa?",
)
LONGEST = 2000


def load(ctx: Context, slug: str) -> JsonDict:
    """Facts of a training.

    Raises:
        MissingError: no such folder.
        DataError: it holds no training.
    """
    path = resolve(runs_root(ctx), slug)
    files = {entry.name: entry for entry in path.iterdir() if entry.is_file()}
    place = Place(slug, path, frozenset(files), max((f.stat().st_mtime for f in files.values()), default=0.0))
    if not place.is_training():
        raise DataError(f"{place.name}: is no training; it holds neither {of.QUICK} nor config.json and fold.json")
    return of.training_facts(place, held_locks())


@router.get("/training")
def index(request: Request, ctx: Ctx) -> Response:
    """All trainings."""
    found = of.trainings(ctx)
    return page(request, "training/index.html", trainings=found, root=str(runs_root(ctx)), quote=quote)


@router.get("/training/{slug}")
def show(request: Request, ctx: Ctx, slug: Slug) -> Response:
    """A training: curves, headroom, unseen questions."""
    t = texts(request)
    facts = load(ctx, slug)
    table, problem = guarded(lambda: of.unseen_table(facts["path"]))
    charts, trouble = guarded(lambda: of.curves(facts["path"], t))
    chart = None
    if table:
        known = [row for row in table["rows"] if row["rate"]["value"] is not None]
        chart = intervals(
            [method(t, row["policy"]) for row in known],
            [row["rate"] for row in known],
            x=t("training.series.balanced"),
            percent=False,
        )
    settings: JsonDict = {}
    if (facts["path"] / "config.json").exists():
        settings, _ = guarded(lambda: flatten(read_object(facts["path"] / "config.json")["config"]))
    return page(
        request,
        "training/show.html",
        training=facts,
        base=f"/training/{quote(slug)}",
        table=table,
        chart=chart,
        headroom=of.headroom(table) if table else [],
        charts=charts or [],
        collapsed=of.collapsed(facts["path"]),
        problems=[text for text in (facts["problem"], problem, trouble) if text],
        settings=settings or {},
        quote=quote,
        method=partial(method, t),
    )


def seek(gate: FilePath) -> str | None:
    """An example of the gate's own; a gate that cannot be used has none, and says so when it is asked."""
    try:
        return of.example(gate)
    except (UserError, ImportError, RuntimeError):
        return None


@router.get("/training/{slug}/walk")
def walk(request: Request, ctx: Ctx, slug: Slug, q: Annotated[str, Query(max_length=LONGEST)] = "") -> Response:
    """One question through the trained gate."""
    facts = load(ctx, slug)
    found, problem = None, None
    examples = EXAMPLES
    if facts["gate"] is not None and (own := facts["example"] or seek(facts["gate"])):
        examples = (own, *EXAMPLES)
    if q.strip() and facts["gate"] is not None:
        try:
            found = of.ask(facts["gate"], q.strip())
        except UserError as error:
            problem = str(error)
        except (KeyError, ValueError, TypeError, OSError, RuntimeError) as error:
            problem = f"the gate cannot be used ({type(error).__name__}: {str(error)[:200]})"
    return page(
        request,
        "training/walk.html",
        training=facts,
        base=f"/training/{quote(slug)}",
        q=q,
        found=found,
        problem=problem,
        examples=examples,
        quote=quote,
    )
