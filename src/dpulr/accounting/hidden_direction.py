"""The hidden-direction pair: N(0, t^2 I) against E_y N(y, t^2 I), y uniform on a half sphere (docs/theory.md, sections 6 and 7).

Coordinates: w, along the axis of the half sphere, and x = |rest|^2 / t^2. The likelihood ratio grows in both. Given the height c of
y on the axis, w is normal and x is a Poisson mixture of chi-squares, so every mass and every likelihood ratio below is a
finite sum of positive terms; heights are rounded up to a grid, which can only raise the divergences.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy import special

from dpulr.accounting.composition import compose
from dpulr.accounting.dominating_pairs import CUT, Array, Cells, atoms, cells, normal_mass
from dpulr.accounting.events import HiddenDirectionRelease
from dpulr.accounting.gaussian import gaussian_cells

WIDTH = 0.05  # of a cell, in standard deviations
HEIGHTS, TAIL_HEIGHTS = 3200, 500  # grid points of the height, below and above the one exceeded with share BEND
BEND = 3e-3
SMALLEST_NOISE = 0.012  # below it the (larger) price of an unhidden direction is charged
CHUNK = 512  # heights handled at a time, for memory
NEGLIGIBLE = 1e-21
HEIGHT_MARGIN = 1e-9  # relative, above the error of the incomplete beta function
PRODUCT_DELTA = 1e-15  # what the product of layers may cut off lies far below any delta of a run


def release_pair(release: HiddenDirectionRelease) -> Cells:
    """The product of all sites, directions and exact parts: composed before sampling (section 7)."""
    counts: dict[tuple[int, float], int] = {}
    for site in release.sites:
        key = (site.dim, site.draw_noise)
        counts[key] = counts.get(key, 0) + site.repeats
    parts = [(site_cells(*key), count) for key, count in counts.items()]
    if release.gaussian:
        parts.append((gaussian_cells(1 / math.sqrt(math.fsum(noise**-2 for noise in release.gaussian))), 1))
    return parts[0][0] if len(parts) == 1 and parts[0][1] == 1 else product(parts)


def product(parts: list[tuple[Cells, int]]) -> Cells:
    """One finite pair for the product: Q's masses where the loss is positive, P's where it is not, for small errors."""
    both = compose(parts, PRODUCT_DELTA)
    up = both.remove.loss > 0
    down = both.add.loss >= 0
    loss_up, q_up = both.remove.loss[up], both.remove.mass[up]
    loss_down, p_down = -both.add.loss[down], both.add.mass[down]
    loss = np.concatenate([loss_down[::-1], loss_up])
    p = np.concatenate([p_down[::-1], q_up * np.exp(-loss_up)])
    q = np.concatenate([(p_down * np.exp(loss_down))[::-1], q_up])
    keep = (p > 0) & (q > 0)
    return atoms(loss[keep], p[keep], q[keep], both.remove.always, both.add.always)


def site_cells(dim: int, noise: float) -> Cells:
    """Cells of one direction with noise t. In one dimension, or with hardly any noise, those of a direction that is known."""
    if dim == 1 or noise < SMALLEST_NOISE:
        return gaussian_cells(noise)  # d = 1 is this pair; otherwise it dominates (joint convexity)
    return half_sphere_cells(dim, noise)


@lru_cache(maxsize=16)
def half_sphere_cells(dim: int, noise: float) -> Cells:
    """Cells of one draw: y uniform on the upper half of the unit sphere, noise t."""
    half = (dim - 1) / 2
    height, weight, beyond = cap_heights(dim)
    counts = _poisson_counts((1 - height[0] ** 2) / (2 * noise**2))
    reach = CUT + height[-1] / noise
    w_edges = np.linspace(-CUT, reach, math.ceil((CUT + reach) / WIDTH) + 1)
    x_edges = _x_edges(half, counts)
    masses, ratios, scale = _mixtures(height, weight, noise, w_edges, counts)
    chi = _chi_mass(half + counts[:, None], x_edges)
    p = np.outer(normal_mass(w_edges), chi[0])
    q = masses @ chi
    corner = _log_ratio(ratios, scale, half, counts, x_edges)
    return cells(
        corner[:-1, :-1].ravel(),
        corner[1:, 1:].ravel(),
        p.ravel(),
        q.ravel(),
        q_only=beyond + NEGLIGIBLE + _outside(half + counts, x_edges, masses.sum(axis=0)),
        p_only=_outside(np.array([half]), x_edges, np.ones(1)),
    )


def _outside(halves: Array, x_edges: Array, weight: Array) -> float:
    """Mass beyond the edges of w or of x, for a mixture of chi-squares."""
    below, above = special.gammainc(halves, x_edges[0] / 2), special.gammaincc(halves, x_edges[-1] / 2)
    return 2 * float(special.ndtr(-CUT)) + float(np.dot(weight, below + above))


def cap_heights(dim: int) -> tuple[Array, Array, float]:
    """Height of a uniform point of the half sphere, rounded up to a grid: grid, masses, and the mass above the grid."""
    a = (dim - 1) / 2
    bend, top = _height_at(a, math.log(BEND)), _height_at(a, math.log(NEGLIGIBLE))
    edges = np.concatenate([np.linspace(0.0, bend, HEIGHTS + 1), np.linspace(bend, top, TAIL_HEIGHTS + 1)[1:]])
    survival = special.betainc(a, 0.5, (1 - edges) * (1 + edges)) * (1 + HEIGHT_MARGIN)
    survival = np.minimum.accumulate(np.minimum(survival, 1.0))
    survival[0] = 1.0
    return edges[1:], survival[:-1] - survival[1:], float(survival[-1])


def _height_at(a: float, log_share: float) -> float:
    """The height exceeded with (about) this share of the half sphere. Only places the grid: its error is harmless."""
    return math.sqrt(max(0.0, 1 - float(special.betaincinv(a, 0.5, math.exp(log_share)))))


def _poisson_counts(mean: float) -> Array:
    """Counts beyond which a Poisson variable of at most this mean has negligible mass (it is counted as Q's alone)."""
    last = math.ceil(mean + 5 * math.sqrt(mean) + 5)
    while special.pdtrc(last, mean) > NEGLIGIBLE:
        last += 1 + math.ceil(math.sqrt(mean))
    return np.arange(last + 1, dtype=np.float64)


def _x_edges(half: float, counts: Array) -> Array:
    """Edges in x = (radius / t)^2, evenly spaced in the radius."""
    low = math.sqrt(2 * float(special.gammaincinv(half, 1e-19)))
    # A chi-square with the most extra degrees of freedom, cut at 1e-8, reaches beyond all that matters.
    high = math.sqrt(2 * float(special.gammainccinv(half + counts[-1], 1e-8)))
    high = max(high, math.sqrt(2 * float(special.gammainccinv(half, 1e-19))))
    count = math.ceil((high - low) / WIDTH * math.sqrt(2))
    radius = np.linspace(low, high, count + 1)
    return radius**2


def _chi_mass(half: Array, x_edges: Array) -> Array:
    """Mass of each cell under chi-square with 2 * half degrees of freedom, from whichever tail is the smaller."""
    lower = special.gammainc(half, x_edges / 2)
    upper = special.gammaincc(half, x_edges / 2)
    mass: Array = np.where(lower[:, 1:] < 0.5, np.diff(lower), -np.diff(upper))
    return np.maximum(mass, 0.0)


def _mixtures(height: Array, weight: Array, noise: float, w_edges: Array, n: Array) -> tuple[Array, Array, Array]:
    """Sums over heights, jointly with each Poisson count: mass of each w-cell, ratio at each w-edge over e^scale, scale."""
    masses, ratios = np.zeros((len(w_edges) - 1, len(n))), np.zeros((len(w_edges), len(n)))
    top = np.clip(w_edges, 0.0, height[-1] / noise)
    scale = top * w_edges - top**2 / 2  # at least the largest exponent below
    for start in range(0, len(height), CHUNK):
        c = height[start : start + CHUNK, None]
        mean = (1 - c) * (1 + c) / (2 * noise**2)
        joint = np.exp(special.xlogy(n, mean) - mean - special.gammaln(n + 1)) * weight[start : start + CHUNK, None]
        masses += normal_mass(w_edges - c / noise).T @ joint
        ratios += np.exp(c / noise * w_edges - (c / noise) ** 2 / 2 - scale).T @ joint
    return masses, ratios, scale


def _log_ratio(ratios: Array, scale: Array, half: float, n: Array, x_edges: Array) -> Array:
    """ln dQ/dP at every corner. Given n counts, x has the density of P times (x/2)^n / (half (half+1) ... (half+n-1))."""
    logs = np.vstack([np.zeros_like(x_edges), np.cumsum(np.log(x_edges / 2 / (half + n[:-1, None])), axis=0)])
    largest = logs.max(axis=0)
    with np.errstate(divide="ignore"):
        value: Array = np.log(ratios @ np.exp(logs - largest)) + largest + scale[:, None]
    return value
