"""Plotly figures as plain dicts. Colours are names of the palette (``accent``, ``good`` ...); the script resolves them
in the theme that is shown. Nothing of plotly's Python side is imported: only its script is served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rayrl.errors import ConfigError

Figure = dict[str, Any]


def plotly_script() -> Path:
    """The script of the installed plotly package.

    Raises:
        ConfigError: plotly is not installed.
    """
    spec = find_spec("plotly")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path
    raise ConfigError("charts need the package plotly; install rayrl[studio]")


def grouped_bars(names: Sequence[str], series: Mapping[str, Sequence[float]], *, y: str = "") -> Figure:
    """Bars side by side: one group per name, one colour per series."""
    colours = ("ink-3", "accent", "seq-2", "warn", "good")
    data = [
        {"type": "bar", "name": name, "x": list(names), "y": list(values), "marker": {"color": colours[i % 5]}}
        for i, (name, values) in enumerate(series.items())
    ]
    return {"data": data, "layout": {"barmode": "group", "yaxis": {"title": y}}, "table": _table(names, series)}


def intervals(names: Sequence[str], rates: Sequence[dict[str, Any]], *, x: str = "", percent: bool = True) -> Figure:
    """Rates with their intervals, one row per name: ``{value, low, high}`` from 0 to 1. Missing ones are left out.

    ``percent=False`` for values that are no rates.
    """
    known = [(n, r) for n, r in zip(names, rates, strict=True) if r.get("value") is not None]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [r["value"] for _, r in known],
        "y": [n for n, _ in known],
        "marker": {"color": "accent", "size": 9},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [r["high"] - r["value"] if r.get("high") is not None else 0 for _, r in known],
            "arrayminus": [r["value"] - r["low"] if r.get("low") is not None else 0 for _, r in known],
            "color": "seq-4",
        },
    }
    table = {"names": [n for n, _ in known]} | {key: [r.get(key) for _, r in known] for key in ("value", "low", "high")}
    layout = {
        "xaxis": {"title": x, "tickformat": ".0%" if percent else ""},
        "yaxis": {"autorange": "reversed", "type": "category"},
        "height": 90 + 30 * len(known),
    }
    return {"data": [trace], "layout": layout, "table": table}


def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    *,
    x_title: str = "",
    y_title: str = "",
    bands: dict[str, tuple[Sequence[float | None], Sequence[float | None]]] | None = None,
) -> Figure:
    """Curves over ``x``, with an optional band (lower, upper) around each."""
    colours = ("accent", "warn", "good", "bad", "link", "ink-3")
    data: list[dict[str, Any]] = []
    for i, (name, values) in enumerate(series.items()):
        colour = colours[i % len(colours)]
        if bands and name in bands:
            low, high = bands[name]
            hidden = {"type": "scatter", "mode": "lines", "x": list(x), "hoverinfo": "skip", "showlegend": False}
            data.append({**hidden, "y": list(low), "line": {"width": 0, "color": colour}})
            data.append(
                {
                    **hidden,
                    "y": list(high),
                    "line": {"width": 0, "color": colour},
                    "fill": "tonexty",
                    "fillcolor": colour,
                }
            )
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": list(x),
                "y": list(values),
                "line": {"color": colour, "width": 2},
            }
        )
    layout = {"xaxis": {"title": x_title}, "yaxis": {"title": y_title}}
    return {"data": data, "layout": layout, "table": _table(list(x), series)}


def _table(names: Sequence[Any], series: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {"names": list(names), **{name: list(values) for name, values in series.items()}}
