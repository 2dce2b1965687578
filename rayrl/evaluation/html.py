"""Self-contained HTML pages: style inline, plots as SVG, nothing fetched; everything shown is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_CSS = """
:root{--ink:#1c2127;--ink2:#545d68;--ink3:#858f9b;--line:#dfe3e8;--paper:#fff;--ground:#f6f7f9;--accent:#0f6b6f;
--soft:#9dcbcf;--good:#1b7a43;--bad:#b3361c;--warn:#8a6100}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--ink2:#a9b2bc;--ink3:#7c8793;--line:#2d343c;--paper:#171b20;
--ground:#111418;--accent:#5cc4c2;--soft:#215a60;--good:#63c78c;--bad:#f08b72;--warn:#e0b450}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:14px/1.5 ui-sans-serif,system-ui,"Noto Sans",
"PingFang SC","Microsoft YaHei",sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1040px;margin:0 auto;padding:24px 20px 64px}
h1{font-size:22px;margin:0 0 4px;letter-spacing:-.01em}h2{font-size:16px;margin:28px 0 8px}
p.lede{font-size:16px;max-width:76ch;margin:8px 0 16px}.muted,small{color:var(--ink3)}
section{background:var(--paper);border:1px solid var(--line);border-radius:6px;padding:12px 16px;overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px}
th{text-align:left;color:var(--ink2);font-weight:600;border-bottom:1px solid var(--line);padding:5px 8px}
td{border-bottom:1px solid var(--line);padding:5px 8px;vertical-align:top}tr:last-child td{border-bottom:0}
th.n,td.n{text-align:right;white-space:nowrap}td.good{color:var(--good)}td.bad{color:var(--bad)}
.figures{display:flex;flex-wrap:wrap;gap:12px}.figure{background:var(--paper);border:1px solid var(--line);
border-radius:6px;padding:10px 16px;min-width:150px}.figure b{display:block;font-size:24px;line-height:1.2}
.warn{border-left:4px solid var(--warn)}
svg.plot{width:100%;max-width:820px;height:auto;display:block}
svg .t{font-size:12px;fill:var(--ink)}svg .s{font-size:11px;fill:var(--ink2)}svg .grid{stroke:var(--line)}
svg .ref{stroke:var(--ink2);stroke-dasharray:4 3}svg .whisker{stroke:var(--ink3);stroke-width:2}
svg .dot{fill:var(--ink3)}svg .on{stroke:var(--accent)}svg .dot.on{fill:var(--accent);stroke:none}
svg .bar{fill:var(--soft)}
code{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:12px;overflow-wrap:anywhere}
"""


class Cell(str):
    """A table cell that is already HTML."""


def page(title: str, body: Iterable[str]) -> str:
    """A whole document."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width,initial-scale=1"><title>{escape(title)}</title><style>{_CSS}</style></head>'
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def section(title: str, *content: str, note: str = "", warn: bool = False) -> str:
    """A titled box; empty content gives nothing."""
    inner = "".join(content)
    if not inner:
        return ""
    small = f" <small>{escape(note)}</small>" if note else ""
    return f'<h2>{escape(title)}{small}</h2><section class="{"warn" if warn else ""}">{inner}</section>'


def paragraph(text: str, css: str = "") -> str:
    """A paragraph of plain text."""
    return f'<p class="{css}">{escape(text)}</p>'


def figures(items: Sequence[tuple[str, str, str]]) -> str:
    """Headline figures: (name, value, small print)."""
    cells = (f'<div class="figure">{escape(a)}<b>{escape(b)}</b><small>{escape(c)}</small></div>' for a, b, c in items)
    return f'<div class="figures">{"".join(cells)}</div>'


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, numeric_from: int = 1) -> str:
    """A table; columns from ``numeric_from`` on are right-aligned. No rows give nothing."""
    body = []
    for row in rows:
        cells = []
        for index, value in enumerate(row):
            text = value if isinstance(value, Cell) else escape("" if value is None else str(value))
            cells.append(f'<td class="{"n" if index >= numeric_from else ""}">{text}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    if not body:
        return ""
    head = "".join(f'<th class="{"n" if i >= numeric_from else ""}">{escape(c)}</th>' for i, c in enumerate(columns))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
