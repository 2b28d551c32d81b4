"""The only searches by halving: for the last whole number, or the point on a line, up to which something holds."""

from __future__ import annotations

from collections.abc import Callable


def last_true(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest n with holds(n), for a property that holds at `low` and, from some n on, no longer; at `high` it does not.

    Neither end is tried. With nothing between the two, `low` is the answer.
    """
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def boundary(holds: Callable[[float], bool], low: float, high: float, width: float = 0.0) -> tuple[float, float]:
    """An interval of at most this width around the point up to which a property holds: it holds at its lower end only.

    Width 0 means two neighbouring floats. Neither `low`, where it must hold, nor `high`, where it must not, is tried.
    """
    while high - low > width:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


def root(function: Callable[[float], float], low: float, high: float, tolerance: float = 1e-12) -> float:
    """Where a continuous function that has different signs at both ends is zero."""
    from scipy.optimize import brentq

    return float(brentq(function, low, high, xtol=tolerance))
