"""The guard in front of the application, as plain ASGI so that streams pass through it unbuffered.

* Host must be a loopback name or a configured one (against DNS rebinding);
* a request that changes something must come from our own origin, if it says where it comes from;
* with a token set, every request needs it, as ``Authorization: Bearer`` or in the cookie ``rayrl_token``; browsers
  without one are led to the page that asks for it;
* bodies are bounded while they arrive; answers carry a content security policy that allows our own scripts only. Style
  attributes are allowed: the charts set them, and no text from outside becomes one. The referrer stays within our
  origin, without which browsers would not say where a form comes from.
"""

from __future__ import annotations

import hmac
import html
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

import orjson

from rayrl.studio.config import StudioConfig, is_loopback

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
]
SAFE = {"GET", "HEAD", "OPTIONS"}
COOKIE = "rayrl_token"
SMALL = 4 * 1024 * 1024
SIGN_IN = "/sign-in"
OPEN = (SIGN_IN, "/static/studio.css", "/static/studio.js")
"""Paths that need no token."""


class _TooLargeError(Exception):
    pass


class Guard:
    """See the module docstring."""

    def __init__(self, app: App, *, config: StudioConfig, token: str | None) -> None:
        self.app = app
        self.token = token
        self.hosts = set(config.allowed_hosts) | {config.host}
        self.max_upload = config.max_upload_mb * 1024 * 1024 + 64 * 1024

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no web sockets here; the server closes it
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        browser = "text/html" in headers.get("accept", "") and not scope["path"].startswith("/api")
        refusal = self._refusal(scope["method"], scope["path"], headers)
        if refusal is not None:
            await _answer(send, *refusal, browser=browser)
            return
        uploads = scope["path"].rstrip("/").endswith("/datasets") and scope["method"] == "POST"
        limit = self.max_upload if uploads else SMALL
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            await _answer(send, 413, f"the body has more than {limit // 1024 // 1024} MB", browser=browser)
            return
        started, received = False, 0

        async def guarded_send(message: Message) -> None:
            nonlocal started
            if received > limit and not started:
                return  # whatever the framework makes of a body that was cut off
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", []), *HEADERS]
            await send(message)

        async def guarded_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _TooLargeError
            return message

        with suppress(_TooLargeError):
            await self.app(scope, guarded_receive, guarded_send)
        if received > limit and not started:
            await _answer(send, 413, f"the body has more than {limit // 1024 // 1024} MB", browser=browser)

    def _refusal(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        host = headers.get("host", "")
        name = urlsplit(f"//{host}").hostname if _plausible(host) else None
        if name is None or not (is_loopback(name) or name in self.hosts):
            return 421, "this host name is not served here; add it to allowed_hosts"
        if method not in SAFE:
            origin = headers.get("origin")
            if origin is not None and origin != "null" and urlsplit(origin).netloc != host:
                return 403, "the request comes from another origin"
            if origin == "null" or headers.get("sec-fetch-site") in ("cross-site", "same-site"):
                return 403, "the request comes from another site"
        if self.token is not None and path not in OPEN and not self._has_token(headers):
            return 401, "a token is needed: Authorization: Bearer TOKEN"
        return None

    def _has_token(self, headers: dict[str, str]) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            try:
                morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
            except CookieError:
                morsel = None
            given = morsel.value if morsel is not None else ""
        return hmac.compare_digest(given.strip().encode(), (self.token or "").encode())


def _plausible(host: str) -> bool:
    try:
        urlsplit(f"//{host}").port  # noqa: B018 - raises for a bad port
    except ValueError:
        return False
    return bool(host)


async def _answer(send: Send, status: int, message: str, *, browser: bool = False) -> None:
    if browser and status == 401:
        headers = [(b"location", SIGN_IN.encode()), (b"content-length", b"0"), *HEADERS]
        await send({"type": "http.response.start", "status": 303, "headers": headers})
        await send({"type": "http.response.body", "body": b""})
        return
    if browser:
        text = f"<!doctype html><html lang=en><title>{status}</title><link rel=stylesheet href=/static/studio.css>"
        body = (
            f"{text}<main><h1>{status}</h1><p>{html.escape(message)}</p><p><a href=/>rayrl studio</a></main>".encode()
        )
    else:
        body = orjson.dumps({"error": {"type": "Refused", "message": message}})
    kind = b"text/html; charset=utf-8" if browser else b"application/json"
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *HEADERS]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
