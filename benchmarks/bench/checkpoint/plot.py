"""A line plot as SVG, of a few series."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 360, 60, 50, 30, 150
_COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#8d6b94", "#edae49")


def shares(title: str, x_label: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return a plot of shares from 0 to 1, over x on a logarithmic scale.

    Args:
        series: by name, each with its points.
    """
    xs = sorted({x for points in series.values() for x, _ in points})
    low, span = math.log(xs[0]), (math.log(xs[-1]) - math.log(xs[0])) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (math.log(x) - low) / span * (_WIDTH - _LEFT - _RIGHT),
            _TOP + (1 - min(max(y, 0.0), 1.0)) * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [_text(_LEFT, 18, title, anchor="start"), _text(_WIDTH / 2 - 45, _HEIGHT - 12, x_label)]
    for tenth in range(0, 11, 2):
        _, y = place(xs[0], tenth / 10)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{tenth * 10} %", anchor="end"))
    parts += [_text(place(x, 0)[0], _HEIGHT - _BOTTOM + 18, f"{x:g}") for x in xs]
    for number, (name, points) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [place(x, y) for x, y in sorted(points)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        parts.append(_text(_WIDTH - _RIGHT + 12, _TOP + 12 + 18 * number, name, anchor="start", fill=colour))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, *, anchor: str = "middle", fill: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
