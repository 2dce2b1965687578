"""Numbers, times and sizes as the pages show them. All accept ``None`` and show a dash for it."""

from __future__ import annotations

from typing import Any

DASH = "–"


def pct(value: float | None, digits: int = 1) -> str:
    """``0.921`` as ``92.1 %``."""
    return DASH if value is None else f"{100 * value:.{digits}f} %".replace("-", "−")


def num(value: Any, digits: int = 2) -> str:
    """Integers with thousands separated, other numbers with ``digits`` decimals."""
    if value is None or value == "":
        return DASH
    return (f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}").replace("-", "−")


def points(value: float | None) -> str:
    """A difference of rates in percentage points, with its sign: ``+3.4``."""
    return DASH if value is None else f"{100 * value:+,.1f}".replace("-", "−")


def signed(value: float | None, digits: int = 3) -> str:
    """A difference with its sign."""
    return DASH if value is None else f"{value:+,.{digits}f}".replace("-", "−")


def between(low: str, high: str, lang: str = "en") -> str:
    """An interval, in words, since a dash beside a minus is hard to read: ``−2.5 to 0.3``."""
    return f"{low} 至 {high}" if lang == "zh" else f"{low} to {high}"


def span(rate: dict[str, Any] | None, *, scale: str = "pct", lang: str = "en") -> str:
    """The interval of a rate: ``89.6 to 94.0`` in per cent, or as plain numbers."""
    if not rate or rate.get("low") is None or rate.get("high") is None:
        return ""
    if scale == "pct":
        return between(num(100 * float(rate["low"]), 1), num(100 * float(rate["high"]), 1), lang)
    return between(num(float(rate["low"])), num(float(rate["high"])), lang)


def span_signed(rate: dict[str, Any] | None, digits: int = 3, *, lang: str = "en") -> str:
    """The interval of a difference with signs; empty where there is none."""
    if not rate or rate.get("low") is None or rate.get("high") is None:
        return ""
    return between(signed(rate["low"], digits), signed(rate["high"], digits), lang)


def span_points(rate: dict[str, Any] | None, *, lang: str = "en") -> str:
    """The interval of a difference of rates, in percentage points with signs."""
    if not rate or rate.get("low") is None:
        return ""
    return between(points(rate["low"]), points(rate["high"]), lang)


def pvalue(value: float | None) -> str:
    """``p = 0.003``; very small ones as a bound."""
    if value is None:
        return DASH
    return "p < 0.0001" if value < 0.0001 else f"p = {value:.2g}"


def secs(value: float | None) -> str:
    """A duration in the unit that suits it."""
    if value is None:
        return DASH
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def size(value: float | None) -> str:
    """Bytes."""
    if value is None:
        return DASH
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def when(value: str | None) -> str:
    """An ISO timestamp to the second, in UTC as stored."""
    return DASH if not value else value[:19].replace("T", " ")


def short(value: str | None, length: int = 12) -> str:
    """The beginning of a digest."""
    return DASH if not value else value[:length]


def clip(value: str | None, length: int = 200) -> str:
    """Text cut to a length, with an ellipsis where something is missing."""
    value = value or ""
    return value if len(value) <= length else value[: length - 1] + "…"


FILTERS = {f.__name__: f for f in (pct, num, points, signed, pvalue, secs, size, when, short, clip)}
SPANS = {f.__name__: f for f in (span, span_points, span_signed)}
"""Those that take the language of the page."""
