"""Stand-in servers: one that replays the public server's recording, one that fails on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from rayrl.environments.shop import ShopEnvironmentConfig, ShopEnvironmentFactory
from rayrl.schemas import EpisodeJob, ToolCall
from rayrl.shop.config import ShopServerConfig
from rayrl.shop.server import ShopServer

WIRE = Path(__file__).parents[1] / "fixtures" / "shop_wire.jsonl"
PAIRS = [json.loads(line) for line in WIRE.read_text(encoding="utf-8").splitlines()]


def recorded(first: str, last: str) -> list[dict[str, Any]]:
    """The recorded pairs from label ``first`` to the next ``last`` after it."""
    labels = [pair["label"] for pair in PAIRS]
    start = labels.index(first)
    return copy.deepcopy(PAIRS[start : labels.index(last, start) + 1])


class PublicServer:
    """Answers POSTs with the recording, strictly in order, and notes what does not fit."""

    def __init__(self, pairs: list[dict[str, Any]]) -> None:
        self.pairs = [p for p in pairs if p["request"]["method"] == "POST"]
        self.requests: list[dict[str, Any]] = []
        self.mismatches: list[Any] = []

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/healthz":
            return web.json_response(PAIRS[0]["response"]["json"])
        body = json.loads(await request.read())
        self.requests.append(body)
        if not self.pairs:
            self.mismatches.append(("unexpected", body))
            return web.json_response({"result": {"error": "stale or invalid lease for environment 0"}}, status=409)
        pair = self.pairs.pop(0)
        want = pair["request"]["json"]
        differing = {name for name in {*want, *body} if want.get(name) != body.get(name)}
        if differing:
            self.mismatches.append((pair["label"], differing, body))
        return web.json_response(pair["response"]["json"], status=pair["response"]["http_status"])


Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[str]:
    """Serve ``handler`` on a free port; yields the address."""
    runner = web.ServerRunner(web.Server(handler, handler_cancellation=True))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Flaky:
    """A proxy of thought: runs ``before`` on each agent call, which may answer in place of the real server.

    ``before(number, body)`` returns ``None`` to pass the call on, a response to answer, or raises ``Drop`` to cut the
    connection: with ``after=True`` once the real server has acted, so that its answer is lost.
    """

    def __init__(self, upstream: str, before: Callable[[int, dict[str, Any]], web.Response | None]) -> None:
        self.upstream = upstream
        self.before = before
        self.calls: list[dict[str, Any]] = []

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        import aiohttp

        raw = await request.read()
        lose_answer = False
        if request.path == "/api/shop_agent":
            body = json.loads(raw)
            self.calls.append(body)
            try:
                response = self.before(len(self.calls) - 1, body)
            except Drop as drop:
                if not drop.after:
                    _cut(request)
                    return web.Response()
                response, lose_answer = None, True
            if response is not None:
                return response
        headers = {k: v for k, v in request.headers.items() if k.lower() in ("x-admin-token", "content-type")}
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                request.method, self.upstream + request.path_qs, data=raw or None, headers=headers
            ) as upstream,
        ):
            payload = await upstream.read()
            status = upstream.status
        if lose_answer:
            _cut(request)
            return web.Response()
        return web.Response(status=status, body=payload, content_type="application/json")


class Drop(Exception):
    """Cut the connection, before the real server is asked or after it has acted."""

    def __init__(self, *, after: bool = False) -> None:
        self.after = after


def _cut(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()


async def until(condition: Callable[[], bool], timeout: float = 5.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)


TOKEN = "admin-for-tests"


def call(text: str) -> ToolCall:
    name, _, rest = text.partition("[")
    return ToolCall(id="1", name=name, arguments={"query" if name == "search" else "value": rest[:-1]})


def job(task_id: int = 0, seed: int = 1) -> EpisodeJob:
    return EpisodeJob(task_id=task_id, sample_id=0, seed=seed, split="train")


@contextlib.asynccontextmanager
async def shop(**options: Any) -> AsyncIterator[ShopServer]:
    server = ShopServer(ShopServerConfig(**{"generate": 60, "slots": 4, **options}), admin_token=TOKEN)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def factory_for(
    *urls: str, events: list[dict[str, Any]] | None = None, token: str | None = None, **more: Any
) -> AsyncIterator[ShopEnvironmentFactory]:
    config = ShopEnvironmentConfig(base_urls=list(urls), **{"backoff_s": 0.01, "step_timeout_s": 3.0, **more})
    factory = ShopEnvironmentFactory(config, on_event=events.append if events is not None else None, admin_token=token)
    try:
        yield factory
    finally:
        await factory.aclose()
