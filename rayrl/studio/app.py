"""The application: routes, errors as JSON or as pages, the guard in front, the supervisor behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from rayrl import __version__
from rayrl.errors import ConfigError, DataError, RunConflictError, UserError
from rayrl.studio import api_data, api_experiments, api_sessions
from rayrl.studio.config import StudioConfig
from rayrl.studio.context import Context
from rayrl.studio.pages import shell
from rayrl.studio.responses import ErrorAnswer
from rayrl.studio.security import Guard
from rayrl.workbench.launcher import Supervisor
from rayrl.workbench.reviews import StaleReviewError
from rayrl.workbench.store import MissingError
from rayrl.workbench.workbench import Workbench

STATUS: list[tuple[type[Exception], int]] = [
    (MissingError, 404),
    (StaleReviewError, 412),
    (RunConflictError, 409),
    (DataError, 422),
    (ConfigError, 422),
    (UserError, 422),
]
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorAnswer, "description": text}
    for code, text in (
        (400, "The body is no JSON"),
        (401, "A token is needed"),
        (403, "Another origin"),
        (404, "Not there"),
        (409, "Not possible in this state"),
        (412, "Somebody else was faster"),
        (413, "Too large"),
        (421, "Unknown host name"),
        (422, "Not valid; the message names the field or row"),
    )
}


def create_app(
    bench: Workbench,
    config: StudioConfig,
    *,
    supervisor: Supervisor | None = None,
    token: str | None = None,
    gate: Any = None,
) -> FastAPI:
    """The application over an open workbench.

    Raises:
        ConfigError: bound beyond loopback without a token.
    """
    if not config.loopback and not token:
        raise ConfigError(
            f"host {config.host!r} can be reached from other machines; set a token in ${config.token_env} first"
        )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(shell.warm().join)  # else the first page would compete with it
        if supervisor is not None:
            supervisor.start()
        yield
        await app.state.context.sessions.aclose()
        if supervisor is not None:
            supervisor.stop()

    app = FastAPI(
        title="rayrl studio",
        version=__version__,
        summary="Skill evaluation workbench",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        responses=ERRORS,
    )
    app.state.context = Context(bench, config, supervisor, gate=gate)
    for router in (api_data.router, api_data.models, api_sessions.router, api_experiments.router):
        app.include_router(router)

    @app.get("/api/health", tags=["service"])
    def health() -> dict[str, str]:
        """Whether the application answers."""
        return {"status": "ok", "version": __version__}

    app.state.token = token
    shell.include(app)
    _errors(app)
    app.add_middleware(Guard, config=config, token=token)
    return app


def _errors(app: FastAPI) -> None:
    async def user_error(request: Request, error: Exception) -> Response:
        status = next(code for kind, code in STATUS if isinstance(error, kind))
        text = shell.in_words(request, error) if shell.wants_page(request) else str(error)
        return _body(request, status, type(error).__name__, text)

    async def invalid(request: Request, error: Exception) -> Response:
        details = error.errors() if isinstance(error, RequestValidationError) else []
        found = [
            {"field": ".".join(str(part) for part in item["loc"]), "message": str(item["msg"])} for item in details[:50]
        ]
        text = "; ".join(f"{item['field']}: {item['message']}" for item in found[:5])
        broken = any(item["type"] == "json_invalid" for item in details)
        if details and all(item["loc"][:1] == ("path",) for item in details) and shell.wants_page(request):
            return _body(request, 404, "Invalid", text, found)  # an id of another form names nothing either
        return _body(request, 400 if broken else 422, "Invalid", text, found)

    async def http_error(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
        if status == 405 and request.method == "GET" and shell.wants_page(request):
            status, headers = 404, {}  # whoever looks at a page needs not know that a form could be sent there
        return _body(request, status, "Http", str(getattr(error, "detail", error)), headers=headers)

    async def unusable(request: Request, error: Exception) -> Response:
        # half surrogates, numbers beyond 64 bits, nesting without end: text that no database or parser takes
        return _body(request, 422, "Invalid", f"a value cannot be stored ({type(error).__name__})")

    app.add_exception_handler(UserError, user_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    for kind in (UnicodeError, OverflowError, RecursionError):
        app.add_exception_handler(kind, unusable)


def _body(
    request: Request,
    status: int,
    kind: str,
    message: str,
    detail: Any = None,
    headers: dict[str, str] | None = None,
) -> Response:
    shown = message.encode("utf-8", "replace").decode()
    if shell.wants_page(request):
        return shell.error_page(request, status, shown, kind)
    content = {"error": {"type": kind, "message": shown, "detail": detail}}
    return JSONResponse(content, status_code=status, headers=headers)
