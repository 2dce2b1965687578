"""What readers of files and the environment say in English, in the language of a page; anything unknown stays as it is.

Those texts are kept in stores and traces, so they are recognised here rather than written in two languages there.
"""

from __future__ import annotations

import re

from rayrl.studio.pages.language import Translate

KNOWN = {
    "line": r"line (?P<n>\d+)",
    "gb18030": r"the file is not UTF-8; it was read as GB18030\. Look at the preview, and choose another if it is odd",
    "large_integer": r"line (?P<n>\d+): the integer (?P<value>\S+) is above 2\^53; spreadsheets would round it",
    "rounded": r"cell (?P<cell>.+): the integer (?P<value>.+) is above 2\^53; Excel has rounded it\. Store ids as text",
    "hidden_sheets": r"there are hidden sheets: (?P<names>.+)",
    "merged": r"(?P<n>\d+) merged ranges \((?P<ranges>.+)\): only their first cell has the value",
    "no_header": r"cell (?P<cell>\w+) has a value, but column (?P<column>\w+) has no header",
    "header": r"column (?P<n>\d+): the header (?P<given>.*) is empty or occurs twice; named (?P<named>.+)",
    "fields": r"(?P<n>\d+) fields, but the header has (?P<of>\d+); a value with a delimiter or line break needs quotes",
    "recorded": r"The verdict was recorded\.",
    "without_verdict": r"The case ended without a verdict\.",
}
"""Message ``workbench.said.KEY`` with the named groups in its places."""
_PATTERNS = {key: re.compile(pattern, re.DOTALL) for key, pattern in KNOWN.items()}


def said(t: Translate, text: str) -> str:
    """The text in the language of ``t``."""
    for key, pattern in _PATTERNS.items():
        found = pattern.fullmatch(text)
        if found:
            return t(f"workbench.said.{key}", **found.groupdict())
    return text
