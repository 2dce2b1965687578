"""Skill snapshots: taken, listed, and their files with a cited passage marked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi import Path as PathPart
from sqlalchemy import select
from starlette.datastructures import FormData

from rayrl.errors import ConfigError, DataError, UserError
from rayrl.schemas import JsonDict
from rayrl.skills.diff import diff_skills
from rayrl.skills.markdown import resolve
from rayrl.studio.context import Context, Ctx
from rayrl.studio.pages.shell import back, page, texts
from rayrl.studio.pages.workbench.common import field, form_of, shown_status
from rayrl.workbench import tables
from rayrl.workbench.snapshots import snapshot_label

router = APIRouter(include_in_schema=False)
SnapshotId = Annotated[str, PathPart(pattern=r"^sk_[0-9a-f]{16}$")]
Text = Annotated[str, Query(max_length=1000)]
MAX_LINES = 5000


@router.get("/workbench/skills")
def snapshots(request: Request, ctx: Ctx) -> Response:
    """All snapshots, and the form that takes one."""
    return show(request, ctx)


def show(request: Request, ctx: Context, problem: str = "", given: dict[str, str] | None = None) -> Response:
    """The list, with what went wrong and what was typed."""
    rows = [
        {**row, "label": snapshot_label(row), "status": shown_status(ctx, row)} for row in ctx.bench.snapshots.all()
    ]
    return page(
        request,
        "workbench/skills.html",
        status=422 if problem else 200,
        rows=rows,
        deployed=sorted(ctx.config.skills),
        roots=list(map(str, ctx.config.permitted_roots())),
        given={"next": request.query_params.get("next", "")} | (given or {}),
        problem=problem,
    )


@router.post("/workbench/skills")
def take(request: Request, ctx: Ctx, form: Annotated[FormData, Depends(form_of)]) -> Response:
    """Freeze a deployed Skill, or a path at a commit or tag below the permitted folders."""
    try:
        if skill := field(form, "skill"):
            made = ctx.bench.snapshots.add_folder(ctx.config.skill_folder(skill))
        else:
            where = field(form, "repository")
            if not where:
                raise DataError("name a deployed Skill or a folder")
            folder, ref = permitted(request, ctx, where), field(form, "ref")
            bench = ctx.bench.snapshots
            if ref:
                made = bench.add_git(folder, ref, field(form, "path"))
            else:
                made = bench.add_folder(permitted(request, ctx, str(folder / field(form, "path"))))
    except UserError as error:
        given = {name: field(form, name) for name in ("skill", "repository", "ref", "path", "next")}
        return show(request, ctx, str(error), given)
    following = field(form, "next")
    if following.startswith("/workbench/configure?"):
        return back(f"{following}&snapshot={made['id']}", "snapshot_taken")
    return back(f"/workbench/skills/{made['id']}", "snapshot_taken")


def permitted(request: Request, ctx: Context, folder: str) -> Path:
    """A folder somebody typed.

    Raises:
        ConfigError: it is not below a permitted one; the message names those and how to add another.
    """
    try:
        return ctx.config.permitted(folder)
    except ConfigError:
        roots = ", ".join(map(str, ctx.config.permitted_roots()))
        t = texts(request)
        raise ConfigError(
            t("workbench.not_permitted", folder=folder[:200], roots=roots or t("workbench.none"))
        ) from None


@router.get("/workbench/skills/{snapshot_id}")
def snapshot(request: Request, ctx: Ctx, snapshot_id: SnapshotId, against: str = "") -> Response:
    """A snapshot: where it comes from, its files, what uses it, and what changed since another."""
    found = ctx.bench.snapshots.get(snapshot_id)
    skill = ctx.bench.snapshots.load(snapshot_id)
    e = tables.experiments
    with ctx.bench.store.read() as connection:
        query = select(e.c.id, e.c.name, e.c.state).where(e.c.snapshot_id == snapshot_id)
        used = [dict(r) for r in connection.execute(query.order_by(e.c.created_at.desc()).limit(20)).mappings()]
    shown = {**found, "status": shown_status(ctx, found)}
    others = [r for r in ctx.bench.snapshots.all() if r["name"] == found["name"] and r["id"] != snapshot_id]
    changes = None
    if against:
        changes = diff_skills(ctx.bench.snapshots.load(against), skill)
    return page(
        request,
        "workbench/skill.html",
        snapshot=shown,
        label=snapshot_label(found),
        files=skill.manifest.files,
        used=used,
        others=[{**r, "label": snapshot_label(r), "newer": r["created_at"] > found["created_at"]} for r in others],
        against=against,
        changes=changes,
    )


@router.get("/workbench/skills/{snapshot_id}/file")
def file(request: Request, ctx: Ctx, snapshot_id: SnapshotId, path: Text, at: Text = "") -> Response:
    """A file line by line; ``at`` (a heading's slug or ``L3-L9``) is marked and can be linked to as ``#cited``."""
    found = ctx.bench.snapshots.get(snapshot_id)
    body = ctx.bench.snapshots.file(snapshot_id, path)
    lines: list[JsonDict] = []
    marked = None
    if not body["binary"]:
        marked = resolve(path, body["text"], at) if at else None
        heads = {heading["start"]: heading for heading in body["headings"]}
        for number, text in enumerate(body["text"].splitlines()[:MAX_LINES], 1):
            inside = marked is not None and marked.start <= number <= marked.end
            first = marked is not None and number == marked.start
            lines.append({"n": number, "text": text, "heading": heads.get(number), "cited": inside, "first": first})
    return page(
        request,
        "workbench/file.html",
        snapshot=found,
        label=snapshot_label(found),
        path=path,
        body=body,
        lines=lines,
        at=at,
        marked=marked,
        cut=not body["binary"] and len(body["text"].splitlines()) > MAX_LINES,
        files=ctx.bench.snapshots.load(snapshot_id).manifest.files,
    )
