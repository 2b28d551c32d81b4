"""Renyi accounting as a cross-check, and the tight conversion to (epsilon, delta) (docs/theory.md, section 8)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dpulr.accounting.dominating_pairs import Array, pair_of, spread, subsampled
from dpulr.accounting.events import Charge, Release, SampledStep

ORDERS: Array = np.concatenate(
    [1 + np.arange(1, 100) / 10, np.arange(11, 64), np.arange(64, 258, 2), np.geomspace(260, 2048, 40).round()]
)
STEPS_PER_DEVIATION = 200  # of the loss, on the grid that a pair is spread to


def to_epsilon(orders: Array, values: Array, delta: float) -> float:
    """Tight conversion: min over a of value + ln(1 - 1/a) - ln(delta * a) / (a - 1), not below 0."""
    bounds = values + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    finite = bounds[np.isfinite(bounds)]
    return max(0.0, float(finite.min())) if finite.size else math.inf


def epsilon_by_rdp(charges: Sequence[Charge], delta: float) -> float:
    """Epsilon of certified charges, rejection left out."""
    total = np.zeros_like(ORDERS)
    lost = 0.0
    for charge in charges:
        step = charge.step
        if not isinstance(step, SampledStep):
            return math.inf
        values, missing = step.release.renyi(step.sample_rate)
        total = total + charge.count * values
        lost += charge.count * missing
    return to_epsilon(ORDERS, total, delta - lost) if lost < delta else math.inf


def of_pair(release: Release, sample_rate: float) -> tuple[Array, float]:
    """The larger of both directions' divergences, from the finite pair: spreading can only raise a convex moment."""
    pair = subsampled(pair_of(release), sample_rate)
    deviation = math.sqrt(float(np.dot(pair.q, pair.mean**2))) or 1.0
    step = deviation / STEPS_PER_DEVIATION
    index, p, q = spread(pair, step)
    loss: Array = index.astype(np.float64) * step
    values = np.array([max(_moment(loss, q, a - 1), _moment(-loss, p, a - 1)) / (a - 1) for a in ORDERS])
    return values, max(pair.q_only, pair.p_only)


def _moment(loss: Array, mass: Array, power: float) -> float:
    exponent = power * loss
    top = float(exponent.max())
    return top + math.log(float(np.dot(np.exp(exponent - top), mass)))
