"""Differences of texts, as segments a template can escape one by one."""

from __future__ import annotations

import difflib
import re
from typing import Literal

Segment = tuple[Literal["same", "del", "ins"], str]
_TOKEN = re.compile(r"[A-Za-z0-9_]+|\s+|.", re.DOTALL)
MAX_TOKENS = 2000


def word_diff(before: str, after: str) -> list[Segment]:
    """What turned ``before`` into ``after``: words in Latin script, single characters otherwise.

    Texts of more than 2,000 tokens are shown as replaced as a whole: the comparison is quadratic.
    """
    left, right = _TOKEN.findall(before), _TOKEN.findall(after)
    if before == after:
        return [("same", before)] if before else []
    if max(len(left), len(right)) > MAX_TOKENS:
        return [("del", before), ("ins", after)]
    out: list[Segment] = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag == "equal":
            out.append(("same", "".join(left[a:b])))
            continue
        if a < b:
            out.append(("del", "".join(left[a:b])))
        if c < d:
            out.append(("ins", "".join(right[c:d])))
    return out


def unified_lines(diff: str) -> list[tuple[str, str]]:
    """Lines of a unified diff with their kind: ``head``, ``hunk``, ``ins``, ``del`` or ``same``."""
    out = []
    for line in diff.splitlines():
        if line.startswith(("+++", "---")):
            kind = "head"
        elif line.startswith("@@"):
            kind = "hunk"
        else:
            kind = {"+": "ins", "-": "del"}.get(line[:1], "same")
        out.append((kind, line))
    return out
