"""Interactive sessions: talk with a model that has the deployed Skill."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi import Path as PathPart
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData

from rayrl.errors import DataError, UserError
from rayrl.models.config import ModelConfig
from rayrl.models.registry import build_model
from rayrl.skills.snapshot import take_folder
from rayrl.studio.context import Context, Ctx
from rayrl.studio.pages.shell import back, page
from rayrl.studio.pages.workbench.common import field, form_of

router = APIRouter(include_in_schema=False)
SessionId = Annotated[str, PathPart(pattern=r"^se_[0-9a-f]{16}$")]
WAIT_S = 8.0
_TASKS: set[asyncio.Task[object]] = set()


@router.get("/workbench/sessions")
def sessions(request: Request, ctx: Ctx) -> Response:
    """Open sessions. Cases of experiments never appear here."""
    return show_list(request, ctx)


def show_list(request: Request, ctx: Context, problem: str = "") -> Response:
    """The list and the form of a new one."""
    return page(
        request,
        "workbench/sessions.html",
        status=422 if problem else 200,
        rows=ctx.sessions.all(),
        deployed=sorted(ctx.config.skills),
        models=sorted({row["name"] for row in ctx.bench.models.all()}),
        problem=problem,
    )


@router.post("/workbench/sessions")
async def create(request: Request, ctx: Ctx, form: Annotated[FormData, Depends(form_of)]) -> Response:
    """A session with the deployed Skill as it is now."""
    try:
        skill = await run_in_threadpool(lambda: take_folder(ctx.config.skill_folder(field(form, "skill"))))
        profile = await run_in_threadpool(ctx.bench.models.get, field(form, "model"))
        config = ModelConfig.model_validate(profile["body"])
        classes = [part.strip() for part in field(form, "classes", "fast, slow").split(",") if part.strip()]
        if len(classes) < 2:
            raise DataError("at least two classes are needed")
        made = ctx.sessions.create(
            skill=skill, model_name=profile["name"], make_model=lambda: build_model(config), classes=classes
        )
    except UserError as error:
        return await run_in_threadpool(show_list, request, ctx, str(error))
    return back(f"/workbench/sessions/{made['id']}")


@router.get("/workbench/sessions/{session_id}")
async def show(request: Request, ctx: Ctx, session_id: SessionId) -> Response:
    """A conversation."""
    found = ctx.sessions.get(session_id)
    return await run_in_threadpool(lambda: page(request, "workbench/session.html", session=found))


@router.post("/workbench/sessions/{session_id}/{action}")
async def act(ctx: Ctx, session_id: SessionId, action: str, form: Annotated[FormData, Depends(form_of)]) -> Response:
    """Say something, stop, continue or delete. A turn that takes long goes on while the page is shown again."""
    if action == "delete":
        ctx.sessions.get(session_id)
        await ctx.sessions.delete(session_id)
        return back("/workbench/sessions", "session_deleted")
    if action == "stop":
        await ctx.sessions.stop(session_id)
    elif action in ("send", "continue"):
        text = field(form, "text")
        if action == "send" and not text:
            raise DataError("say something first")
        ctx.sessions.get(session_id)
        turn = ctx.sessions.send(session_id, text) if action == "send" else ctx.sessions.resume(session_id)
        task: asyncio.Task[object] = asyncio.create_task(turn)
        _TASKS.add(task)
        task.add_done_callback(_TASKS.discard)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), WAIT_S)
    else:
        raise DataError(f"there is no action {action[:40]!r}")
    return back(f"/workbench/sessions/{session_id}#end")
