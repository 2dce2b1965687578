"""One request, one outcome: the httpx client over aiohttp, and the sorting of what can happen to a request.

httpx's own connection pool collapses under concurrency, so the httpx API runs over aiohttp's. The API key lives in
:class:`ApiKey` and in the client's headers (whose repr hides it), and is taken out of every body before anything else
sees it, since some servers quote it back.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NoReturn
from urllib.parse import urlsplit

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from rayrl.errors import ConfigError
from rayrl.models.config import ModelConfig
from rayrl.models.retry import parse_retry_after

_HIDDEN = b"***"


class ApiKey:
    """The key of an endpoint: readable only through :meth:`header`; never shown, pickled or copied into text."""

    def __init__(self, value: str | None) -> None:
        self.__value = value

    @classmethod
    def from_env(cls, variable: str | None) -> ApiKey:
        """Read the variable named in the config.

        Raises:
            ConfigError: the variable is unset, empty, or no header value; the message names the variable only.
        """
        if variable is None:
            return cls(None)
        value = os.environ.get(variable, "").strip()
        if not value:
            raise ConfigError(f"model.api_key_env names {variable}, but that environment variable is not set")
        if not value.isascii() or not value.isprintable():
            raise ConfigError(f"the value of {variable} holds characters that no HTTP header can carry")
        return cls(value)

    def header(self) -> dict[str, str]:
        """The Authorization header, or none."""
        return {"authorization": f"Bearer {self.__value}"} if self.__value else {}

    def redact(self, body: bytes) -> bytes:
        """``body`` without the key."""
        return body.replace(self.__value.encode(), _HIDDEN) if self.__value and len(self.__value) > 3 else body

    def redact_text(self, text: str) -> str:
        """``text`` without the key."""
        return self.redact(text.encode("utf-8", "replace")).decode()

    def __repr__(self) -> str:
        return "ApiKey(***)" if self.__value else "ApiKey(none)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an API key is not pickled; each process reads its own from the environment")


@dataclass(frozen=True)
class Reply:
    """The endpoint answered with a status. ``broken`` says why the body is not whole."""

    status: int
    body: bytes
    retry_after_s: float | None = None
    broken: str | None = None


@dataclass(frozen=True)
class Fault:
    """No usable answer. ``retryable`` only where no completion can have been sampled and delivered."""

    code: str
    message: str
    retryable: bool = True


def is_loopback(url: str) -> bool:
    """Whether an address points at this machine."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_transport(*, trust_env: bool) -> AiohttpTransport:
    """httpx's transport API over aiohttp's connections, without httpx's client around it.

    Cookies, redirects, auth flows and the merging of client defaults are not wanted here, and cost as much as the
    request itself. Concurrency is bounded by the callers, not here. A request must carry its own headers, and time-outs
    in its ``extensions``.
    """

    def session() -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ttl_dns_cache=60)
        return aiohttp.ClientSession(connector=connector, trust_env=trust_env, cookie_jar=aiohttp.DummyCookieJar())

    return AiohttpTransport(client=session)


class Endpoint:
    """The chat-completions route of one model instance and the connections to it."""

    def __init__(self, config: ModelConfig, key: ApiKey) -> None:
        trust_env = config.trust_env
        if trust_env is None:
            trust_env = not is_loopback(config.base_url or "")
        self._transport = open_transport(trust_env=trust_env)
        self._url = httpx.URL(f"{config.base_url}/chat/completions")
        self._headers = httpx.Headers(
            {
                "content-type": "application/json",
                "accept": "application/json",
                # named, or aiohttp would offer what httpx may not be able to decode
                "accept-encoding": "gzip, deflate",
                **key.header(),
            }
        )
        timeouts = config.timeouts
        self._extensions = {"timeout": httpx.Timeout(timeouts.read_s, connect=timeouts.connect_s).as_dict()}

    async def post(self, body: bytes) -> httpx.Response:
        """Send a request; returns once the status is there, the body still to be read."""
        request = httpx.Request("POST", self._url, headers=self._headers, content=body, extensions=self._extensions)
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()


async def send_once(endpoint: Endpoint, body: bytes, key: ApiKey, until: float) -> Reply | Fault:
    """Send one request and sort what happens.

    Args:
        until: loop time at which the attempt is given up.

    A 200 whose body breaks off is a :class:`Reply` with ``broken`` set: the completion was sampled and is not asked for
    again. A 200 whose body stalls is a fault without retry. Everything before the status is a retryable fault.
    """
    response: httpx.Response | None = None
    try:
        async with asyncio.timeout_at(until):
            response = await endpoint.post(body)
            try:
                content = await response.aread()
            finally:
                await response.aclose()
    except (TimeoutError, httpx.TimeoutException) as error:
        # aiohttp's plain disconnects arrive here as ConnectTimeout; their cause tells them apart
        if response is None and isinstance(error.__cause__, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
            return Fault("network", f"connection lost: {type(error.__cause__).__name__}")
        if response is not None and response.is_success:
            return Fault("body_timeout", f"HTTP {response.status_code}, but the body never ended", retryable=False)
        return Fault("timeout", "the endpoint did not answer in time")
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.LocalProtocolError) as error:
        return Fault("bad_request_url", key.redact_text(f"{type(error).__name__}: {error}"), retryable=False)
    except (httpx.HTTPError, httpx.StreamError, aiohttp.ClientError, OSError) as error:
        text = key.redact_text(" ".join(f"{type(error).__name__}: {error}".split())[:300])
        if response is not None and response.is_success:
            return Reply(response.status_code, b"", broken=text)
        return Fault("network", text)
    return Reply(
        response.status_code,
        key.redact(content),
        parse_retry_after(response.headers.get("retry-after"), datetime.now(UTC)),
    )
