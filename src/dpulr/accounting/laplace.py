"""The Laplace release of one number: pure epsilon, and its dominating pair (docs/theory.md, section 3).

The sum is rounded to a grid of 2^-20 of the bound, and the noise is a whole number of its cells, drawn exactly. So the release is
the discrete one that is priced here, and rounding adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dpulr import validate
from dpulr.accounting.dominating_pairs import Array, Cells, cells
from dpulr.accounting.events import Charge, Release, SampledStep, Shift, register_release

GRID_BITS = 20
CELLS_PER_BOUND = 2**GRID_BITS
MOST_CELLS = 4_096


@register_release
@dataclass(frozen=True, slots=True)
class LaplaceRelease(Release):
    """A sum of numbers within C, plus Laplace noise of scale noise_multiplier * C."""

    kind = "laplace"

    noise_multiplier: float
    mechanism: str = "laplace"

    def __post_init__(self) -> None:
        validate.positive("noise_multiplier", self.noise_multiplier)

    @property
    def scale(self) -> int:
        """Of the noise, in cells of the grid: never less than was asked for."""
        cells_of_noise: int = math.ceil(self.noise_multiplier * CELLS_PER_BOUND)
        return cells_of_noise

    @property
    def pure_epsilon(self) -> float:
        return float(CELLS_PER_BOUND / self.scale)

    @property
    def shifts(self) -> tuple[Shift, ...]:
        return (Shift(self.pure_epsilon / math.sqrt(2)),)

    def pair(self) -> Cells:
        return laplace_cells(self.scale)

    def equivalent_noise(self) -> float:
        return self.noise_multiplier

    def scaled(self, factor: float) -> LaplaceRelease:
        return replace(self, noise_multiplier=self.noise_multiplier * factor)

    def log_ratio(self, along: Array, across: Array) -> Array:
        ratio: Array = (np.abs(along) - np.abs(along - 1)) * self.pure_epsilon
        return ratio


def laplace_cells(scale: int, shift: int = CELLS_PER_BOUND) -> Cells:
    """Two-sided geometric noise, P(x) proportional to e^(-|x| / scale), around 0 and around `shift`.

    Up to 0 the loss is -shift/scale, from `shift` on it is the same with a plus; in between it is (2 x - shift) / scale.
    """
    ratio = math.exp(-1 / scale)
    edges = np.unique(np.linspace(1, shift, min(shift - 1, MOST_CELLS) + 1).round())  # cells hold edges[i] <= x < edges[i + 1]
    first, last = edges[:-1], edges[1:] - 1
    middle = np.exp(-first / scale) * -np.expm1(-(edges[1:] - first) / scale) / (1 + ratio)
    mirrored = np.exp(-(shift - last) / scale) * -np.expm1(-(edges[1:] - first) / scale) / (1 + ratio)
    end, rest = shift / scale, math.exp(-shift / scale) / (1 + ratio)
    low = np.concatenate([[-end], (2 * first - shift) / scale, [end]])
    high = np.concatenate([[-end], (2 * last - shift) / scale, [end]])
    p = np.concatenate([[1 / (1 + ratio)], middle, [rest]])
    q = np.concatenate([[rest], mirrored, [1 / (1 + ratio)]])
    return cells(low, high, p, q)


def pure_epsilon(charges: Sequence[Charge]) -> float:
    """Epsilon at delta 0 of sampled steps: each costs ln(1 + q (e^epsilon - 1)), and they add up. Infinite where there is none."""
    total = 0.0
    for charge in charges:
        step = charge.step
        if not isinstance(step, SampledStep) or step.release.pure_epsilon is None or step.rejection_threshold:
            return math.inf
        own = step.release.pure_epsilon
        total += charge.count * (own + math.log(step.sample_rate - (step.sample_rate - 1) * math.exp(-own)))
    return total * (1 + 1e-12)
