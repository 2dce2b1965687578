"""A line chart as a stand-alone SVG file: what the gate study shows its readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import log

WIDTH, HEIGHT = 800, 420
LEFT, RIGHT, TOP, BOTTOM = 62, 270, 40, 48
APART = 34
"""Between two labels of the x axis."""
COLOURS = ("#1f6fb2", "#d1603d", "#3a8f5c", "#7a4fa3", "#8a8a8a", "#b8860b")


@dataclass(frozen=True)
class Line:
    """A named series of (x, y) points; dashed lines and single points are possible."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def line_chart(lines: Sequence[Line], *, title: str, x_label: str, y_label: str, y_max: float = 1.0) -> str:
    """The chart; x, above 0, is on a logarithmic scale, because budgets double."""
    xs = sorted({x for line in lines for x, _ in line.points})
    inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    range_x = log(xs[-1] / xs[0]) or 1.0
    place = {x: LEFT + inner_w * (0.06 + 0.88 * log(x / xs[0]) / range_x) for x in xs}

    def height(y: float) -> float:
        return TOP + inner_h * (1 - y / y_max)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for i in range(6):
        y = y_max * i / 5
        out.append(
            f'<line x1="{LEFT}" y1="{height(y):.1f}" x2="{LEFT + inner_w}" y2="{height(y):.1f}" stroke="#e2e2e2"/>'
            f'<text x="{LEFT - 8}" y="{height(y) + 4:.1f}" text-anchor="end">{y:.2g}</text>'
        )
    labelled: list[float] = []
    # those of whole lines first: single points between them go without where there is no room
    for x in sorted(xs, key=lambda x: -max(len(line.points) for line in lines if x in dict(line.points))):
        if any(abs(place[x] - place[other]) < APART for other in labelled):
            continue
        labelled.append(x)
        out.append(f'<text x="{place[x]:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:g}</text>')
    out.append(
        f'<text x="{LEFT + inner_w / 2:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>'
        f'<text x="16" y="{TOP + inner_h / 2:.1f}" text-anchor="middle" '
        f'transform="rotate(-90 16 {TOP + inner_h / 2:.1f})">{escape(y_label)}</text>'
    )
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        points = [(place[x], height(y)) for x, y in sorted(line.points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points]
        y = TOP + 14 + 20 * number
        x = LEFT + inner_w + 14
        out.append(
            f'<line x1="{x}" y1="{y - 4}" x2="{x + 22}" y2="{y - 4}" stroke="{colour}" stroke-width="2"{dash}/>'
            f'<text x="{x + 28}" y="{y}">{escape(line.name)}</text>'
        )
    return "\n".join([*out, "</svg>\n"])
