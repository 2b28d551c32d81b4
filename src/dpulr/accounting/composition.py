"""Composition of privacy losses by Fourier transform, with every error on the safe side (docs/theory.md, section 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import fft

from dpulr.accounting.dominating_pairs import Array, Cells, Indices, spread

ADDED_VARIANCE = 0.00025  # the grid may add this share to the variance of the loss
FAINTEST = -110.0  # logarithm of a transform's modulus that counts as zero
FEWEST_BINS, MOST_BINS = 1 << 15, 1 << 22
TAIL_SHARE = 1e-4  # share of delta spent on what lies outside the window, per side and per cause
ERROR_SHARE = 1e-2  # share of delta that the transform's error may take before extended precision is tried
STAGES = 110  # a transform value errs by at most this many units of rounding per unit of mass: 5 * log2(2^22) (section 5)


class _TooManyBinsError(Exception):
    """The window holds more grid points than fit; a coarser grid is tried."""


@dataclass(frozen=True, slots=True)
class Curve:
    """delta as a function of epsilon, in one direction. `always` is the mass that counts whatever epsilon is."""

    loss: Array
    mass: Array
    always: float

    def delta(self, epsilon: float) -> float:
        """The hockey-stick divergence at e^epsilon (an upper bound of it)."""
        above = self.loss > epsilon
        return min(1.0, self.always - float(np.dot(np.expm1(epsilon - self.loss[above]), self.mass[above])))

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon >= 0 with delta(epsilon) <= delta; infinite if there is none."""
        room = delta - self.always
        if room <= 0:
            return math.inf
        if delta >= self.delta(0.0):
            return 0.0
        low, high = int(np.searchsorted(self.loss, 0.0, side="right")) - 1, len(self.loss) - 1
        while high - low > 1:  # the divergence exceeds delta at `low` (or at 0), not at `high`
            middle = (low + high) // 2
            low, high = (low, middle) if self.delta(float(self.loss[middle])) <= delta else (middle, high)
        # Between the two it is linear in e^epsilon.
        base = float(self.loss[high])
        above = float(self.mass[high:].sum())
        weighted = float(np.dot(self.mass[high:], np.exp(base - self.loss[high:])))
        if weighted <= 0 or above <= room:
            return max(base, 0.0)
        return min(max(base + math.log((above - room) / weighted), 0.0), base)


@dataclass(frozen=True, slots=True)
class Curves:
    """Both directions: `remove` has the record in the upper distribution, `add` in the lower one."""

    remove: Curve
    add: Curve


def compose(parts: Sequence[tuple[Cells, int]], delta: float, refine: float = 1.0) -> Curves:
    """Losses of the product of all parts, each taken `count` times. delta only steers what may be cut off."""
    parts = [(cells, count) for cells, count in parts if count]
    step = _step(parts, refine)
    while True:
        try:
            return _compose(parts, step, delta)
        except _TooManyBinsError:
            step *= 2  # looser, never below the truth


def _compose(parts: Sequence[tuple[Cells, int]], step: float, delta: float) -> Curves:
    grids = [(*spread(cells, step), count) for cells, count in parts]
    q_only = sum(count * cells.q_only for cells, count in parts)
    p_only = sum(count * cells.p_only for cells, count in parts)
    upper_q = [(k, q, 1 - cells.q_only, n) for (k, _, q, n), (cells, _) in zip(grids, parts, strict=True)]
    upper_p = [(-k, p, 1 - cells.p_only, n) for (k, p, _, n), (cells, _) in zip(grids, parts, strict=True)]
    return Curves(_curve(upper_q, step, q_only, delta), _curve(upper_p, step, p_only, delta))


def _step(parts: Sequence[tuple[Cells, int]], refine: float) -> float:
    """Grid spacing: it adds about step^2 / 6 to the variance of each part."""
    variance = 0.0
    for cells, count in parts:
        mean = float(np.dot(cells.q, cells.mean))
        variance += count * float(np.dot(cells.q, (cells.mean - mean) ** 2))
    number = sum(count for _, count in parts)
    from_variance = math.sqrt(6 * ADDED_VARIANCE * variance / number)
    from_window = 20 * math.sqrt(variance) / FEWEST_BINS
    return max(min(from_variance, from_window), 1e-300) / refine


def _curve(parts: Sequence[tuple[Indices, Array, float, int]], step: float, always: float, delta: float) -> Curve:
    """Compose one direction. parts: grid indices, masses of the upper distribution, their known total, counts."""
    trimmed, totals = [], []
    for index, mass, total, count in parts:
        kept_index, kept_mass, cut = _without_far_tail(*_gathered(index, mass), TAIL_SHARE * delta / count / len(parts))
        always += count * cut
        if not len(kept_index):
            return Curve(np.zeros(1), np.zeros(1), 1.0)  # nothing is left but infinite losses
        trimmed.append((kept_index, kept_mass, count))
        totals.append(total - cut)
    low, high, outside = _window(trimmed, step, TAIL_SHARE * delta)
    always += outside
    size = fft.next_fast_len(max(high - low + 1, FEWEST_BINS), real=True)
    folded: list[tuple[Array, float, int]] = [
        (np.bincount(index % size, weights=mass, minlength=size).astype(np.float64), total, count)
        for (index, mass, count), total in zip(trimmed, totals, strict=True)
    ]
    composed, error = _convolve(folded, ERROR_SHARE * delta)
    loss = step * np.arange(low, low + size, dtype=np.float64)
    return Curve(loss, np.maximum(np.roll(composed, -(low % size)), 0.0), always + error)


def _convolve(folded: Sequence[tuple[Array, float, int]], allowed: float) -> tuple[Array, float]:
    """Circular convolution of all powers, and a bound on its total error. Extended precision where that bound needs it."""
    everywhere = np.arange(len(folded[0][0]) // 2 + 1)
    composed, error, decay = _convolve_in(np.dtype(np.float64), folded, everywhere)
    if error > allowed and np.finfo(np.longdouble).eps < np.finfo(np.float64).eps:
        composed, error, _ = _convolve_in(np.dtype(np.longdouble), folded, np.flatnonzero(decay > FAINTEST))
    return composed, error


def _convolve_in(real: np.dtype[Any], folded: Sequence[tuple[Array, float, int]], live: Indices) -> tuple[Array, float, Array]:
    """The convolution in one precision, its error bound, and the logarithm of the modulus of its transform.

    folded: masses, what they must add up to at least (rounding may have lost some), counts. live: frequencies to
    compute; the transform's modulus at the others is below e^FAINTEST.
    """
    size = len(folded[0][0])
    rounding = float(STAGES * np.finfo(real).eps / 2)
    decay, growth = np.zeros(size // 2 + 1), np.zeros(size // 2 + 1)  # the exact modulus is at most e^(decay + growth)
    logarithm: Any = 0.0
    for mass, total, count in folded:
        held = mass.astype(real)
        value = fft.rfft(held * max(real.type(1), total / held.sum()))
        modulus = np.maximum(np.abs(value), 1e-300).astype(np.float64)
        decay += count * np.log(modulus)
        growth += count * np.log1p(rounding / modulus)
        logarithm = logarithm + count * np.log(np.where(modulus[live] > 1e-300, value[live], real.type(1e-300)))
    transform = np.zeros(size // 2 + 1, dtype=np.result_type(real, np.complex128))
    transform[live] = np.exp(logarithm)
    # The L1 error of the result is at most the L2 error of its transform (section 5); the spectrum has two halves.
    excess = np.exp(np.minimum(decay + growth, 0.0)) * -np.expm1(-growth)
    error = math.sqrt(2.0) * float(np.linalg.norm(excess) + rounding * np.linalg.norm(np.abs(transform).astype(np.float64)))
    return fft.irfft(transform, size).astype(np.float64), error + size * math.exp(FAINTEST), decay


def _without_far_tail(index: Indices, mass: Array, allowed: float) -> tuple[Indices, Array, float]:
    """Drop the largest losses as far as their mass is within `allowed`; their mass is returned."""
    running = np.cumsum(mass[::-1])
    cut = int(np.searchsorted(running, allowed, side="right"))
    gone = float(running[cut - 1]) if cut else 0.0
    return index[: len(index) - cut], mass[: len(index) - cut], gone


def _gathered(index: Indices, mass: Array) -> tuple[Indices, Array]:
    """Each grid point with mass once, in rising order."""
    if not len(index):
        return index, mass
    first = int(index.min())
    if int(index.max()) - first < MOST_BINS:
        points, place = None, index - first
    else:
        points, place = np.unique(index, return_inverse=True)
    total = np.bincount(place, weights=mass).astype(np.float64)
    held = np.flatnonzero(total)
    return (held + first if points is None else points[held]), total[held]


def _window(parts: Sequence[tuple[Indices, Array, int]], step: float, allowed: float) -> tuple[int, int, float]:
    """Grid interval outside which the composed loss has mass at most `allowed` on either side (Chernoff)."""
    mean = variance = 0.0
    for index, mass, count in parts:
        total = float(mass.sum())
        centre = float(np.dot(index, mass)) / total
        mean += count * centre
        variance += count * float(np.dot((index - centre) ** 2, mass)) / total
    spread_ = math.sqrt(variance) + 1.0
    slack = math.log(1 / allowed)
    highest = sum(count * int(index.max()) for index, _, count in parts)
    lowest = sum(count * int(index.min()) for index, _, count in parts)
    upper, lower = float(highest), float(lowest)
    logs = [(index, np.log(mass), count) for index, mass, count in parts]
    for z in np.geomspace(0.05, 30.0, 24):
        rate = z / spread_
        up = sum(count * _log_moment(index, log_mass, rate) for index, log_mass, count in logs)
        down = sum(count * _log_moment(index, log_mass, -rate) for index, log_mass, count in logs)
        upper = min(upper, (up + slack) / rate)
        lower = max(lower, -(down + slack) / rate)
    low, high = math.floor(lower), math.ceil(upper)
    if high - low + 1 > MOST_BINS:
        raise _TooManyBinsError
    return low, high, allowed


def _log_moment(index: Indices, log_mass: Array, rate: float) -> float:
    power = rate * index + log_mass
    top = float(power.max())
    return top + math.log(float(np.exp(power - top).sum()))
