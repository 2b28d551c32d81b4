"""A claim is a whole privacy curve, not one number: what it allows every attack, and the same claim with more or less noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from dpulr import search
from dpulr.accounting import privacy_cost
from dpulr.accounting.composition import Curve
from dpulr.accounting.events import Charge, SampledStep
from dpulr.audit.bounds import Array

FINEST = 64  # noise is scaled by powers of 2 ** (1 / FINEST)
LEAST, MOST = -4 * FINEST, 4 * FINEST  # sixteen times less, sixteen times more noise


@dataclass(frozen=True)
class Claim:
    """`steps` steps of this kind are claimed to be all that an observer sees. `nominal`: nobody proved it."""

    step: SampledStep
    steps: int = 1
    nominal: bool = False

    @property
    def charges(self) -> list[Charge]:
        return [Charge(self.step, self.steps)]

    def epsilon(self, delta: float) -> float:
        return privacy_cost.epsilon(self.charges, delta)

    def scaled(self, exponent: int) -> Claim:
        """The claim of the same mechanism with its noise multiplied by 2 ** (exponent / FINEST)."""
        factor = 2.0 ** (exponent / FINEST)
        return replace(self, step=replace(self.step, release=self.step.release.scaled(factor)))

    def power(self, false_positive: Array) -> Array:
        """The largest true-positive rate that the claim allows an attack at this false-positive rate."""
        slope, offset = self._lines
        fpr = np.atleast_1d(np.asarray(false_positive, dtype=np.float64))
        return np.array([min(float((slope * a + offset).min()), 1.0) for a in fpr])

    @cached_property
    def _lines(self) -> tuple[Array, Array]:
        """Each epsilon bounds the power by a straight line; from both directions of the claim."""
        pair = privacy_cost.curves(self.charges, 1e-9)
        shift = privacy_cost.total_shift(self.charges)
        eps, delta = _profile(pair.remove)
        slopes, offsets = [np.exp(eps)], [math.exp(-shift) * delta - math.expm1(-shift)]
        eps, delta = _profile(pair.add)  # Pr[no alarm | out] <= e^(eps + shift) Pr[no alarm | in] + delta
        slopes.append(np.exp(-(eps + shift)))
        offsets.append(1 - (1 - delta) * np.exp(-(eps + shift)))
        return np.concatenate(slopes), np.concatenate(offsets)


def _profile(curve: Curve, points: int = 800) -> tuple[Array, Array]:
    """(epsilon, delta) along a curve, negative epsilon included."""
    held = np.flatnonzero(curve.mass > 0)
    if not len(held):
        return np.zeros(1), np.full(1, min(1.0, curve.always))
    loss, mass = curve.loss[held[0] : held[-1] + 1], curve.mass[held[0] : held[-1] + 1]
    above = np.cumsum(mass[::-1])[::-1]
    with np.errstate(over="ignore"):
        weighted = np.cumsum((mass * np.exp(-np.maximum(loss, -600.0)))[::-1])[::-1]
    keep = np.unique(np.linspace(0, len(loss) - 1, points).astype(np.int64))
    eps = loss[keep]
    usable = np.abs(eps) < 300
    delta = np.clip(curve.always + above[keep] - np.exp(np.minimum(eps, 300.0)) * weighted[keep], 0.0, 1.0)
    return eps[usable], delta[usable]


@lru_cache(maxsize=256)
def scaled(claim: Claim, exponent: int) -> Claim:
    """As `claim.scaled`, with its curve kept."""
    return claim.scaled(exponent)


def refuted(claim: Claim, false_positive: Array, true_positive: Array) -> Array:
    """By how much the (certain) rates of each attack exceed what the claim allows; positive: refuted."""
    excess: Array = np.asarray(true_positive) - claim.power(np.asarray(false_positive))
    return excess


def largest_refuted(claim: Claim, false_positive: Array, true_positive: Array) -> tuple[int, int] | None:
    """The least noise whose claim some of these attacks refute (as an exponent), and which attack; None if there is none.

    Less noise claims less: what refutes a claim refutes it with more noise too.
    """

    def best(exponent: int) -> tuple[float, int]:
        excess = refuted(scaled(claim, exponent), false_positive, true_positive)
        return float(excess.max()), int(excess.argmax())

    ends = [LEAST, *(step for step in (-FINEST, 0, FINEST) if LEAST < step < MOST), MOST]
    low, high, which = LEAST - 1, MOST, -1
    for end in reversed(ends):
        excess, index = best(end)
        if excess <= 0:
            low = end
            break
        high, which = end, index
    if which < 0:
        return None
    low = search.last_true(lambda exponent: best(exponent)[0] <= 0, low, high)
    return low + 1, which if low + 1 == high else best(low + 1)[1]
