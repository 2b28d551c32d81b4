"""Quick approximations: where to start a search, how settings compare. Never used to certify (docs/theory.md, section 8)."""

from __future__ import annotations

import math
from functools import cache

from scipy import special

from dpulr import search
from dpulr.accounting.events import HiddenDirectionRelease


def mean_overlap(dim: int) -> float:
    """rho = E|z_1| for z uniform on the unit sphere: how far a kept sign points along the gradient on average."""
    return math.exp(math.lgamma(dim / 2) - math.lgamma((dim + 1) / 2)) / math.sqrt(math.pi)


def hidden_direction_noise(release: HiddenDirectionRelease) -> float:
    """The Gaussian noise multiplier s that the release is worth: 1/s^2 = sum of rho^2/tau^2 + 1/(2 d K tau^4)."""
    total = math.fsum(noise**-2 for noise in release.gaussian)
    for site in release.sites:
        if site.dim == 1:
            total += site.noise_ratio**-2
            continue
        mean = mean_overlap(site.dim) ** 2 / site.noise_ratio**2
        total += mean + 1 / (2 * site.dim * site.repeats * site.noise_ratio**4)
    return 1 / math.sqrt(total)


def likely_noise(target_epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """A noise multiplier near the target, from the central limit theorem for sampled Gaussians."""
    shift = likely_shift(target_epsilon, delta)
    return 1 / math.sqrt(math.log1p((shift / sample_rate) ** 2 / steps))


@cache
def likely_shift(target_epsilon: float, delta: float) -> float:
    """The shift between two unit normals that has this epsilon and delta."""

    def is_below(log_shift: float) -> bool:
        a, b = math.exp(log_shift) / 2, target_epsilon / math.exp(log_shift)
        # ln of the part subtracted is capped: where it overflows, the normals are far apart anyway
        lower = math.exp(min(target_epsilon + float(special.log_ndtr(-a - b)), 700.0))
        return float(special.ndtr(a - b)) - lower < delta

    low, _ = search.boundary(is_below, -14.0, math.log(60.0), width=1e-3)
    return math.exp(low)
