"""What methods are called in both languages; a name nobody foresaw is shown as it is."""

from __future__ import annotations

import re

from rayrl.studio.pages.language import Translate


def method(t: Translate, name: str) -> str:
    """The name of a method, arm or policy."""
    key = re.sub(r"\W+", "_", name.lower()).strip("_")
    found = t(f"arena.method.{key}")
    return name if found == key else found
