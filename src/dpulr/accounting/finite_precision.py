"""What finite precision adds to the price of the ideal release (docs/theory.md, section 9).

A release is rounded to a grid of at least 2^-11 of its noise, and the noise comes from numpy's ziggurat in float64. So the computed
probability of each outcome is close to the ideal one, number by number: within e^(+-PER_NUMBER), and a little less far out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from dpulr.accounting.events import Charge, SampledStep

PER_NUMBER = 2.0**-37  # logarithm of computed over ideal probability of one number, up to TAIL standard deviations
TAIL = 3.6541528853610088  # where the ziggurat's tail begins
AT_TAIL = 2.0**-43  # what the tail adds to PER_NUMBER where it begins; e times as much every 1/TAIL standard deviations
MEAN_IN_TAIL = 2.0**-50  # what the tail adds to two numbers on average
FAR = 0.19  # a record moves few numbers by more than this many standard deviations
LARGEST_ERROR = 0.25  # beyond it no statement is made
LARGEST_EXPONENT = 700.0
SHARES = (1e-4, 1e-3, 1e-2)  # of delta, spent on what is rare; the best is taken
PARTS = 6  # kinds of rare things


@dataclass(frozen=True, slots=True)
class Slack:
    """The computed run has H(epsilon) <= e^factor * (H of the ideal one at epsilon - loss, plus mass)."""

    loss: float = 0.0
    factor: float = 0.0
    mass: float = 0.0

    def room(self, delta: float) -> float:
        """The delta that is left for the ideal release."""
        return delta * math.exp(-self.factor) - self.mass


def slack(charges: Sequence[Charge], mass: float) -> Slack:
    """What finite precision costs, with `mass` of delta for what is rare. Steps of no numbers are ideal and cost nothing."""
    sampled = [(charge.count, charge.step) for charge in charges if isinstance(charge.step, SampledStep)]
    rounded = [(count, step) for count, step in sampled if count and step.release.numbers]
    if not rounded:
        return Slack()
    rare = mass / PARTS
    everything = sum(count * step.release.numbers for count, step in rounded)
    own = _error_at(_reach(everything / rare))
    loss = _loss(rounded, rare)
    if own > LARGEST_ERROR or math.isinf(loss):
        return Slack(math.inf, math.inf, mass)
    return Slack(loss, everything * PER_NUMBER + own * math.log(1 / rare), mass)


def _loss(rounded: Sequence[tuple[int, SampledStep]], rare: float) -> float:
    """By how much the loss of the whole run may exceed the ideal one, but for a probability of `rare` (Chernoff's bound)."""
    met = moved = farthest = 0.0  # numbers of steps that the record takes part in, and those of them that it moves far
    for count, step in rounded:
        numbers = step.release.numbers
        met += count * _odds(step) * numbers
        moved += count * _odds(step) * (min(numbers, _far(step)) if step.sample_rate <= 0.5 else numbers)
        farthest = max(farthest, *step.release.shifts)
    error = _error_at(max(_reach(met / rare) + min(FAR, farthest), _reach(moved / rare) + farthest))
    if error > LARGEST_ERROR:
        return math.inf

    def bound(power: float) -> float:
        growth = MEAN_IN_TAIL * math.expm1(2 * power * error) / (2 * power * error)
        total = -math.log(rare)
        for count, step in rounded:
            cost = 2 * PER_NUMBER * step.release.numbers
            cost += growth * (2 * step.release.numbers + _far(step) * math.exp(TAIL * farthest))
            if step.sample_rate > 0.5:
                cost += _far(step) * error
            if power * cost > LARGEST_EXPONENT:
                return math.inf
            total += count * math.log1p(_odds(step) * math.expm1(power * cost))
        return total / power

    return min(bound(float(power)) for power in np.geomspace(1.0, 15 / error, 80))


def _odds(step: SampledStep) -> float:
    """Bounds the posterior probability of the record's taking part, on average, without it (step 4)."""
    q = step.sample_rate
    return q / (1 - q) if q <= 0.5 else 1.0


def _far(step: SampledStep) -> float:
    """How many numbers a record can move by more than FAR."""
    return math.fsum(shift**2 for shift in step.release.shifts) / FAR**2 if max(step.release.shifts) > FAR else 0.0


def _reach(odds: float) -> float:
    """Standard deviations that a normal number exceeds, on either side, less than once in 2 * odds."""
    return max(0.0, -float(special.ndtri(1 / (4 * odds)))) if odds > 0.25 else 0.0


def _error_at(deviations: float) -> float:
    """What a number so far out adds to the error."""
    return AT_TAIL * math.exp(min(TAIL * (deviations - TAIL), 700.0))
