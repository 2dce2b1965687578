"""The unified case: the only form in which data reaches a runner, and how its id comes about."""

from __future__ import annotations

import unicodedata
from typing import Any

from pydantic import Field

from rayrl.schemas import Frozen, JsonDict, canonical_json, sha256_hex

MAX_QUERY = 100_000


class Case(Frozen):
    """One case of a data set. ``gold_route`` never reaches the runner."""

    case_id: str = Field(min_length=1, max_length=200)
    query: str = Field(min_length=1, max_length=MAX_QUERY)
    gold_route: str | None = None
    history: list[Any] = []
    context: JsonDict = {}
    domain: str = ""
    request_id: str = ""
    metadata: JsonDict = {}
    source_row: JsonDict = {}
    """The row as the file had it."""
    source_place: str = ""
    """``line 17`` or ``Sheet1!5``."""

    def input(self) -> JsonDict:
        """What the runner gets: no label, no source format."""
        return {"case_id": self.case_id, "query": self.query, "history": self.history, "context": self.context}

    def input_sha256(self) -> str:
        """Equal for two cases exactly when a runner could not tell them apart (but for their id)."""
        return sha256_hex(canonical_json({"query": self.query, "history": self.history, "context": self.context}))


def automatic_id(query: str, history: list[Any], context: JsonDict, request_id: str, domain: str) -> str:
    """Id of a case whose file names none: a function of its content, the label left out, so that a corrected label or
    another row order keeps it."""
    content = {"query": query, "history": history, "context": context, "request_id": request_id, "domain": domain}
    return f"auto-{sha256_hex(canonical_json(content))[:16]}"


def normal_label(text: str) -> str:
    """The form in which label spellings are compared: NFKC, without format characters, trimmed, case folded."""
    folded = unicodedata.normalize("NFKC", text)
    kept = "".join(c for c in folded if unicodedata.category(c) not in ("Cf", "Cc"))
    return kept.strip().casefold()
