"""Charts as SVG inside the page. Colours are CSS variables, so one picture serves light and dark. What is said is escaped here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 20, 40
COLOURS = 6


@dataclass(frozen=True)
class Series:
    """A line with a name; `colour` counts through the palette."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0


@dataclass(frozen=True)
class Axis:
    """How values are placed and written."""

    label: str
    write: Callable[[float], str] = lambda value: f"{value:g}"
    log: bool = False
    from_zero: bool = False
    whole: bool = False

    def place(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value

    def ticks(self, low: float, high: float) -> list[float]:
        """Round values; on a log axis whole powers of ten (given and returned as exponents)."""
        if self.log:
            first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
            return [float(k) for k in range(first, last + 1, max(1, (last - first) // 5))]
        step = max(nice_step((high - low) / 6), 1.0 if self.whole else 0.0)
        count = math.floor(high / step + 1e-9) - math.ceil(low / step - 1e-9)
        return [(math.ceil(low / step - 1e-9) + k) * step for k in range(count + 1)]

    def text(self, tick: float) -> str:
        return self.write(10**tick if self.log else tick)


def nice_step(raw: float) -> float:
    """1, 2 or 5 times a power of ten, at least `raw`."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))


def line_chart(title: str, series: Sequence[Series], x: Axis, y: Axis, *, limits: Sequence[tuple[str, float]] = ()) -> Markup:
    """Lines with dots; `limits` are level lines with a name, such as a budget."""
    drawn = [s for s in series if s.points]
    if not drawn:
        return Markup(f'<p class="quiet">{escape(title)}: nothing to show yet.</p>')
    x_low, x_high = _range([x.place(px) for s in drawn for px, _ in s.points], x)
    y_low, y_high = _range([*(y.place(py) for s in drawn for _, py in s.points), *(y.place(v) for _, v in limits)], y)

    def at(px: float, py: float) -> tuple[float, float]:
        return (
            LEFT + (x.place(px) - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y.place(py) - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM),
        )

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    parts += _grid(x, y, (x_low, x_high), (y_low, y_high))
    for name, value in limits:
        _, level = at(10**x_low if x.log else x_low, value)
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>')
        parts.append(f'<text class="limit-name" x="{LEFT + 6}" y="{level - 5:.1f}">{escape(name)}</text>')
    for s in drawn:
        places = [at(*point) for point in s.points]
        colour = f"c{s.colour % COLOURS}"
        parts.append(f'<polyline class="line {colour}" points="{" ".join(f"{px:.1f},{py:.1f}" for px, py in places)}"/>')
        for (px, py), (vx, vy) in zip(places, s.points, strict=True):
            label = f"{s.name}: {x.write(vx)}, {y.write(vy)}"
            parts.append(
                f'<circle class="dot {colour}" cx="{px:.1f}" cy="{py:.1f}" r="2.6"><title>{escape(label)}</title></circle>'
            )
    return Markup("".join([*parts, "</svg>"]))


def bar_chart(title: str, parts: Sequence[tuple[str, float]], write: Callable[[float], str]) -> Markup:
    """Horizontal bars, one per part, with its share."""
    total = sum(value for _, value in parts)
    if total <= 0:
        return Markup(f'<p class="quiet">{escape(title)}: nothing to show yet.</p>')
    most = max(value for _, value in parts)
    height = 34 * len(parts) + 8
    out = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">']
    for i, (name, value) in enumerate(parts):
        top, width = 4 + 34 * i, max(1.0, 225 * value / most)
        out.append(f'<text class="bar-name" x="104" y="{top + 18}">{escape(name)}</text>')
        out.append(f'<rect class="bar c{i % COLOURS}" x="112" y="{top + 3}" width="{width:.1f}" height="22" rx="3"/>')
        out.append(f'<text x="{118 + width:.1f}" y="{top + 18}">{escape(write(value))} ({value / total:.0%})</text>')
    return Markup("".join([*out, "</svg>"]))


def _grid(x: Axis, y: Axis, x_range: tuple[float, float], y_range: tuple[float, float]) -> list[str]:
    parts = []
    for tick in y.ticks(*y_range):
        level = HEIGHT - BOTTOM - (tick - y_range[0]) / (y_range[1] - y_range[0]) * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>')
        parts.append(f'<text class="y-tick" x="{LEFT - 7}" y="{level + 4:.1f}">{escape(y.text(tick))}</text>')
    for tick in x.ticks(*x_range):
        place = LEFT + (tick - x_range[0]) / (x_range[1] - x_range[0]) * (WIDTH - LEFT - RIGHT)
        parts.append(f'<text class="x-tick" x="{place:.1f}" y="{HEIGHT - BOTTOM + 17}">{escape(x.text(tick))}</text>')
    parts.append(f'<text class="x-tick name" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">{escape(x.label)}</text>')
    return parts


def _range(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    low, high = min(values), max(values)
    if axis.from_zero:
        low = min(low, 0.0)
    if high - low < 1e-9 * max(1.0, abs(high)):
        margin = 0.1 * abs(high) or 0.5
        low, high = (low if axis.from_zero and high > 0 else low - margin, high + margin)
    return low, high
