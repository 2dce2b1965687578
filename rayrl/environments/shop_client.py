"""HTTP to one or more shop servers: single calls, what may be repeated, which server is up and least busy.

Invariants:

* a call is repeated only where that cannot act twice: no connection was made, the server says 503 with
  ``Retry-After``, or it keeps answers by ``request_id``; 500 is never repeated (the public server says it for
  mistakes);
* a server that cannot be reached is passed over and asked for its health now and then;
* a late reply cannot be taken for another call's: a call that timed out closes its connection.

The httpx API runs over aiohttp's connections; httpx's own pool collapses under concurrency.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp
import httpx
import orjson

from rayrl.environments.shop_config import ShopEnvironmentConfig
from rayrl.errors import EnvironmentFaultError
from rayrl.models.http_transport import is_loopback, open_transport
from rayrl.models.retry import backoff_s, parse_retry_after
from rayrl.schemas import JsonDict

OnEvent = Callable[[JsonDict], None]

_PROBE_AFTER_S = (0.5, 1.0, 2.0, 5.0, 10.0)
_AGENT_PATH = "/api/shop_agent"
_HEADERS = {"content-type": "application/json", "accept": "application/json"}


@dataclass(eq=False)
class Server:
    """What is known of one server."""

    base_url: str
    capabilities: frozenset[str] = frozenset()
    lease_ttl_s: float | None = None
    queue_timeout_s: float | None = None
    """How long it lets a reset wait; ``None`` for as long as it takes (the public server)."""
    leases: int = 0
    """Leases this process holds there."""
    down: bool = False
    probe_at: float = 0.0
    failures: int = 0
    probing: asyncio.Task[None] | None = field(default=None, repr=False)
    agent_url: httpx.URL = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.agent_url = httpx.URL(self.base_url + _AGENT_PATH)

    def has(self, capability: str) -> bool:
        """Whether the server said so at its last health check."""
        return capability in self.capabilities


@dataclass(frozen=True)
class Answer:
    """A reply: status and the ``result`` object (an ``error`` in it for most statuses but 200)."""

    status: int
    result: JsonDict
    retry_after_s: float | None = None

    @property
    def error(self) -> str:
        """What the server said, on one line."""
        return " ".join(str(self.result.get("error", f"HTTP {self.status}")).split())[:300]

    @property
    def code(self) -> str | None:
        """The machine-readable code, where the server gives one."""
        code = self.result.get("code")
        return code if isinstance(code, str) else None


class NoAnswerError(Exception):
    """No usable reply. ``sent`` says whether the server may have acted on the request."""

    def __init__(self, code: str, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.code = code
        self.sent = sent


class ShopClient:
    """Calls to the servers of one factory.

    Args:
        config: addresses, time-outs, retry limits.
        base_urls: the servers.
        on_event: gets one dict per noteworthy happening (``event`` names it).
        check_health: raises ``EnvironmentFaultError`` if a health answer is not that of the configured shop.
        admin_token: sent with private-goal requests only.
    """

    def __init__(
        self,
        config: ShopEnvironmentConfig,
        base_urls: list[str],
        *,
        on_event: OnEvent,
        check_health: Callable[[str, JsonDict], None],
        admin_token: str | None,
    ) -> None:
        self.servers = [Server(url) for url in base_urls]
        self._config = config
        self._on_event = on_event
        self._check_health = check_health
        self._token = admin_token
        self._turn = 0
        trust_env = config.trust_env
        if trust_env is None:
            trust_env = not all(is_loopback(url) for url in base_urls)

        self._transport = open_transport(trust_env=trust_env)

    async def aclose(self) -> None:
        """Close connections and stop probing."""
        probes = [s.probing for s in self.servers if s.probing is not None]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        await self._transport.aclose()

    async def once(self, server: Server, body: JsonDict, *, timeout_s: float) -> Answer:
        """One POST, no repetition.

        Raises:
            NoAnswerError: see its ``sent``.
        """
        return await self._request("POST", server, _AGENT_PATH, orjson.dumps(body), timeout_s)

    async def repeated(self, server: Server, body: JsonDict, *, timeout_s: float, until: float, safe: bool) -> Answer:
        """A POST that is repeated where that is safe, up to the configured attempts and the time ``until``.

        Args:
            server: where to.
            body: what; with a ``request_id`` if repeating must not act twice.
            timeout_s: of one attempt.
            until: monotonic time after which no further attempt starts.
            safe: the server answers a repeated request instead of acting again.

        Raises:
            NoAnswerError: of the last attempt.
        """
        for attempt in range(1, self._config.max_attempts + 1):
            last = attempt == self._config.max_attempts
            wait = self.backoff(attempt, body)
            try:
                answer = await self.once(server, body, timeout_s=timeout_s)
            except NoAnswerError as error:
                if last or (error.sent and not safe) or time.monotonic() + wait >= until:
                    raise
                self._on_event({"event": "retry", "server": server.base_url, "code": error.code, "attempt": attempt})
            else:
                come_back = answer.status == 503 and answer.retry_after_s is not None
                if last or not (come_back or (answer.status == 502 and safe)):
                    return answer
                wait = max(wait, answer.retry_after_s or 0.0)
                if time.monotonic() + wait >= until:
                    return answer
            await asyncio.sleep(wait)
        raise NoAnswerError("unreachable", "no attempt was made", sent=False)

    def backoff(self, attempt: int, body: JsonDict) -> float:
        """Seconds to wait after a failed attempt (from 1); jittered by the request, so callers do not return
        together."""
        seed = hash((body.get("lease_id"), body.get("request_id"))) & 0xFFFFFFFF
        config = self._config
        return backoff_s(attempt, seed=seed, initial_s=config.backoff_s, max_s=config.max_backoff_s)

    async def goal(self, server: Server, task_id: int) -> JsonDict | None:
        """The private goal, or ``None`` without a token or a server that serves it.

        Raises:
            NoAnswerError: the server did not answer.
        """
        if self._token is None or not server.has("private_goal"):
            return None
        headers = {"x-admin-token": self._token}
        path = f"/api/private/goal?idx={task_id}"
        answer = await self._request("GET", server, path, None, self._config.step_timeout_s, headers)
        goal = answer.result.get("goal")
        if answer.status != 200 or not isinstance(goal, dict):
            raise NoAnswerError(answer.code or f"http_{answer.status}", answer.error, sent=True)
        return goal

    async def health(self, server: Server) -> JsonDict:
        """Ask for health, check it, and note what the server can do.

        Raises:
            NoAnswerError: unreachable or not ready.
            EnvironmentFaultError: it is another shop.
        """
        answer = await self._request("GET", server, "/healthz", None, self._config.step_timeout_s)
        if answer.status != 200 or answer.result.get("ready") is not True:
            raise NoAnswerError("not_ready", f"{server.base_url}/healthz: {answer.error}", sent=True)
        self._check_health(server.base_url, answer.result)
        server.capabilities = frozenset(str(c) for c in answer.result.get("capabilities") or [])
        server.lease_ttl_s = _seconds(answer.result.get("lease_ttl_s"))
        server.queue_timeout_s = _seconds(answer.result.get("queue_timeout_s"))
        server.down, server.failures = False, 0
        return answer.result

    async def choose(self) -> Server | None:
        """The least busy server that is up; turns are taken among equals. ``None`` if none is up, even after asking."""
        self._probe_due()
        up = [s for s in self.servers if not s.down]
        if not up:
            probes = [s.probing for s in self.servers if s.probing is not None]
            if probes:
                await asyncio.wait(probes)
            up = [s for s in self.servers if not s.down]
        if not up:
            return None
        self._turn += 1
        least = min(s.leases for s in up)
        idle = [s for s in up if s.leases == least]
        return idle[self._turn % len(idle)]

    def mark_down(self, server: Server, error: NoAnswerError) -> None:
        """Pass the server over until a probe finds it again."""
        if not server.down:
            self._on_event({"event": "server_down", "server": server.base_url, "code": error.code})
        server.down = True
        wait = _PROBE_AFTER_S[min(server.failures, len(_PROBE_AFTER_S) - 1)]
        server.failures += 1
        server.probe_at = time.monotonic() + wait

    def _probe_due(self) -> None:
        now = time.monotonic()
        for server in self.servers:
            if server.down and now >= server.probe_at and server.probing is None:
                server.probing = asyncio.create_task(self._probe(server))

    async def _probe(self, server: Server) -> None:
        try:
            await self.health(server)
            self._on_event({"event": "server_up", "server": server.base_url})
        except NoAnswerError as error:
            self.mark_down(server, error)
        except EnvironmentFaultError as error:
            # another shop answers at this address now; it stays passed over
            self.mark_down(server, NoAnswerError(error.code, str(error), sent=False))
        finally:
            server.probing = None

    async def _request(
        self,
        method: str,
        server: Server,
        path: str,
        content: bytes | None,
        timeout_s: float,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        timeout = {"connect": self._config.connect_timeout_s, "read": timeout_s, "write": timeout_s, "pool": timeout_s}
        url = server.agent_url if path == _AGENT_PATH else httpx.URL(server.base_url + path)
        request = httpx.Request(
            method, url, headers={**_HEADERS, **(headers or {})}, content=content, extensions={"timeout": timeout}
        )
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._transport.handle_async_request(request)
                try:
                    await response.aread()
                finally:
                    await response.aclose()
        except (TimeoutError, httpx.HTTPError, aiohttp.ClientError, OSError) as error:
            raise _no_answer(server, error) from error
        return _answer(server, response)


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _no_answer(server: Server, error: Exception) -> NoAnswerError:
    # the transport reports a dropped connection as ConnectTimeout; only its cause says whether the request had left
    cause = error if isinstance(error, aiohttp.ClientError) else error.__cause__
    unconnected = aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError
    if isinstance(cause, unconnected) or (cause is None and isinstance(error, httpx.ConnectError)):
        return NoAnswerError("unreachable", f"{server.base_url} cannot be reached", sent=False)
    if isinstance(error, TimeoutError) or isinstance(cause, aiohttp.ServerTimeoutError | TimeoutError):
        return NoAnswerError("timeout", f"{server.base_url} did not answer in time", sent=True)
    name = type(cause or error).__name__
    return NoAnswerError("connection_lost", f"{server.base_url}: connection lost ({name})", sent=True)


def _answer(server: Server, response: httpx.Response) -> Answer:
    retry_after = parse_retry_after(response.headers.get("retry-after"), datetime.now(UTC))
    try:
        body: Any = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        body = None
    if isinstance(body, dict):
        result = body.get("result", body)
        if isinstance(result, dict):
            return Answer(response.status_code, result, retry_after)
    if response.status_code == 200:
        raise NoAnswerError(
            "invalid_body", f"{server.base_url} answered 200 with something that is no result", sent=True
        )
    return Answer(response.status_code, {"error": f"HTTP {response.status_code} without a JSON body"}, retry_after)
