"""Likelihood ratios in closed form, for attacks that know the mechanism (docs/theory.md, section 7)."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy import special
from scipy.interpolate import RegularGridInterpolator

from dpulr.accounting.dominating_pairs import Array

_POINTS = 160


def gaussian_log_ratio(along: Array, noise: float) -> Array:
    """ln dN(1, noise^2) / dN(0, noise^2)."""
    ratio: Array = (along - 0.5) / noise**2
    return ratio


def hidden_log_ratio(along: Array, across: Array, dim: int, noise: float) -> Array:
    """ln of the ratio of y + noise, y uniform on a half sphere, to noise alone; from the part along the axis and the rest's length.

    It is interpolated: an attacker's score needs no certainty.
    """
    if dim == 1:
        return gaussian_log_ratio(along, noise)
    w, s, table = _table(dim, noise)
    point = np.stack([np.clip(along, w[0], w[-1]), np.clip(across, s[0], s[-1])], axis=-1)
    value: Array = RegularGridInterpolator((w, s), table)(point)
    return value


@lru_cache(maxsize=8)
def _table(dim: int, noise: float) -> tuple[Array, Array, Array]:
    spread = noise * math.sqrt(dim - 1)
    w = np.linspace(-6 * noise, 1 + 6 * noise, _POINTS)
    s = np.linspace(max(0.0, spread - 6 * noise), math.hypot(spread, 1.0) + 6 * noise, _POINTS)
    return w, s, hidden_log_ratio_exact(w[:, None], s[None, :], dim, noise)


def hidden_log_ratio_exact(along: Array, across: Array, dim: int, noise: float, nodes: int = 200) -> Array:
    """The same by quadrature over the height c of y: E_c exp(c w / t^2) 0F1(; (d-1)/2; (1 - c^2) s^2 / (4 t^4)) e^(-1/(2 t^2))."""
    x, weight = np.polynomial.legendre.leggauss(nodes)
    top = 1.0 if dim <= 12 else min(1.0, 9 / math.sqrt(dim))  # heights above have no mass to speak of
    c, weight = (x + 1) / 2 * top, weight / 2 * top
    density = weight * (1 - c**2) ** ((dim - 3) / 2)
    log_density = np.log(density / density.sum())
    inner = _log_0f1((dim - 1) / 2, (1 - c**2) * np.asarray(across)[..., None] ** 2 / (4 * noise**4))
    value: Array = special.logsumexp(np.asarray(along)[..., None] * c / noise**2 + inner + log_density, axis=-1) - 0.5 / noise**2
    return value


def _log_0f1(b: float, z: Array) -> Array:
    """ln 0F1(; b; z) for z >= 0: by its series (positive terms), summed relative to the largest term."""
    last = math.ceil(float(np.sqrt(z.max())) * 2 + 12 * float(z.max()) ** 0.25 + 40)
    log_z = np.log(np.maximum(z, 1e-300))
    term, largest, total = np.zeros_like(z), np.zeros_like(z), np.ones_like(z)
    for n in range(1, last + 1):
        term = term + log_z - math.log(n * (b + n - 1))
        rise = np.maximum(term, largest)
        total = total * np.exp(largest - rise) + np.exp(term - rise)
        largest = rise
    logarithm: Array = largest + np.log(total)
    return logarithm
