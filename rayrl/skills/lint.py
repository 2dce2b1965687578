"""Lenient lint of an Agent Skills folder: whatever can be loaded is loaded, and what is odd is said.

Levels: ``warning`` for what some reader of Skills will trip over, ``error`` for what keeps the Skill from being used.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from rayrl.schemas import Frozen
from rayrl.skills.markdown import headings, split_front_matter

KNOWN_KEYS = {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
NAME = re.compile(r"^[a-z0-9]+(-[a-z0-9]+)*$")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


class Finding(Frozen):
    """One remark about a Skill."""

    level: str
    code: str
    path: str
    message: str


def front_matter(text: str) -> tuple[dict[str, Any], list[Finding]]:
    """The front matter as text values (``yes`` stays ``yes``), read leniently.

    PyYAML's base loader keeps every scalar as text. A description with an unquoted colon is no YAML; it is then read
    line by line as ``key: rest``.
    """
    found: list[Finding] = []
    if text.startswith("\ufeff"):
        found.append(_warning("bom", "SKILL.md starts with a byte order mark"))
    if "\r\n" in text:
        found.append(_warning("crlf", "SKILL.md has Windows line ends"))
    raw, _, _ = split_front_matter(text)
    if raw is None:
        return {}, [
            *found,
            _warning("no_front_matter", "SKILL.md has no YAML front matter; name and description are unknown"),
        ]
    try:
        value = yaml.load(raw, Loader=yaml.BaseLoader)  # noqa: S506 - the base loader builds nothing but text
    except (yaml.YAMLError, RecursionError, ValueError):
        value = {}
        for line in raw.splitlines():
            key, separator, rest = line.partition(":")
            if separator and re.fullmatch(r"[A-Za-z][\w-]*", key):
                value[key] = rest.strip().strip("\"'")
        found.append(
            _warning("front_matter_yaml", "the front matter is no valid YAML (an unquoted colon?); read line by line")
        )
    if not isinstance(value, dict):
        return {}, [*found, _warning("front_matter_shape", "the front matter is no mapping of keys to values")]
    return {str(key): item for key, item in value.items()}, found


def lint(files: dict[str, bytes], folder: str) -> list[Finding]:
    """Findings about a Skill's files (path to content) in a folder of this name."""
    if "SKILL.md" not in files:
        near = next((path for path in files if path.lower().endswith("skill.md")), None)
        hint = f"; there is {near}" if near else ""
        return [Finding(level="error", code="no_skill_md", path="SKILL.md", message=f"there is no SKILL.md{hint}")]
    try:
        text = files["SKILL.md"].decode("utf-8")
        found: list[Finding] = []
    except UnicodeDecodeError as error:
        text = files["SKILL.md"].decode("utf-8", "replace")
        found = [_warning("not_utf8", f"SKILL.md is not UTF-8 at byte {error.start}")]
    meta, more = front_matter(text)
    found += more + _meta(meta, folder)
    lines = text.splitlines()
    if len(lines) > 500:
        found.append(_warning("long", f"SKILL.md has {len(lines)} lines; 500 is a sensible most"))
    slugs = {path: {h.slug for h in headings(_text(data))} for path, data in files.items() if path.endswith(".md")}
    for path, data in files.items():
        if path.endswith(".md"):
            found += _links(path, _text(data), files, slugs)
        if data.startswith(b"version https://git-lfs"):
            found.append(
                Finding(level="warning", code="lfs_pointer", path=path, message="is a Git LFS pointer, not the file")
            )
        if path.rsplit("/", 1)[-1] in (".DS_Store", "Thumbs.db") or "__pycache__/" in path:
            found.append(Finding(level="warning", code="litter", path=path, message="is a left-over of a tool"))
    return found


def _meta(meta: dict[str, Any], folder: str) -> list[Finding]:
    found = []
    name, description = meta.get("name"), meta.get("description")
    if not isinstance(name, str) or not name:
        found.append(_warning("no_name", "the front matter has no name; the folder's is used"))
    else:
        if name != folder:
            found.append(_warning("name_folder", f"the name {name!r} is not the folder's, {folder!r}"))
        if not NAME.match(name) or len(name) > 64:
            found.append(
                _warning("name_form", f"the name {name[:80]!r} is not lower-case words with dashes, 64 at most")
            )
    if not isinstance(description, str) or not description.strip():
        found.append(_warning("no_description", "the front matter has no description"))
    elif len(description) > 1024:
        found.append(_warning("long_description", f"the description has {len(description)} characters; 1024 at most"))
    for key in sorted(set(meta) - KNOWN_KEYS):
        found.append(_warning("unknown_key", f"the front matter has the unknown key {key!r}"))
    return found


def _links(path: str, text: str, files: dict[str, bytes], slugs: dict[str, set[str]]) -> list[Finding]:
    found = []
    folder = path.rsplit("/", 1)[0] + "/" if "/" in path else ""
    for target in _LINK.findall(text):
        if "://" in target or target.startswith(("#", "mailto:", "/")):
            continue
        name, _, anchor = target.partition("#")
        known = next((p for p in (_normal(folder + name), _normal(name)) if p in files), None)
        if known is None and not any(p.startswith(_normal(folder + name).rstrip("/") + "/") for p in files):
            found.append(
                Finding(
                    level="warning",
                    code="dead_link",
                    path=path,
                    message=f"links to {target[:200]!r}, which is not in the Skill",
                )
            )
        elif known is not None and anchor and known in slugs and anchor not in slugs[known]:
            found.append(
                Finding(
                    level="warning",
                    code="dead_anchor",
                    path=path,
                    message=f"links to {target[:200]!r}; {known} has no such heading",
                )
            )
    return found


def _normal(path: str) -> str:
    out: list[str] = []
    for part in path.split("/"):
        if part == "..":
            if out:
                out.pop()
        elif part not in ("", "."):
            out.append(part)
    return "/".join(out)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _warning(code: str, message: str) -> Finding:
    return Finding(level="warning", code=code, path="SKILL.md", message=message)
