"""How an epsilon is shown: a claim is rounded up, a measurement against it is rounded down."""

from __future__ import annotations

import math
from collections.abc import Callable

MARGIN = 1e-12  # relative; a value that rounding error has moved off a short decimal number is still shown as that number


def up(value: float, figures: int = 4) -> str:
    """So many figures, never below the value."""
    return _shown(value, figures, lambda scaled: math.ceil(scaled * (1 - MARGIN)))


def down(value: float, figures: int = 3) -> str:
    """So many figures, never above the value."""
    return _shown(value, figures, lambda scaled: math.floor(scaled * (1 + MARGIN)))


def _shown(value: float, figures: int, rounded: Callable[[float], int]) -> str:
    if math.isnan(value):
        return "nan"
    if value <= 0 or math.isinf(value):
        return "0" if value <= 0 else "infinity"
    scale = 10.0 ** (figures - 1 - math.floor(math.log10(value)))
    return f"{rounded(value * scale) / scale:.{max(6, figures + 2)}g}"
