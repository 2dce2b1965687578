"""Markdown of Skills: stable references for headings, sections of text, and safe HTML.

Headings are found by a CommonMark parser, since a regular expression takes ``#`` in code for one. A reference is
``path#slug`` (slug as on GitHub: lower case, spaces to dashes, letters of every script kept, repeated ones get ``-1``)
or ``path#L10-L24``.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import nh3
from markdown_it import MarkdownIt

_LINES = re.compile(r"^L(\d{1,7})(?:-L?(\d{1,7}))?$")
MAX_RENDERED = 2_000_000


@dataclass(frozen=True)
class Heading:
    """One heading; its section spans lines ``start`` to ``end`` (from 1, inclusive) up to the next of its rank."""

    slug: str
    title: str
    level: int
    start: int
    end: int


def split_front_matter(text: str) -> tuple[str | None, str, int]:
    """Front matter (or ``None``), body, and the number of lines before the body. Tolerates a BOM and CRLF.

    Only a ``---`` in the very first line opens it; a ``---`` later in the body is a rule.
    """
    text = text.removeprefix("\ufeff")
    lines = text.splitlines(keepends=True)
    if not lines or lines[0].rstrip() != "---":
        return None, text, 0
    for index, line in enumerate(lines[1:], 1):
        if line.rstrip() in ("---", "..."):
            return "".join(lines[1:index]), "".join(lines[index + 1 :]), index + 1
    return None, text, 0


def slug(title: str) -> str:
    """GitHub's slug of a heading."""
    kept = "".join(c for c in title.strip().lower() if c in "-_ " or unicodedata.category(c)[0] in "LNM")
    return kept.replace(" ", "-")


@lru_cache(maxsize=512)
def headings(text: str) -> tuple[Heading, ...]:
    """Every heading with its slug and section, line numbers as in the file."""
    _, body, offset = split_front_matter(text)
    tokens = MarkdownIt("commonmark").parse(body)
    total = offset + len(body.splitlines())
    found: list[tuple[str, str, int, int]] = []
    used: dict[str, int] = {}
    for token, inline in pairwise(tokens):
        if token.type != "heading_open" or token.map is None:
            continue
        children = inline.children or []
        title = "".join(c.content for c in children if c.type in ("text", "code_inline")) or inline.content
        name = base = slug(title)
        while name in used:
            used[base] += 1
            name = f"{base}-{used[base]}"
        used[name] = 0
        found.append((name, title, int(token.tag[1]), offset + token.map[0] + 1))
    out = []
    for index, (name, title, level, start) in enumerate(found):
        end = next((later[3] - 1 for later in found[index + 1 :] if later[2] <= level), total)
        out.append(Heading(name, title, level, start, end))
    return tuple(out)


@dataclass(frozen=True)
class Passage:
    """A resolved reference: which lines of which file."""

    path: str
    section: str | None
    start: int
    end: int


def find_section(text: str, section: str) -> Heading | None:
    """The heading a section name means: its slug, else its title (compared loosely)."""
    wanted = section.strip().lstrip("#").strip()
    known = headings(text)
    for heading in known:
        if heading.slug == wanted:
            return heading
    loose = slug(unicodedata.normalize("NFKC", wanted))
    return next((h for h in known if loose and slug(unicodedata.normalize("NFKC", h.title)) == loose), None)


def resolve(path: str, text: str, anchor: str | None) -> Passage | None:
    """Lines a reference names, ``None`` where there is nothing of that name."""
    total = len(text.splitlines())
    if not anchor:
        return Passage(path, None, 1, total)
    if found := _LINES.match(anchor):
        start, end = int(found[1]), int(found[2] or found[1])
        return Passage(path, anchor, start, end) if 1 <= start <= end <= total else None
    heading = find_section(text, anchor)
    return Passage(path, heading.slug, heading.start, heading.end) if heading else None


def lines_of(text: str, start: int, end: int) -> str:
    """Lines ``start`` to ``end``, from 1, inclusive."""
    return "".join(text.splitlines(keepends=True)[start - 1 : end])


def render(text: str) -> str:
    """Safe HTML of Markdown: raw HTML is shown as text, and what remains goes through a sanitiser."""
    _, body, _ = split_front_matter(text)
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(body[:MAX_RENDERED])
    return nh3.clean(html, url_schemes={"http", "https", "mailto"}, link_rel="noopener noreferrer nofollow")
