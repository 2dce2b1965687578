"""What changed between two Skills: files, and for text the lines and the sections they lie in."""

from __future__ import annotations

import difflib

from rayrl.schemas import Frozen
from rayrl.skills.markdown import headings
from rayrl.skills.snapshot import Taken


class FileChange(Frozen):
    """One file that differs. ``sections`` are references in the new file (the old one for removed files)."""

    path: str
    change: str
    """``added``, ``removed``, ``modified`` or ``mode``."""
    binary: bool = False
    diff: str = ""
    sections: list[str] = []


def diff_skills(a: Taken, b: Taken, *, max_lines: int = 2000) -> list[FileChange]:
    """Changes from ``a`` to ``b``, by path."""
    old = {entry.path: entry for entry in a.manifest.files}
    new = {entry.path: entry for entry in b.manifest.files}
    out = []
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) == new.get(path):
            continue
        if path in old and path in new and old[path].sha256 == new[path].sha256:
            out.append(FileChange(path=path, change="mode", diff=f"{old[path].mode} -> {new[path].mode}"))
            continue
        change = "added" if path not in old else "removed" if path not in new else "modified"
        before, after = a.files.get(path, b""), b.files.get(path, b"")
        try:
            texts = before.decode("utf-8"), after.decode("utf-8")
        except UnicodeDecodeError:
            out.append(FileChange(path=path, change=change, binary=True))
            continue
        out.append(_text_change(path, change, *texts, max_lines=max_lines))
    return out


def _text_change(path: str, change: str, before: str, after: str, *, max_lines: int) -> FileChange:
    left, right = before.splitlines(keepends=True), after.splitlines(keepends=True)
    lines = list(difflib.unified_diff(left, right, f"a/{path}", f"b/{path}"))
    shown = "".join(line if line.endswith("\n") else line + "\n" for line in lines[:max_lines])
    if len(lines) > max_lines:
        shown += f"... {len(lines) - max_lines} more lines\n"
    touched: set[int] = set()
    for tag, _, _, start, end in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag != "equal":
            touched |= set(range(start + 1, max(end, start + 1) + 1))
    text = after if change != "removed" else before
    if change == "removed":
        touched = set(range(1, len(left) + 1))
    sections = []
    if path.endswith(".md"):
        known = headings(text)
        for line in sorted(touched):
            inner = [h for h in known if h.start <= line <= h.end]
            if inner:
                sections.append(f"{path}#{max(inner, key=lambda h: h.start).slug}")
    return FileChange(path=path, change=change, diff=shown, sections=list(dict.fromkeys(sections)))
