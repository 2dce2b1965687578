"""A real HTTP server that speaks chat completions and misbehaves on demand; everything is deterministic and counted.

Which behaviour a request meets, first match wins: a marker ``[[mock:NAME]]`` in one of its messages, the next entry
of the script (see ``POST /script``), the server's default. A behaviour may carry an argument: ``429:2.5`` sends
``Retry-After: 2.5``, ``429:date`` an HTTP date a second ahead, ``sleep:0.2`` waits and then behaves.

``GET /stats`` tells how many requests came (also per seed, so per completion), with which behaviours, the most in
flight, and the seconds from the first request to the last answer; it is what proves that retries are bounded.
``POST /reset`` clears counters and script.

Run it: ``python -m rayrl.testing.mock_endpoint --port 0 --latency-ms 50``; the first line printed is its address.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import orjson
from aiohttp import web

from rayrl.testing.mock_faults import BODIES, STATUSES
from rayrl.testing.mock_policy import completion, next_call

_MARKER = re.compile(rb"\[\[mock:([^\]]+)\]\]")
TRANSPORT_FAULTS = ("never", "reset", "reset_body", "cut_body", "drip", "sleep", "ok")


def behaviours() -> list[str]:
    """Every behaviour there is."""
    return sorted({*TRANSPORT_FAULTS, *BODIES, *STATUSES, "status"})


@dataclass
class MockEndpoint:
    """The server's state. ``script`` is consumed one entry per request; ``default`` is what remains."""

    latency_s: float = 0.0
    calls: int | None = None
    default: str = "ok"
    script: deque[str] = field(default_factory=deque)
    counts: Counter[str] = field(default_factory=Counter)
    per_seed: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    last_request: dict[str, Any] | None = None
    last_authorization: str | None = None
    url: str = ""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/v1/chat/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/healthz", self._models)
        app.router.add_get("/stats", self._stats)
        app.router.add_post("/script", self._script)
        app.router.add_post("/reset", self._reset)
        return app

    def stats(self) -> dict[str, Any]:
        """Counters since the last reset."""
        return {
            "requests": self.requests,
            "behaviours": dict(self.counts),
            "per_seed": dict(self.per_seed),
            "most_per_seed": max(self.per_seed.values(), default=0),
            "in_flight": self.in_flight,
            "most_in_flight": self.most_in_flight,
            "span_s": round(self.last_at - self.first_at, 3),
            "script_left": len(self.script),
        }

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        self.requests += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        number = self.requests
        if number == 1:
            self.first_at = time.monotonic()
        try:
            raw = await http.read()
            try:
                request = orjson.loads(raw)
            except orjson.JSONDecodeError:
                return web.json_response({"error": {"message": "the body is no JSON"}}, status=400)
            self.last_request = request
            self.last_authorization = http.headers.get("authorization")
            self.per_seed[str(request.get("seed"))] += 1
            behaviour, _, argument = self._choose(raw).partition(":")
            self.counts[behaviour] += 1
            if self.latency_s:
                await asyncio.sleep(self.latency_s)
            return await self._answer(http, request, behaviour, argument, number)
        finally:
            self.in_flight -= 1
            self.last_at = time.monotonic()

    def _choose(self, raw: bytes) -> str:
        marker = _MARKER.search(raw)
        if marker:
            return marker.group(1).decode()
        return self.script.popleft() if self.script else self.default

    async def _answer(
        self, http: web.Request, request: dict[str, Any], behaviour: str, argument: str, number: int
    ) -> web.StreamResponse:
        if behaviour in STATUSES or behaviour == "status":
            return _status(int(argument) if behaviour == "status" else int(behaviour), argument)
        if behaviour in BODIES:
            status, body = BODIES[behaviour](request, number, http.headers.get("authorization") or "")
            return web.Response(status=status, body=body, content_type="application/json")
        if behaviour == "never":
            await self.stopping.wait()
        elif behaviour == "sleep":
            await asyncio.sleep(float(argument or 1))
        elif behaviour == "reset":
            return _abort(http)
        elif behaviour not in TRANSPORT_FAULTS:
            return web.json_response({"error": {"message": f"mock: unknown behaviour {behaviour!r}"}}, status=418)
        body = orjson.dumps(completion(request, next_call(request, calls=self.calls), number=number))
        if behaviour in ("cut_body", "reset_body", "drip"):
            return await self._partial(http, body, behaviour)
        return web.Response(body=body, content_type="application/json")

    async def _partial(self, http: web.Request, body: bytes, behaviour: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json", "content-length": str(len(body))})
        await response.prepare(http)
        if behaviour == "drip":
            for index in range(len(body)):
                await response.write(body[index : index + 1])
                try:
                    await asyncio.wait_for(self.stopping.wait(), 0.05)
                except TimeoutError:
                    continue
                break
        else:
            await response.write(body[: len(body) // 2])
            await asyncio.sleep(0.02)  # let the first half leave before the connection goes
        return _abort(http, response) if behaviour != "drip" else response

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "mock", "object": "model"}]})

    async def _stats(self, _: web.Request) -> web.Response:
        return web.json_response(self.stats())

    async def _script(self, http: web.Request) -> web.Response:
        order = await http.json()
        self.script.extend(order.get("script", []))
        self.default = order.get("default", self.default)
        return web.json_response(self.stats())

    async def _reset(self, _: web.Request) -> web.Response:
        self.script.clear()
        self.counts.clear()
        self.per_seed.clear()
        self.requests = self.most_in_flight = 0
        self.first_at = self.last_at = 0.0
        self.default = "ok"
        return web.json_response(self.stats())


def _status(status: int, argument: str) -> web.Response:
    headers = {}
    if argument == "date":
        headers["Retry-After"] = format_datetime(datetime.now(UTC) + timedelta(seconds=1), usegmt=True)
    elif argument and argument != str(status):
        headers["Retry-After"] = argument
    error = {"error": {"message": f"mock answers {status}", "type": "mock", "code": str(status)}}
    return web.json_response(error, status=status, headers=headers)


def _abort(http: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
    if http.transport is not None:
        http.transport.abort()
    return response or web.Response(status=500)


@asynccontextmanager
async def serve(endpoint: MockEndpoint | None = None, *, port: int = 0, **settings: Any) -> AsyncIterator[MockEndpoint]:
    """Run the mock on loopback inside the current event loop; ``settings`` are :class:`MockEndpoint` fields."""
    mock = endpoint or MockEndpoint(**settings)
    runner = web.AppRunner(mock.app(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, backlog=1024, reuse_address=True)
    await site.start()
    mock.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield mock
    finally:
        mock.stopping.set()
        await runner.cleanup()


async def _main(arguments: argparse.Namespace) -> None:
    mock = MockEndpoint(
        latency_s=arguments.latency_ms / 1000,
        calls=arguments.calls,
        default=arguments.default,
        script=deque(filter(None, arguments.script.split(","))),
    )
    async with serve(mock, port=arguments.port):
        print(mock.url, flush=True)
        await asyncio.Event().wait()


def main(argv: list[str] | None = None) -> None:
    """Command line of the mock."""
    parser = argparse.ArgumentParser(
        prog="python -m rayrl.testing.mock_endpoint", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="fixed latency of every answer")
    parser.add_argument("--calls", type=int, default=None, help="tool calls per conversation before it finishes")
    parser.add_argument("--default", default="ok", help=f"behaviour without a script: {', '.join(behaviours())}")
    parser.add_argument("--script", default="", help="comma-separated behaviours, one per request")
    arguments = parser.parse_args(argv)
    known = behaviours()
    for name in [arguments.default, *filter(None, arguments.script.split(","))]:
        if name.partition(":")[0] not in known:
            parser.error(f"behaviour {name!r} is not known; known: {', '.join(known)}")
    try:
        asyncio.run(_main(arguments))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
