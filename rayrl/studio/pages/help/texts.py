"""Help texts: Markdown to HTML in which no HTML of the source survives, and the documentation as it was installed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

import rayrl
from rayrl.errors import ConfigError
from rayrl.skills.markdown import slug
from rayrl.workbench.store import MissingError

CONTENT = Path(__file__).parent / "content"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")
FIRST = ("rollouts", "evaluation", "training", "skills", "workbench", "studio")
"""Pages of the documentation that the list begins with."""


@dataclass(frozen=True)
class Entry:
    """A term or a question."""

    anchor: str
    title: str
    html: Markup


@lru_cache(maxsize=16)
def entries(name: str, language: str) -> tuple[Entry, ...]:
    """Entries of ``glossary`` or ``faq``, in the order of their file."""
    raw = yaml.safe_load((CONTENT / language / f"{name}.yaml").read_text(encoding="utf-8"))
    return tuple(Entry(anchor, item["title"], render(item["text"])) for anchor, item in raw.items())


@lru_cache(maxsize=4)
def overview(language: str) -> Markup:
    """The overview."""
    return render((CONTENT / language / "overview.md").read_text(encoding="utf-8"))


def docs_folder() -> Path | None:
    """Where the documentation lies: in the installed package, or beside it in a checkout."""
    package = Path(rayrl.__file__).parent
    return next((f for f in (package / "_docs", package.parent / "docs") if (f / "training.md").is_file()), None)


def doc_titles() -> list[tuple[str, str]]:
    """``(name, title)`` of every page of the documentation."""
    folder = docs_folder()
    if folder is None:
        return []
    found = {path.stem: _title(path) for path in folder.glob("*.md") if _NAME.match(path.stem)}
    order = [name for name in FIRST if name in found] + [name for name in sorted(found) if name not in FIRST]
    return [(name, found[name]) for name in order]


def _title(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        line = file.readline()
    return line.lstrip("# ").strip() or path.stem


def doc(name: str) -> Markup:
    """A page of the documentation.

    Raises:
        MissingError: there is none of this name.
    """
    return render(_inside(f"{name}.md").read_text(encoding="utf-8", errors="replace"))


def figure(name: str) -> Path:
    """A figure of the documentation.

    Raises:
        MissingError: there is none of this name.
    """
    folder, _, last = name.rpartition("/")
    if not last.endswith((".svg", ".png")) or (folder and not _NAME.match(folder)):
        raise MissingError(f"there is no figure {name[:100]!r}")
    return _inside(last, "figures", *([folder] if folder else []))


def _inside(name: str, *parts: str) -> Path:
    folder = docs_folder()
    if folder is not None and _NAME.match(name):
        path = folder.joinpath(*parts, name)
        if path.is_file():
            return path
    raise MissingError(f"there is no page {name[:100]!r} in the documentation")


def render(text: str) -> Markup:
    """Markdown as HTML: HTML in it is shown as text, links stay within the help or lead to http addresses."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    seen: dict[str, int] = {}
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            anchor = slug(tokens[at + 1].content) or "section"
            seen[anchor] = seen.get(anchor, 0) + 1
            token.attrSet("id", anchor if seen[anchor] == 1 else f"{anchor}-{seen[anchor] - 1}")
        if token.type in ("fence", "code_block"):
            token.attrSet("tabindex", "0")
        for child in token.children or []:
            _relink(child)
    return Markup(parser.renderer.render(tokens, parser.options, {}))


def _relink(token: Token) -> None:
    key = {"link_open": "href", "image": "src"}.get(token.type)
    if key is None:
        return
    address: Any = token.attrGet(key) or ""
    found = re.fullmatch(r"(?:\./)?([A-Za-z0-9_.-]+)\.md(#.*)?", str(address))
    picture = re.fullmatch(r"(?:\./)?figures/((?:[A-Za-z0-9_-]+/)?[A-Za-z0-9_.-]+)", str(address))
    if picture:
        token.attrSet(key, f"/help/figures/{picture[1]}")
    elif found and key == "href":
        token.attrSet(key, f"/help/docs/{found[1]}{found[2] or ''}")
    elif key == "src":
        token.attrs.pop(key, None)  # nothing is loaded from elsewhere
    elif not str(address).startswith(("http://", "https://", "#", "/")) or str(address).startswith("//"):
        token.attrs.pop(key, None)  # a file of the repository: not served here


def check_installed() -> None:
    """Raise :class:`ConfigError` where the documentation is not installed."""
    if docs_folder() is None:
        raise ConfigError("the documentation is not installed with this package; it lies in docs/ of the repository")
