"""Routes of the section Help."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import FileResponse

from rayrl.studio.pages.help import texts as of
from rayrl.studio.pages.shell import language_of, page
from rayrl.workbench.store import MissingError

router = APIRouter(include_in_schema=False)
Name = Annotated[str, Path(max_length=100)]


@router.get("/help")
def overview(request: Request) -> Response:
    """What this is, and where to find what."""
    html = of.overview(language_of(request))
    return page(request, "help/overview.html", html=html, docs=of.doc_titles(), current="overview")


@router.get("/help/{name}")
def entries(request: Request, name: Name) -> Response:
    """The glossary or the questions."""
    if name not in ("glossary", "faq"):
        raise MissingError(f"the help has no page {name[:100]!r}")
    found = of.entries(name, language_of(request))
    return page(request, "help/entries.html", entries=found, docs=of.doc_titles(), current=name)


@router.get("/help/docs/{name}")
def doc(request: Request, name: Name) -> Response:
    """A page of the documentation."""
    of.check_installed()
    html = of.doc(name)
    return page(request, "help/doc.html", html=html, name=name, docs=of.doc_titles(), current="docs")


@router.get("/help/figures/{name:path}")
def figure(name: Name) -> Response:
    """A figure of the documentation."""
    path = of.figure(name)
    kind = "image/svg+xml" if path.suffix == ".svg" else "image/png"
    return FileResponse(path, media_type=kind)
