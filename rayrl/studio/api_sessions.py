"""Routes of interactive sessions and of the retrieval gate."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Response
from fastapi import Path as PathPart
from starlette.concurrency import run_in_threadpool

from rayrl.models.config import ModelConfig
from rayrl.models.registry import build_model
from rayrl.schemas import JsonDict
from rayrl.skills.snapshot import take_folder
from rayrl.studio.context import Ctx
from rayrl.studio.requests import GateRequest, MessageRequest, SessionRequest
from rayrl.studio.responses import Session
from rayrl.workbench.store import MissingError

router = APIRouter(prefix="/api", tags=["sessions"])
SessionId = Annotated[str, PathPart(pattern=r"^se_[0-9a-f]{16}$")]


@router.post("/sessions", response_model=Session, status_code=201)
async def create(ctx: Ctx, body: SessionRequest) -> JsonDict:
    """A session with the deployed Skill as it is now."""
    skill = await run_in_threadpool(lambda: take_folder(ctx.config.skill_folder(body.skill)))
    profile = await run_in_threadpool(ctx.bench.models.get, body.model)
    config = ModelConfig.model_validate(profile["body"])
    return ctx.sessions.create(
        skill=skill, model_name=body.model, make_model=lambda: build_model(config), classes=list(body.classes)
    )


@router.get("/sessions", response_model=list[Session])
async def list_sessions(ctx: Ctx) -> list[JsonDict]:
    """Open sessions. Cases of experiments never appear here."""
    return ctx.sessions.all()


@router.get("/sessions/{session_id}", response_model=Session)
async def get(ctx: Ctx, session_id: SessionId) -> JsonDict:
    """A session with its transcript."""
    return ctx.sessions.get(session_id)


@router.post("/sessions/{session_id}/messages")
async def send(ctx: Ctx, session_id: SessionId, body: MessageRequest) -> dict[str, Any]:
    """Say something; answers when the model's turn has ended."""
    return await asyncio.shield(asyncio.ensure_future(ctx.sessions.send(session_id, body.text)))


@router.post("/sessions/{session_id}/stop", response_model=Session)
async def stop(ctx: Ctx, session_id: SessionId) -> JsonDict:
    """Stop the turn that runs."""
    return await ctx.sessions.stop(session_id)


@router.post("/sessions/{session_id}/continue")
async def resume(ctx: Ctx, session_id: SessionId) -> dict[str, Any]:
    """Go on with a stopped turn."""
    return await ctx.sessions.resume(session_id)


@router.delete("/sessions/{session_id}", status_code=204)
async def delete(ctx: Ctx, session_id: SessionId) -> Response:
    """Stop and forget a session."""
    ctx.sessions.get(session_id)
    await ctx.sessions.delete(session_id)
    return Response(status_code=204)


@router.post("/gate", tags=["gate"])
def gate(ctx: Ctx, body: GateRequest) -> dict[str, Any]:
    """Ask the trained retrieval gate about a question; 404 where no checkpoint is configured."""
    if ctx.gate is None:
        raise MissingError("no gate is configured; set `checkpoints` to the folder `rayrl train` wrote its gate to")
    found = ctx.gate.decide(body.question)
    return {
        **found.__dict__,
        "memories": [m.__dict__ for m in found.memories],
        "nearest": [m.__dict__ for m in found.nearest],
    }
