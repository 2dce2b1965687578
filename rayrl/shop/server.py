"""The shop over HTTP: one asyncio process, one catalogue, N leased slots.

Invariants: one event loop and synchronous actions, so a call on a lease is atomic; a caller who hangs up while waiting
for a slot gets none; 5xx is a fault of the server, except 503 with ``Retry-After`` for a full house. The aiohttp
low-level server is used without router or middlewares: a dozen fixed paths need neither, and it answers faster.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import os
import time
from typing import Any

import orjson
from aiohttp import web

from rayrl.shop.api import CODE_HEADER, ApiError, ShopApi
from rayrl.shop.catalogue import build_catalogue
from rayrl.shop.config import ShopServerConfig
from rayrl.shop.debug_ui import DEBUG_PAGE, REPLAY_PAGE
from rayrl.shop.leases import LeaseTable
from rayrl.shop.metrics import Metrics
from rayrl.shop.pages import Shop
from rayrl.shop.session import ShopEpisode
from rayrl.shop.versions import (
    CAPABILITIES,
    ENVIRONMENT_VERSION,
    OBSERVATION_VERSION,
    REWARD_VERSION,
    SEARCH_VERSION,
    SERVER_NAME,
)

_log = logging.getLogger(__name__)

ADMIN_HEADER = "X-Admin-Token"
_ACTIONS = frozenset({"reset", "interact", "terminate", "release_one", "release_all", "heartbeat"})


class ShopServer:
    """An HTTP server around one shop.

    Args:
        config: see :class:`ShopServerConfig`.
        admin_token: overrides what ``config.admin_token_env`` names.

    Raises:
        DataError: the products are wrong.
    """

    def __init__(self, config: ShopServerConfig, *, admin_token: str | None = None) -> None:
        self.config = config
        if admin_token is None and config.admin_token_env:
            admin_token = os.environ.get(config.admin_token_env)
        self._token = admin_token or None
        catalogue = build_catalogue(config.load(), source=config.source)
        self.shop = Shop(catalogue, page_size=config.page_size, max_query_length=config.max_query_length)
        self.leases: LeaseTable[ShopEpisode] = LeaseTable(
            config.slots, ttl_s=config.lease_ttl_s, max_queue=config.max_queue, clock=time.monotonic
        )
        self.api = ShopApi(self.shop, self.leases, queue_timeout_s=config.queue_timeout_s)
        self.metrics = Metrics()
        self.port: int | None = None
        self._started = time.monotonic()
        self._runner: web.ServerRunner | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        """Where the started server answers."""
        return f"http://{self.config.host}:{self.port}"

    async def start(self) -> None:
        """Listen. ``port`` then holds the actual port.

        Raises:
            OSError: the address is taken.
        """
        server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.config.host, self.config.port, backlog=1024)
        try:
            await site.start()
        except OSError:
            await self._runner.cleanup()
            raise
        self.port = int(self._runner.addresses[0][1])
        self._started = time.monotonic()
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Stop listening and drop open connections. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _sweep(self) -> None:
        period = min(1.0, self.config.lease_ttl_s / 10)
        while True:
            await asyncio.sleep(period)
            if self.leases.sweep():
                self.api.forget_resets()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if path == "/api/shop_agent":
            return await self._agent(request)
        if request.method not in ("GET", "HEAD"):
            return _json(405, orjson.dumps({"error": f"{request.method} is not allowed here"}))
        match path:
            case "/healthz":
                return _json(200, orjson.dumps(self.health()))
            case "/metrics":
                return web.Response(text=self.metrics.render(self._gauges()), content_type="text/plain")
            case "/api/private/goal":
                return self._private_goal(request)
            case "/" | "/debug-ui" | "/debug-ui/":
                return web.Response(text=DEBUG_PAGE, content_type="text/html")
            case "/replay-ui" | "/replay-ui/":
                return web.Response(text=REPLAY_PAGE, content_type="text/html")
        return _json(404, orjson.dumps({"error": f"no such path {path}"}))

    async def _agent(self, request: web.BaseRequest) -> web.Response:
        began = time.perf_counter()
        action = "other"
        try:
            if request.method != "POST":
                raise ApiError(405, "method_not_allowed", "POST is expected")
            body = _parse(await request.read())
            named = body.get("action")
            if not isinstance(named, str) or named not in _ACTIONS:
                raise ApiError(400, "unsupported_action", f"unsupported action: {named!r}", in_body=False)
            action = named
            answer = self.api.call(action, body)
            if answer is None:
                answer = await self._slow(action, body, request)
            response = _json(*answer)
        except ApiError as error:
            response = _json(error.status, error.payload())
            response.headers[CODE_HEADER] = error.code
            if error.retry_after_s is not None:
                response.headers["Retry-After"] = f"{error.retry_after_s:g}"
        except Exception:
            # ours to answer for: say so in the protocol's form, and keep the details on this side
            _log.exception("%s failed", action)
            response = _json(500, ApiError(500, "internal_error", "the server failed; see its log").payload())
            response.headers[CODE_HEADER] = "internal_error"
        self.metrics.observe(action, response.status, time.perf_counter() - began)
        return response

    async def _slow(self, action: str, body: dict[str, Any], request: web.BaseRequest) -> tuple[int, bytes]:
        if action == "release_all":
            self._require_admin_or_loopback(request)
            return self.api.release_all()
        return await self.api.reset(
            body,
            private_allowed=self._token is None or self._is_admin(request),
            alive=lambda: request.transport is not None and not request.transport.is_closing(),
        )

    def _private_goal(self, request: web.BaseRequest) -> web.Response:
        try:
            if self._token is None:
                raise ApiError(403, "admin_token_not_set", "the server was started without an admin token")
            if not self._is_admin(request):
                raise ApiError(403, "admin_token_required", f"the header {ADMIN_HEADER} is missing or wrong")
            idx = request.query.get("idx")
            if idx is not None and not (idx.isascii() and idx.isdigit()):
                raise ApiError(400, "bad_task", "idx must be an integer")
            return _json(*self.api.private_goal(int(idx) if idx else None, request.query.get("lease_id")))
        except ApiError as error:
            return _json(error.status, error.payload())

    def _is_admin(self, request: web.BaseRequest) -> bool:
        given = request.headers.get(ADMIN_HEADER, "")
        return self._token is not None and hmac.compare_digest(given.encode(), self._token.encode())

    def _require_admin_or_loopback(self, request: web.BaseRequest) -> None:
        if self._token is not None:
            if not self._is_admin(request):
                raise ApiError(403, "admin_token_required", f"release_all needs the header {ADMIN_HEADER}")
        elif not _is_loopback(request.remote):
            raise ApiError(403, "loopback_only", "release_all is for callers on this machine, or needs an admin token")

    def health(self) -> dict[str, Any]:
        """The ``/healthz`` answer."""
        return {
            "ready": True,
            "environment_slots": self.leases.slots,
            "free_slots": self.leases.free,
            "tasks": len(self.shop.catalogue.tasks),
            "environment_version": ENVIRONMENT_VERSION,
            "observation_version": OBSERVATION_VERSION,
            "primary_reward": "r_strict",
            "debug_ui": "/debug-ui",
            "replay_ui": "/replay-ui",
            "server": SERVER_NAME,
            "capabilities": list(CAPABILITIES),
            "catalogue_sha256": self.shop.catalogue.sha256,
            "products": len(self.shop.catalogue.products),
            "products_dropped": self.shop.catalogue.dropped,
            "reward_version": REWARD_VERSION,
            "search_version": SEARCH_VERSION,
            "page_size": self.config.page_size,
            "max_query_length": self.config.max_query_length,
            "lease_ttl_s": self.config.lease_ttl_s,
            "queue_timeout_s": self.config.queue_timeout_s,
            "queued_resets": self.leases.queued,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "pid": os.getpid(),
        }

    def _gauges(self) -> dict[str, tuple[str, float]]:
        ages = self.leases.ages()
        return {
            "rayrl_shop_slots": ("Episodes that may run at once.", self.leases.slots),
            "rayrl_shop_slots_free": ("Slots nobody holds.", self.leases.free),
            "rayrl_shop_leases_open": ("Leases alive.", len(ages)),
            "rayrl_shop_lease_age_seconds_max": ("Age of the oldest lease.", max(ages, default=0.0)),
            "rayrl_shop_lease_age_seconds_mean": ("Mean age of the leases.", sum(ages) / len(ages) if ages else 0.0),
            "rayrl_shop_leases_expired": ("Leases that ran out since the start.", self.leases.expired_total),
            "rayrl_shop_queue_length": ("Resets waiting for a slot.", self.leases.queued),
            "rayrl_shop_uptime_seconds": ("Seconds since the start.", time.monotonic() - self._started),
        }


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    if not isinstance(body, dict):
        raise ApiError(400, "not_json", "No JSON data provided")
    return body


def _json(status: int, payload: bytes) -> web.Response:
    return web.Response(status=status, body=payload, content_type="application/json")


def _is_loopback(remote: str | None) -> bool:
    try:
        return remote is not None and ipaddress.ip_address(remote.split("%")[0]).is_loopback
    except ValueError:
        return False
