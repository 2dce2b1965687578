"""What all pages share: sections and navigation, the template environment, language and theme, static files, errors."""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlencode

import jinja2
from fastapi import APIRouter, FastAPI, Form, Request
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from markupsafe import Markup

from rayrl import __version__
from rayrl.studio.context import Context, context_of
from rayrl.studio.pages import format as formats
from rayrl.studio.pages.charts import plotly_script
from rayrl.studio.pages.language import LANGUAGES, Translate, negotiate, translator
from rayrl.studio.pages.places import UnknownError
from rayrl.studio.pages.texts import unified_lines, word_diff
from rayrl.studio.security import COOKIE, SIGN_IN
from rayrl.workbench.store import MissingError

NAMES = ("workbench", "runs", "training", "arena", "skills", "help")
THEMES = ("auto", "light", "dark")
HERE = Path(__file__).parent
STATIC = {
    "studio.css": "text/css; charset=utf-8",
    "noscript.css": "text/css; charset=utf-8",
    "studio.js": "text/javascript; charset=utf-8",
}
YEAR = 365 * 24 * 3600
shared = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class Section:
    """An entry of the navigation and the routes behind it."""

    name: str
    """One of :data:`NAMES`; its label is the message ``shell.nav.NAME``."""
    href: str
    router: APIRouter
    badge: Callable[[Context], int] | None = None
    """A small number beside the label (things at work), 0 shows none. Must be cheap: it is called for every page."""


@lru_cache(maxsize=1)
def sections() -> tuple[Section, ...]:
    """The sections that are there, in the order of the navigation."""
    out = []
    for name in NAMES:
        spec = find_spec(f"rayrl.studio.pages.{name}")
        if spec is not None and spec.origin is not None:  # a folder without __init__.py is no section yet
            found: Section = import_module(f"rayrl.studio.pages.{name}").SECTION
            out.append(found)
    return tuple(out)


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """The templates; everything is escaped, an undefined name is an error."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= formats.FILTERS
    made.filters |= {name: _in_language(made_by) for name, made_by in formats.SPANS.items()}
    made.filters["pretty"] = lambda value: json.dumps(value, ensure_ascii=False, indent=1, default=str)
    made.filters["compact"] = lambda value: json.dumps(value, ensure_ascii=False, default=str)
    made.filters["unquoted"] = unquote
    made.filters["chart_json"] = _script_json
    made.globals |= {
        "word_diff": word_diff,
        "unified_lines": unified_lines,
        "version": __version__,
        "fresh_key": fresh_key,
    }
    return made


def fresh_key() -> str:
    """For a hidden field ``once``: what a form makes, it makes once, however often it is sent."""
    return secrets.token_urlsafe(16)


def _script_json(value: Any) -> Markup:
    """JSON for a script element: no character in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def language_of(request: Request) -> str:
    """The language of the answer."""
    return negotiate(
        request.query_params.get("lang"), request.cookies.get("rayrl_lang"), request.headers.get("accept-language", "")
    )


def texts(request: Request) -> Translate:
    """The messages in the language of the request."""
    return translator(language_of(request))


def theme_of(request: Request) -> str:
    """``light``, ``dark`` or ``auto`` (as the browser prefers)."""
    for choice in (request.query_params.get("theme"), request.cookies.get("rayrl_theme")):
        if choice in THEMES:
            return choice
    return "auto"


def url_with(request: Request, **changes: Any) -> str:
    """The present URL with parts of its query exchanged; ``None`` removes one. Path and query only."""
    kept = [
        (k, v) for k, v in request.query_params.multi_items() if k not in changes and k not in ("lang", "theme", "note")
    ]
    kept += [(k, str(v)) for k, v in changes.items() if v is not None]
    return request.url.path + (f"?{urlencode(kept)}" if kept else "")


def _in_language(made_by: Callable[..., str]) -> Callable[..., str]:
    """A filter that is told the language of the page it is used on."""

    @jinja2.pass_context
    def in_language(context: jinja2.runtime.Context, *values: Any, **more: Any) -> str:
        return made_by(*values, **more, lang=context.get("lang", "en"))

    return in_language


def page(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """A page from a template of the pages' folder, in the request's language and theme."""
    language, theme, t = language_of(request), theme_of(request), texts(request)
    ctx = context_of(request)
    at = request.url.path
    nav = [
        {
            "name": section.name,
            "href": section.href,
            "label": t(f"shell.nav.{section.name}"),
            "current": at == section.href or at.startswith(f"{section.href}/"),
            "badge": section.badge(ctx) if section.badge else 0,
        }
        for section in sections()
    ]
    values = {
        "t": t,
        "lang": language,
        "languages": LANGUAGES,
        "theme": theme,
        "nav": nav,
        "request": request,
        "here": lambda **changes: url_with(request, **changes),
        # only known notes are shown: the text is ours, not the URL's
        "note": note_text(t, at.split("/")[1], request.query_params.get("note", "")),
        **values,
    }
    html = environment().get_template(template).render(values)
    response = HTMLResponse(html, status_code=status, headers={"cache-control": "no-store"})
    for name, choice in (("lang", language), ("theme", theme)):
        if request.query_params.get(name) == choice:
            response.set_cookie(f"rayrl_{name}", choice, max_age=YEAR, samesite="lax", path="/", httponly=True)
    return response


def note_text(t: Translate, section: str, name: str) -> str:
    """The text of a note, empty for one that is not known."""
    text = t(f"{section}.notes.{name}") if name else ""
    return "" if text == name else text


def back(url: str, note: str | None = None) -> RedirectResponse:
    """After a form: on to a page, with one of the notes ``SECTION.notes.*``."""
    if note:
        path, hash_, anchor = url.partition("#")
        url = f"{path}{'&' if '?' in path else '?'}note={note}{hash_}{anchor}"
    return RedirectResponse(url, status_code=303)


def wants_page(request: Request) -> bool:
    """Whether an error goes to a browser and not to a caller of the API."""
    return not request.url.path.startswith("/api") and "text/html" in request.headers.get("accept", "")


def in_words(request: Request, error: Exception) -> str:
    """What an error says, in the reader's language where it has a message there."""
    return texts(request)(error.key, **error.places) if isinstance(error, UnknownError) else str(error)


def error_page(request: Request, status: int, message: str, kind: str = "") -> HTMLResponse:
    """What went wrong, as a page. What the framework says about addresses is put in plain words."""
    if kind == "Invalid" and request.method == "GET":
        message = texts(request)("shell.error.bad_address")
    elif kind == "Http" and status in (404, 405):
        message = texts(request)("shell.error.no_page")
    first = request.url.path.split("/")[1]
    lists = {section.name: section.href for section in sections()}
    values = {"message": message, "section": first if first in lists else "", "section_href": lists.get(first, "/")}
    return page(request, "error.html", status=status, code=status, **values)


@shared.get("/")
def start() -> Response:
    """The first section."""
    return RedirectResponse(sections()[0].href, status_code=307)


@shared.get("/static/{name}")
def static(name: str) -> Response:
    """Our style sheet, our script, and plotly's as it was installed."""
    if name == "plotly.min.js":
        path, media_type = plotly_script(), "text/javascript; charset=utf-8"
    elif name in STATIC:
        path, media_type = HERE / "static" / name, STATIC[name]
    else:
        raise MissingError(f"there is no static file {name[:100]!r}")
    return FileResponse(path, media_type=media_type, headers={"cache-control": "no-cache"})


@shared.get("/favicon.ico")
def icon() -> Response:
    """No picture."""
    return Response(status_code=204)


@shared.get(SIGN_IN)
def sign_in(request: Request) -> Response:
    """Where a browser without the token is led."""
    return page(request, "sign_in.html", failed=False)


@shared.post(SIGN_IN)
def signed_in(request: Request, token: Annotated[str, Form(max_length=1000)]) -> Response:
    """Keep the token in a cookie no script can read."""
    wanted = request.app.state.token or ""
    if not wanted or not hmac.compare_digest(token.strip().encode(), wanted.encode()):
        return page(request, "sign_in.html", status=401, failed=True)
    answer = RedirectResponse("/", status_code=303)
    secure = request.url.scheme == "https"
    answer.set_cookie(COOKIE, wanted, max_age=30 * 24 * 3600, httponly=True, samesite="lax", secure=secure)
    return answer


@lru_cache(maxsize=1)
def warm() -> threading.Thread:
    """Compiles the templates and reads the messages, once per process; who serves pages waits for it."""

    def work() -> None:
        for name in ("ui.html", "base.html", *environment().list_templates(extensions=["html"])):
            environment().get_template(name)

    for language in LANGUAGES:
        translator(language)
    thread = threading.Thread(target=work, name="templates", daemon=True)
    thread.start()
    return thread


def include(app: FastAPI) -> None:
    """Add the pages to the application."""
    warm()
    app.include_router(shared)
    for section in sections():
        app.include_router(section.router)
