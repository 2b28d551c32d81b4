"""Layer weights from public quantities: how to share a budget among layers (docs/theory.md, section 8).

With c_l = C_l / noise, a layer's useful signal is G_l rho_l c_l, G_l a public guess of its gradient's norm, and its cost in the
small-signal approximation is rho_l^2 c_l^2 + c_l^4 / (2 d_l K). At the best shares the marginal signal
per cost is the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpulr.accounting.small_signal import mean_overlap


@dataclass(frozen=True)
class LayerCost:
    """Signal per unit of c and of gradient (`slope`), the factor of c^4 in the cost (`quartic`), the guessed gradient."""

    slope: float
    quartic: float
    gradient: float = 1.0

    @classmethod
    def hidden(cls, dim: int, repeats: int, gradient: float = 1.0) -> LayerCost:
        return cls(mean_overlap(dim), 1 / (2 * dim * repeats), gradient)

    @classmethod
    def exact(cls, gradient: float = 1.0) -> LayerCost:
        return cls(1.0, 0.0, gradient)

    def share(self, price: float) -> float:
        """The root c of gradient * slope = 2 price c (slope^2 + 2 quartic c^2): a cubic with one real root."""
        signal, cubic, linear = self.gradient * self.slope, 4 * price * self.quartic, 2 * price * self.slope**2
        if cubic == 0:
            return signal / linear
        root = math.asinh(1.5 * signal / linear * math.sqrt(3 * cubic / linear)) / 3
        return 2 * math.sqrt(linear / (3 * cubic)) * math.sinh(root)


def balanced(costs: Sequence[LayerCost], noise_multiplier: float) -> tuple[float, ...]:
    """Bounds C_l of the best shares, scaled so that their squares have mean 1."""
    target = len(costs) / noise_multiplier**2
    low, high = -60.0, 60.0  # logarithm of the price
    for _ in range(100):
        middle = (low + high) / 2
        if sum(cost.share(math.exp(middle)) ** 2 for cost in costs) > target:
            low = middle
        else:
            high = middle
    return tuple(noise_multiplier * cost.share(math.exp((low + high) / 2)) for cost in costs)
