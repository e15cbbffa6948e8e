"""Pictures as SVG elements of a page: medians with their spread, and lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from stepgraph.measure.show import number

WIDTH, LABELS, LINE = 760, 250, 22
"""Pixels: of a picture, of the labels at its left, and from one line of text to the next."""
COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#666666")
WIDE = 30.0
"""Largest over smallest median from which on the axis is logarithmic."""


@dataclass(frozen=True)
class Spread:
    """A median with its p10 and p90, the same as it where there is one sample."""

    label: str
    low: float
    median: float
    high: float


def draw_spreads(title: str, unit: str, spreads: Sequence[Spread]) -> str:
    """A line for each: its median as a dot, p10 to p90 as a bar."""
    positive = [spread.low for spread in spreads if spread.low > 0]
    most = max(0.0, *(spread.high for spread in spreads)) or 1.0
    log = len(positive) == len(spreads) and most / min(positive) > WIDE
    ticks = _decades(min(positive), most) if log else _ticks(min(0.0, *(s.low for s in spreads)), most)
    first, last = ticks[0], ticks[-1]

    def x(value: float) -> float:
        share = math.log(value / first) / math.log(last / first) if log else (value - first) / (last - first)
        return LABELS + 10 + share * (WIDTH - LABELS - 40)

    bottom = 10 + LINE * len(spreads)
    parts = [_grid(x(tick), 6, x(tick), bottom) + _text(x(tick), bottom + 16, f"{tick:,g}", "middle") for tick in ticks]
    for index, spread in enumerate(spreads):
        y = 10 + LINE * index + LINE / 2
        told = (
            f"{spread.label}: {number(spread.median)} {unit}, p10 to p90 {number(spread.low)} to {number(spread.high)}"
        )
        parts.append(
            f"<g><title>{escape(told)}</title>{_text(LABELS, y + 4, _short(spread.label, 40), 'end')}"
            f'<rect x="{x(spread.low):.1f}" y="{y - 4:.1f}" width="{max(x(spread.high) - x(spread.low), 1):.1f}" '
            f'height="8" fill="{COLOURS[0]}" opacity="0.35"/>'
            f'<circle cx="{x(spread.median):.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[0]}"/></g>'
        )
    scale = f"{unit}{', logarithmic' if log else ''}"
    parts.append(_text((LABELS + WIDTH) / 2, bottom + 34, scale, "middle"))
    return _svg(title, bottom + 42, parts)


def draw_lines(title: str, across: str, up: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """A line for each name through its points; both axes begin at 0."""
    points = [point for line in lines.values() for point in line]
    across_ticks, up_ticks = _ticks(0, max(x for x, _ in points) or 1), _ticks(0, max(y for _, y in points) or 1)
    left, top, wide, high = 70, 14, WIDTH - 100, 260

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return left + point[0] / across_ticks[-1] * wide, top + high - point[1] / up_ticks[-1] * high

    parts = []
    for tick in across_ticks:
        x, _ = place((tick, 0))
        parts.append(_grid(x, top, x, top + high) + _text(x, top + high + 16, f"{tick:,g}", "middle"))
    for tick in up_ticks:
        _, y = place((0, tick))
        parts.append(_grid(left, y, left + wide, y) + _text(left - 8, y + 4, f"{tick:,g}", "end"))
    parts.append(_text(left + wide / 2, top + high + 34, across, "middle"))
    parts.append(f'<text x="14" y="{top + high / 2}" transform="rotate(-90 14 {top + high / 2})" '
                 f'text-anchor="middle">{escape(up)}</text>')  # fmt: skip
    for index, (name, line) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        placed = [place(point) for point in line]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed)
        parts.append(f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}')
        y = top + high + 58 + LINE * index
        parts.append(f'<rect x="{left}" y="{y - 9}" width="14" height="10" fill="{colour}"/>')
        parts.append(f"<g><title>{escape(name)}</title>{_text(left + 22, y, _short(name, 95), 'start')}</g>")
    return _svg(title, top + high + 58 + LINE * len(lines), parts)


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="grid"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers from at most `low` to at least `high`."""
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * times for times in (1, 2, 2.5, 5, 10) if unit * times >= rough * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step * 0.9999)
    return [step * index for index in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
