"""Small plots as inline SVG text: no script, no font, no network; colours come from the page's CSS variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

ROW = 26
LEFT = 190
RIGHT = 120
PAD = 14


@dataclass(frozen=True)
class Whisker:
    """A labelled point with its interval (``None`` where there is none) and a note at the right."""

    label: str
    value: float
    low: float | None
    high: float | None
    note: str = ""


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round tick positions within [low, high]."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / count
    power = 10.0 ** np.floor(np.log10(raw))
    step = float(power * min((m for m in (1, 2, 2.5, 5, 10) if m * power >= raw), default=10))
    first = float(np.ceil(low / step) * step)
    out = []
    while first <= high + 1e-12:
        out.append(round(first, 12) + 0.0)  # no "-0"
        first += step
    return out


def _text(x: float, y: float, value: str, anchor: str = "start", css: str = "t") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{escape(value)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def forest_plot(items: Sequence[Whisker], *, reference: float | None = None, title: str = "", width: int = 720) -> str:
    """Points with intervals, one row each; ``reference`` draws a dashed line (0 for differences)."""
    if not items:
        return ""
    edges = [v for w in items for v in (w.value, w.low, w.high) if v is not None]
    edges += [reference] if reference is not None else []
    low, high = min(edges), max(edges)
    margin = 0.06 * (high - low) or 0.05
    low, high = low - margin, high + margin
    plot = width - LEFT - RIGHT
    height = PAD * 2 + ROW * len(items) + 22

    def x(value: float) -> float:
        return LEFT + plot * (value - low) / (high - low)

    bottom = PAD + ROW * len(items)
    parts = [f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {width} {height}" class="plot">']
    for tick in _ticks(low, high):
        parts += [_line(x(tick), PAD, x(tick), bottom, "grid"), _text(x(tick), bottom + 16, f"{tick:g}", "middle", "s")]
    if reference is not None:
        parts.append(_line(x(reference), PAD - 4, x(reference), bottom + 4, "ref"))
    for index, item in enumerate(items):
        y = PAD + ROW * index + ROW / 2
        clear = reference is not None and item.low is not None and item.high is not None
        apart = clear and (item.low > reference or item.high < reference)  # type: ignore[operator]
        parts.append(_text(LEFT - 10, y + 4, item.label[:30], "end"))
        if item.low is not None and item.high is not None:
            parts.append(_line(x(item.low), y, x(item.high), y, "whisker on" if apart else "whisker"))
        parts.append(f'<circle cx="{x(item.value):.1f}" cy="{y:.1f}" r="4" class="{"dot on" if apart else "dot"}"/>')
        parts.append(_text(width - RIGHT + 10, y + 4, item.note, "start", "s"))
    return "".join([*parts, "</svg>"])


def bar_chart(items: Sequence[tuple[str, float]], *, title: str = "", width: int = 720) -> str:
    """Horizontal bars with their values."""
    if not items:
        return ""
    top = max(value for _, value in items) or 1.0
    plot, height = width - LEFT - 70, PAD * 2 + ROW * len(items)
    parts = [f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {width} {height}" class="plot">']
    for index, (label, value) in enumerate(items):
        y = PAD + ROW * index
        length = max(1.0, plot * value / top)
        parts += [
            _text(LEFT - 10, y + 17, label[:30], "end"),
            f'<rect x="{LEFT}" y="{y + 5}" width="{length:.1f}" height="{ROW - 10}" rx="3" class="bar"/>',
            _text(LEFT + length + 8, y + 17, f"{value:g}", "start", "s"),
        ]
    return "".join([*parts, "</svg>"])


def histogram(values: Sequence[float], *, title: str = "", bins: int = 20, width: int = 720, height: int = 170) -> str:
    """Counts over equal-width bins."""
    finite = np.asarray([v for v in values if v is not None and np.isfinite(v)], dtype=np.float64)
    if finite.size == 0:
        return ""
    counts, edges = np.histogram(finite, bins=min(bins, max(1, np.unique(finite).size)))
    top, base = max(int(counts.max()), 1), height - 24
    plot = width - 2 * PAD
    parts = [f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {width} {height}" class="plot">']
    for index, count in enumerate(counts.tolist()):
        tall = (base - 20) * count / top
        x, w = PAD + plot * index / counts.size, plot / counts.size
        parts.append(
            f'<rect x="{x + 1:.1f}" y="{base - tall:.1f}" width="{w - 2:.1f}" height="{tall:.1f}" class="bar"/>'
        )
        if count:
            parts.append(_text(x + w / 2, base - tall - 4, str(count), "middle", "s"))
    for share in (0.0, 0.5, 1.0):
        value = float(edges[0] + share * (edges[-1] - edges[0]))
        anchor = ("start", "middle", "end")[int(share * 2)]
        parts.append(_text(PAD + plot * share, height - 8, f"{value:.3g}", anchor, "s"))
    return "".join([*parts, "</svg>"])
