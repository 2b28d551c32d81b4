"""Composition of privacy losses by Fourier transform, with every error on the safe side (docs/theory.md, section 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from scipy import fft

from dpulr import search
from dpulr.accounting.dominating_pairs import Array, Cells, Indices, spread

ADDED_VARIANCE = 0.00025  # the grid may add this share to the variance of the loss
FAINTEST = -110.0  # logarithm of a transform's modulus that counts as zero
FEWEST_BINS, MOST_BINS = 1 << 15, 1 << 22
LARGEST_INDEX = 2.0**52  # of a grid point: a float holds it exactly
TAIL_SHARE = 1e-4  # share of delta spent on what lies outside the window, per side and per cause
ERROR_SHARE = 1e-2  # share of delta that the transform's error may take before extended precision is tried
STAGES = 110  # a transform value errs by at most this many units of rounding per unit of mass: 5 * log2(2^22) (section 5)

Value = TypeVar("Value", float, Array)


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
        return min(1.0, _finite(self.always - float(np.dot(np.expm1(epsilon - self.loss[above]), self.mass[above]))))

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon >= 0 with delta(epsilon) <= delta; infinite if there is none."""
        room = delta - self.always
        if room <= 0:
            return math.inf
        if delta >= self.delta(0.0):
            return 0.0
        # The divergence exceeds delta up to some grid point (or at 0), and no longer at the last one.
        start = int(np.searchsorted(self.loss, 0.0, side="right")) - 1
        high = 1 + search.last_true(lambda k: self.delta(float(self.loss[k])) > delta, start, len(self.loss) - 1)
        # Between the two it is linear in e^epsilon.
        base = float(self.loss[high])
        above = float(self.mass[high:].sum())
        weighted = float(np.dot(self.mass[high:], np.exp(base - self.loss[high:])))
        if weighted <= 0 or above <= room:
            return max(base, 0.0)
        return min(max(_finite(base + math.log((above - room) / weighted)), 0.0), base)


@dataclass(frozen=True, slots=True)
class Curves:
    """Both directions: `remove` has the record in the upper distribution, `add` in the lower one."""

    remove: Curve
    add: Curve


@dataclass(frozen=True, slots=True)
class _Part:
    """A loss distribution on the grid, taken `count` times: indices of grid points and their masses.

    total: what the masses must add up to at least; rounding may have lost some.
    """

    index: Indices
    mass: Array
    total: float
    count: int

    def gathered(self) -> _Part:
        """Each grid point with mass once, in rising order."""
        if not len(self.index):
            return self
        first = int(self.index.min())
        if int(self.index.max()) - first < MOST_BINS:
            points, place = None, self.index - first
        else:
            points, place = np.unique(self.index, return_inverse=True)
        mass = np.bincount(place, weights=self.mass).astype(np.float64)
        held = np.flatnonzero(mass)
        return replace(self, index=held + first if points is None else points[held], mass=mass[held])

    def without_far_tail(self, allowed: float) -> tuple[_Part, float]:
        """The largest losses dropped as far as their mass is within `allowed`, and that mass."""
        running = np.cumsum(self.mass[::-1])
        cut = int(np.searchsorted(running, allowed, side="right"))
        gone = float(running[cut - 1]) if cut else 0.0
        kept = len(self.index) - cut
        return replace(self, index=self.index[:kept], mass=self.mass[:kept], total=self.total - gone), gone

    def folded(self, size: int) -> Array:
        """The masses on a circle of `size` points."""
        return np.bincount(self.index % size, weights=self.mass, minlength=size).astype(np.float64)


def compose(parts: Sequence[tuple[Cells, int]], delta: float, refine: float = 1.0) -> Curves:
    """Losses of the product of all parts, each taken `count` times. delta only steers what may be cut off."""
    parts = [(cells, count) for cells, count in parts if count]
    for cells, _ in parts:
        for values in (cells.low, cells.high, cells.mean, cells.p, cells.q):
            _finite(values)
        _finite(cells.q_only + cells.p_only)
    step = _step(parts, refine)
    while True:
        try:
            return _compose(parts, step, delta)
        except _TooManyBinsError:
            step *= 2  # looser, never below the truth


def _compose(parts: Sequence[tuple[Cells, int]], step: float, delta: float) -> Curves:
    upper_q, upper_p = [], []
    for cells, count in parts:
        index, p, q = spread(cells, step)
        upper_q.append(_Part(index, q, 1 - cells.q_only, count))
        upper_p.append(_Part(-index, p, 1 - cells.p_only, count))
    q_only = sum(count * cells.q_only for cells, count in parts)
    p_only = sum(count * cells.p_only for cells, count in parts)
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
    ends = [end for cells, _ in parts for end in (cells.low, cells.high) if len(end)]
    farthest = max((float(np.abs(end).max()) for end in ends), default=0.0)
    return max(min(from_variance, from_window) / refine, farthest / LARGEST_INDEX, 1e-300)


def _curve(parts: Sequence[_Part], step: float, always: float, delta: float) -> Curve:
    """Compose one direction, from the masses of its upper distribution."""
    trimmed = []
    for part in parts:
        _finite(part.mass)
        kept, cut = part.gathered().without_far_tail(TAIL_SHARE * delta / part.count / len(parts))
        always += part.count * cut
        if not len(kept.index):
            return Curve(np.zeros(1), np.zeros(1), 1.0)  # nothing is left but infinite losses
        trimmed.append(kept)
    low, high = _window(trimmed, TAIL_SHARE * delta)
    always += TAIL_SHARE * delta
    size = fft.next_fast_len(max(high - low + 1, FEWEST_BINS), real=True)
    composed, error = _convolve(trimmed, size, ERROR_SHARE * delta)
    loss = step * np.arange(low, low + size, dtype=np.float64)
    return Curve(_finite(loss), np.maximum(np.roll(_finite(composed), -(low % size)), 0.0), _finite(always + error))


def _convolve(parts: Sequence[_Part], size: int, allowed: float) -> tuple[Array, float]:
    """Circular convolution of all powers, and a bound on its total error. Extended precision where that bound needs it."""
    composed, error, decay = _convolve_in(np.dtype(np.float64), parts, size, np.arange(size // 2 + 1))
    if error > allowed and np.finfo(np.longdouble).eps < np.finfo(np.float64).eps:
        composed, error, _ = _convolve_in(np.dtype(np.longdouble), parts, size, np.flatnonzero(decay > FAINTEST))
    return composed, error


def _convolve_in(real: np.dtype[Any], parts: Sequence[_Part], size: int, live: Indices) -> tuple[Array, float, Array]:
    """The convolution in one precision, its error bound, and the logarithm of the modulus of its transform.

    live: frequencies to compute; the transform's modulus at the others is below e^FAINTEST.
    """
    rounding = float(STAGES * np.finfo(real).eps / 2)
    decay, growth = np.zeros(size // 2 + 1), np.zeros(size // 2 + 1)  # the exact modulus is at most e^(decay + growth)
    logarithm: Any = 0.0
    for part in parts:
        held = part.folded(size).astype(real)
        value = fft.rfft(held * max(real.type(1), part.total / held.sum()))
        modulus = np.maximum(np.abs(value), 1e-300).astype(np.float64)
        decay += part.count * np.log(modulus)
        growth += part.count * np.log1p(rounding / modulus)
        logarithm = logarithm + part.count * np.log(np.where(modulus[live] > 1e-300, value[live], real.type(1e-300)))
    transform = np.zeros(size // 2 + 1, dtype=np.result_type(real, np.complex128))
    transform[live] = np.exp(logarithm)
    # The L1 error of the result is at most the L2 error of its transform (section 5); the spectrum has two halves.
    excess = np.exp(np.minimum(decay + growth, 0.0)) * -np.expm1(-growth)
    error = math.sqrt(2.0) * float(np.linalg.norm(excess) + rounding * np.linalg.norm(np.abs(transform).astype(np.float64)))
    return fft.irfft(transform, size).astype(np.float64), error + size * math.exp(FAINTEST), decay


def _window(parts: Sequence[_Part], allowed: float) -> tuple[int, int]:
    """Grid interval outside which the composed loss has mass at most `allowed` on either side (Chernoff)."""
    variance = 0.0
    for part in parts:
        total = float(part.mass.sum())
        centre = float(np.dot(part.index, part.mass)) / total
        variance += part.count * float(np.dot((part.index - centre) ** 2, part.mass)) / total
    deviation = math.sqrt(variance) + 1.0
    slack = math.log(1 / allowed)
    upper = float(sum(part.count * int(part.index.max()) for part in parts))
    lower = float(sum(part.count * int(part.index.min()) for part in parts))
    logs = [(part.index, np.log(part.mass), part.count) for part in parts]
    for z in np.geomspace(0.05, 30.0, 24):
        rate = z / deviation
        up = sum(count * _log_moment(index, log_mass, rate) for index, log_mass, count in logs)
        down = sum(count * _log_moment(index, log_mass, -rate) for index, log_mass, count in logs)
        upper = min(upper, (up + slack) / rate)
        lower = max(lower, -(down + slack) / rate)
    low, high = math.floor(lower), math.ceil(upper)
    if high - low + 1 > MOST_BINS:
        raise _TooManyBinsError
    return low, high


def _finite(value: Value) -> Value:
    """Numerical trouble is an error: a comparison with what is not a number would let it pass as a small epsilon."""
    if not np.isfinite(value).all():
        raise ArithmeticError("The accountant met a value that is not finite. Please report the setting.")
    return value


def _log_moment(index: Indices, log_mass: Array, rate: float) -> float:
    power = rate * index + log_mass
    top = float(power.max())
    return top + math.log(float(np.exp(power - top).sum()))
