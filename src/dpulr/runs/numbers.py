"""How numbers are shown."""

from __future__ import annotations

import math


def up(value: float, figures: int = 4) -> str:
    """Rounded up to so many figures: an epsilon is never shown smaller than it is."""
    if not 0 < value < math.inf:
        return f"{value:g}"
    scale = 10.0 ** (figures - 1 - math.floor(math.log10(value)))
    return f"{math.ceil(value * scale * (1 - 1e-12)) / scale:.{figures + 2}g}"
