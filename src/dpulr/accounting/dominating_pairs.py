"""Finite pairs of distributions that dominate a mechanism's output pair (docs/theory.md, section 4).

P is the output without the record, Q with it. A pair is cut into cells; a cell knows its exact masses under P and Q
and an interval that holds the log-likelihood ratio ("loss") ln dQ/dP everywhere in it. Moving the mass of a cell to the
two ends of such an interval, with both masses kept, is a mean-preserving spread of the likelihood ratio under P. So it
can only raise every hockey-stick divergence, in both directions: one finite pair serves both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import special

from dpulr.accounting.events import Release

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

CUT = 9.3  # normal tails beyond this many standard deviations (7e-21) go to the infinite losses


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of a pair: loss between low and high, ln(q/p) = mean. q_only: mass of Q where P may have none."""

    low: Array
    high: Array
    mean: Array
    p: Array
    q: Array
    q_only: float = 0.0
    p_only: float = 0.0


@lru_cache(maxsize=16)
def pair_of(release: Release) -> Cells:
    """The dominating pair of a release, kept for the next step of its kind."""
    return release.pair()


def atoms(loss: Array, p: Array, q: Array, q_only: float = 0.0, p_only: float = 0.0) -> Cells:
    """Cells of one point each."""
    return Cells(loss, loss, loss, p, q, q_only, p_only)


def cells(low: Array, high: Array, p: Array, q: Array, q_only: float = 0.0, p_only: float = 0.0) -> Cells:
    """Cells from bounds and masses. What has no finite bounds counts as infinite loss; means are held in their bounds."""
    if not (np.isfinite(p).all() and np.isfinite(q).all()):
        raise ArithmeticError("The accountant met a probability that is not finite. Please report the setting.")
    keep = (p > 0) & (q > 0) & np.isfinite(low) & np.isfinite(high)
    q_only += float(q[(q > 0) & ~keep].sum())
    p_only += float(p[(p > 0) & ~keep].sum())
    low, high, p, q = low[keep], high[keep], p[keep], q[keep]
    mean = np.clip(np.log(q / p), low, high)
    return Cells(low, high, mean, p, q, q_only, p_only)


def normal_mass(edges: Array) -> Array:
    """Standard normal mass between consecutive edges (last axis), with small relative error in both tails."""
    tail = special.ndtr(-np.abs(edges))
    right = edges[..., :-1] >= 0
    left = edges[..., 1:] <= 0
    rise = np.diff(tail)
    mass: Array = np.where(left, rise, np.where(right, -rise, 1 - tail[..., 1:] - tail[..., :-1]))
    return mass


def subsampled(pair: Cells, sample_rate: float) -> Cells:
    """The pair (P, (1-r) P + r Q) of a Poisson-sampled record (docs/theory.md, section 4): losses map exactly."""
    if sample_rate == 1:
        return pair
    r = sample_rate
    p_only_loss = np.full(1, math.log1p(-r))
    held = np.full(1, pair.p_only)

    def joined(first: Array, second: Array) -> Array:
        return np.concatenate([first, second]) if pair.p_only > 0 else first

    return Cells(
        joined(sampled_loss(pair.low, r), p_only_loss),
        joined(sampled_loss(pair.high, r), p_only_loss),
        joined(sampled_loss(pair.mean, r), p_only_loss),
        joined(pair.p, held),
        joined((1 - r) * pair.p + r * pair.q, (1 - r) * held),
        q_only=r * pair.q_only,
    )


def sampled_loss(loss: Array, r: float) -> Array:
    """ln(1 - r + r e^loss), without overflow and without cancellation near loss = 0."""
    near = np.log1p(r * np.expm1(np.minimum(loss, 30.0)))
    far = math.log(r) + loss + np.log1p((1 - r) / r * np.exp(-np.maximum(loss, 30.0)))
    chosen: Array = np.where(loss < 30.0, near, far)
    return chosen


def spread(pair: Cells, step: float) -> tuple[Indices, Array, Array]:
    """Move every cell to the grid points that enclose it (docs/theory.md, section 4): indices, masses of P and of Q."""
    first = np.floor(pair.low / step).astype(np.int64)
    last = np.maximum(np.ceil(pair.high / step).astype(np.int64), first + 1)
    bottom, top = first * step, last * step
    whole = np.expm1(bottom - top)
    share_p = np.clip(np.expm1(pair.mean - top) / whole, 0.0, 1.0)  # of P's mass, to the lower point
    share_q = np.clip(np.expm1(bottom - pair.mean) / whole, 0.0, 1.0)  # of Q's mass, to the upper point
    index = np.concatenate([first, last])
    p = np.concatenate([pair.p * share_p, pair.p * np.exp(pair.mean - top) * share_q])
    q = np.concatenate([pair.q * np.exp(bottom - pair.mean) * share_p, pair.q * share_q])
    return index, p, q
