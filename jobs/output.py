"""What commands print: tables for people on stdout, one JSON object for programs."""

from __future__ import annotations

import sys
from typing import Any

import orjson
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text


def console() -> Console:
    """Console on stdout; plain text of a sensible width when it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def print_json(value: Any) -> None:
    """Exactly one JSON object on stdout."""
    sys.stdout.flush()
    # keys may be a kind of str: those of database rows are
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
    sys.stdout.buffer.write(orjson.dumps(value, option=options, default=str))
    sys.stdout.buffer.write(b"\n")
    sys.stdout.flush()


def facts_table(title: str, rows: list[tuple[str, Any]]) -> Group:
    """A title and two columns of facts."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column("what", style="bold", no_wrap=True)
    table.add_column("value", overflow="fold")
    for key, value in rows:
        table.add_row(key, escape(str(value)))
    return Group(Text(title, style="bold"), table)
