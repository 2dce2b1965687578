"""What a reader leaves behind: rows with their place in the file, notes, and the limits it kept to.

Values stay what the file says: text for CSV and sheets, JSON values for JSONL. A reader never guesses numbers, missing
values or dates out of text; ids keep their leading zeros and ``NA`` is a label like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

MAX_SAFE_INTEGER = 2**53


class ReadError(Exception):
    """The file cannot be read; the message names the row and column and says what to do."""


class RowError(ReadError):
    """One row cannot be read; those beside it can."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one upload. Beyond any of them there is an error that names it."""

    max_bytes: int = 64 * 1024 * 1024
    max_rows: int = 200_000
    max_columns: int = 1000
    max_field: int = 1_000_000
    max_unpacked: int = 512 * 1024 * 1024
    max_ratio: float = 200.0
    memory: int = 1536 * 1024 * 1024
    cpu_s: int = 60
    wall_s: float = 120.0


@dataclass(frozen=True)
class Options:
    """What the person may choose in the preview; ``None`` lets the reader find out."""

    format: str | None = None
    encoding: str | None = None
    delimiter: str | None = None
    sheet: str | None = None
    fill_merged: bool = False


@dataclass
class Table:
    """One file as rows. ``places[i]`` is ``line 17`` or ``Sheet1!5``."""

    format: str
    columns: list[str]
    rows: list[dict[str, Any]]
    places: list[str]
    encoding: str | None = None
    delimiter: str | None = None
    sheet: str | None = None
    sheets: list[dict[str, Any]] = field(default_factory=list)
    merged: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    bad: list[dict[str, str]] = field(default_factory=list)
    """Rows that could not be read, ``{place, message}``; the first 200 of them."""
    n_bad: int = 0
    total: int | None = None
    """Rows of the file, where only the first were kept."""

    def head(self) -> dict[str, Any]:
        """Everything but the rows."""
        kept = [f.name for f in fields(self) if f.name not in ("rows", "places", "total")]
        out = {name: getattr(self, name) for name in kept}  # asdict would copy every row first
        return {**out, "n_rows": len(self.rows) if self.total is None else self.total}

    def reject(self, place: str, message: str) -> None:
        """Note a row that cannot be read."""
        self.n_bad += 1
        if len(self.bad) < 200:
            self.bad.append({"place": place, "message": message})

    def warn(self, text: str, *, limit: int = 50) -> None:
        """Note something the person should know; the first ``limit`` are kept."""
        if len(self.warnings) < limit:
            self.warnings.append(text)


def unique_columns(names: list[str], table_warn: list[str]) -> list[str]:
    """Column names made unique (``a``, ``a_2``); empty ones are named by position."""
    out: list[str] = []
    for position, raw in enumerate(names, 1):
        name = raw.strip() or f"column_{position}"
        found, n = name, 1
        while found in out:
            n += 1
            found = f"{name}_{n}"
        if found != raw.strip():
            table_warn.append(
                f"column {position}: the header {raw.strip()!r} is empty or occurs twice; named {found!r}"
            )
        out.append(found)
    return out
