"""Quick approximations: where to start a search, how settings compare. Never used to certify (docs/theory.md, section 8)."""

from __future__ import annotations

import math

from scipy import special

from dpulr.accounting.events import GaussianRelease, HiddenDirectionRelease, Release


def equivalent_noise(release: Release) -> float:
    """The Gaussian noise multiplier s the release is worth: 1/s^2 = sum of rho^2/tau^2 + 1/(2 d K tau^4)."""
    if isinstance(release, GaussianRelease):
        return release.noise_multiplier
    if not isinstance(release, HiddenDirectionRelease):
        raise ValueError(f"{type(release).__name__} has no Gaussian equivalent.")
    total = math.fsum(noise**-2 for noise in release.gaussian)
    for site in release.sites:
        if site.dim == 1:
            total += site.noise_ratio**-2
            continue
        mean = mean_height(site.dim) ** 2 / site.noise_ratio**2
        total += mean + 1 / (2 * site.dim * site.repeats * site.noise_ratio**4)
    return 1 / math.sqrt(total)


def mean_height(dim: int) -> float:
    """rho = E|z_1| for z uniform on the unit sphere: the share of a record's signal that survives."""
    return math.exp(special.gammaln(dim / 2) - special.gammaln((dim + 1) / 2)) / math.sqrt(math.pi)


def likely_noise(target_epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """A noise multiplier near the target, from the central limit theorem for sampled Gaussians."""
    shift = likely_shift(target_epsilon, delta)
    return 1 / math.sqrt(math.log1p((shift / sample_rate) ** 2 / steps))


def likely_shift(target_epsilon: float, delta: float) -> float:
    """The shift between two unit normals that has this epsilon and delta."""

    low, high = -14.0, math.log(60.0)
    while high - low > 1e-3:
        middle = (low + high) / 2
        a, b = math.exp(middle) / 2, target_epsilon / math.exp(middle)
        # ln of the part subtracted is capped: where it overflows, the normals are far apart anyway
        lower = math.exp(min(target_epsilon + float(special.log_ndtr(-a - b)), 700.0))
        low, high = (middle, high) if float(special.ndtr(a - b)) - lower < delta else (low, middle)
    return math.exp(low)
