"""Independent numbers to check the accountant with. Nothing here is shared with the package.

The package bounds cell masses by finite Poisson sums and composes on a grid. Here likelihood ratios come from Bessel
functions and Gauss-Legendre quadrature over the angle, and steps are composed by a contour integral of the moment
generating function at its saddle point: no grid of losses, no rounding direction.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import optimize, special


def panels(edges: np.ndarray, order: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Legendre nodes and weights on consecutive intervals."""
    x, w = np.polynomial.legendre.leggauss(order)
    half = np.diff(edges)[:, None] / 2
    middle = (edges[1:] + edges[:-1])[:, None] / 2
    return (middle + half * x).ravel(), (half * w).ravel()


def log_bessel(order: float, z: np.ndarray) -> np.ndarray:
    """ln I_order(z): scipy for small orders, Debye's expansion for large ones."""
    if order < 60:
        return np.log(special.ive(order, z)) + z
    x = z / order
    root = np.sqrt(1 + x**2)
    p = 1 / root
    eta = root + np.log(x / (1 + root))
    u1 = (3 * p - 5 * p**3) / 24
    u2 = (81 * p**2 - 462 * p**4 + 385 * p**6) / 1152
    u3 = (30375 * p**3 - 369603 * p**5 + 765765 * p**7 - 425425 * p**9) / 414720
    series = np.log1p(u1 / order + u2 / order**2 + u3 / order**3)
    return order * eta - 0.5 * np.log(2 * np.pi * order) - 0.25 * np.log1p(x**2) + series


def log_hyp0f1(b: float, z: np.ndarray) -> np.ndarray:
    """ln 0F1(; b; z^2 / 4): by Bessel functions, and by its power series where the argument is small."""
    large = np.maximum(z, 1e-3)
    by_bessel = special.gammaln(b) + (b - 1) * (math.log(2) - np.log(large)) + log_bessel(b - 1, large)
    x = np.minimum(z**2 / 4, b)
    term, total = np.ones_like(x), np.zeros_like(x)
    for n in range(1, 25):
        term = term * x / (n * (b + n - 1))
        total = total + term
    return np.where(z**2 / 4 < b, np.log1p(total), by_bessel)


def heights(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Quadrature of the height c = cos(angle) of a uniform point on the half sphere."""
    if dim == 1:
        return np.ones(1), np.ones(1)
    last = math.pi / 2
    width = min(last, 13 / math.sqrt(dim))
    angle, weight = panels(np.linspace(last - width, last, 9), 24)
    log_density = (dim - 2) * np.log(np.sin(angle))
    density = weight * np.exp(log_density - log_density.max())
    return np.cos(angle), density / density.sum()


def log_ratio(dim: int, noise: float, w: np.ndarray, s: np.ndarray) -> np.ndarray:
    """ln of the likelihood ratio at axis coordinates w and radii s (a grid: shape len(w) x len(s))."""
    c, weight = heights(dim)
    if dim == 1:
        return ((w - 0.5) / noise**2)[:, None] + np.zeros((1, len(s)))
    radial = log_hyp0f1((dim - 1) / 2, np.sqrt(np.maximum(1 - c**2, 0))[:, None] * s / noise**2)  # c x s
    with np.errstate(divide="ignore"):
        radial = radial + np.log(weight)[:, None]
    out = np.empty((len(w), len(s)))
    for i, value in enumerate(w):
        exponent = c[:, None] * value / noise**2 + radial
        top = exponent.max(axis=0)
        out[i] = top + np.log(np.exp(exponent - top).sum(axis=0))
    return out - 1 / (2 * noise**2)


def nodes(dim: int, noise: float, fine: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Quadrature nodes of the pair: ln LR and the mass under P; the likelihood ratio integrates to 1."""
    reach = 1 if dim < 30 else min(1.0, 12 / math.sqrt(dim))
    w, ww = panels(np.linspace(-9 * noise, reach + 9 * noise, 14 * fine + 1), 10)
    density_w = ww * np.exp(-0.5 * (w / noise) ** 2) / (noise * math.sqrt(2 * math.pi))
    if dim == 1:
        s, density_s = np.zeros(1), np.ones(1)
    else:
        k = dim - 1
        low = max(0.0, math.sqrt(k) - 9)
        high = math.sqrt(k + 1 / noise**2) + 9
        r, wr = panels(np.linspace(low, high, 14 * fine + 1), 10)
        log_chi = (k - 1) * np.log(r) - r**2 / 2 - (k / 2 - 1) * math.log(2) - special.gammaln(k / 2)
        s, density_s = r * noise, wr * np.exp(log_chi)
    loss = log_ratio(dim, noise, w, s)
    p = np.outer(density_w, density_s)
    p /= p.sum()
    loss = loss - math.log(float((p * np.exp(loss)).sum()))
    keep = p > 1e-60
    return loss[keep], p[keep]


def tilted_density(parts: list[tuple[np.ndarray, np.ndarray, int]], tilt: float, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Density of the product's loss under p * e^(tilt * loss), by its characteristic function and the inverse."""
    centre = spread = 0.0
    for loss, p, count in parts:
        mass = p * np.exp(tilt * loss)
        mean = float(np.dot(mass, loss))
        centre += count * mean
        spread += count * float(np.dot(mass, (loss - mean) ** 2))
    span = 26 * math.sqrt(spread)
    grid = centre + span * (np.arange(points) / points - 0.5)
    half = 2 * np.pi * np.arange(points // 2 + 1) / span
    transform = np.zeros(points // 2 + 1, dtype=complex)
    for i, u in enumerate(half):
        value = math.prod(complex(np.dot(p, np.exp((tilt - 1j * u) * loss))) ** count for loss, p, count in parts)
        if abs(value) < 1e-13:
            break  # what follows is below the noise, or beyond what the nodes resolve
        transform[i] = value
    density = np.fft.irfft(transform * np.exp(1j * half * grid[0]), points)
    keep = density > 1e-13 * density.max()
    return grid[keep], density[keep]


def product_nodes(parts: list[tuple[np.ndarray, np.ndarray, int]], points: int = 8192) -> tuple[np.ndarray, np.ndarray]:
    """Loss nodes of a product and their masses under P: from Q's density where the loss is positive, else from P's."""
    up, q = tilted_density(parts, 1.0, points)
    down, p = tilted_density(parts, 0.0, points)
    # A smooth partition of unity joins the two, so that both sums keep the trapezoidal rule's spectral accuracy.
    loss = np.concatenate([down, up])
    mass = np.concatenate([p * special.expit(-down), q * special.expit(up) * np.exp(-up)])
    if abs(mass.sum() - 1) < 1e-9 and abs(np.dot(mass, np.exp(loss)) - 1) < 1e-9:
        return loss, mass
    raise ArithmeticError("The oracle's density of the product does not integrate to 1.")


def sampled(loss: np.ndarray, p: np.ndarray, q: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Poisson sampling at rate q: losses, and masses with and without the record."""
    ratio = 1 - q + q * np.exp(loss)
    return np.log(ratio), p * ratio, p


def delta_of(loss: np.ndarray, upper: np.ndarray, steps: int, epsilon: float) -> float:
    """Hockey-stick divergence of `steps` copies, by the contour integral through the saddle point."""
    if steps == 1:
        return float(np.sum(upper * np.maximum(0, -np.expm1(epsilon - loss))))

    def cumulant(a: float) -> float:
        return steps * special.logsumexp(a * loss, b=upper)

    scale = math.sqrt(steps * float(np.dot(upper, loss**2)))
    best = optimize.minimize_scalar(
        lambda v: cumulant(math.exp(v)) - math.exp(v) * epsilon - v - math.log1p(math.exp(v)),
        bounds=(math.log(1e-3 / max(scale, epsilon)), math.log(60 / min(1.0, scale) + 1)),
        method="bounded",
    )
    a = math.exp(best.x)
    top = cumulant(a)
    tilted = upper * np.exp(a * loss - top / steps)
    total = tilted.sum()
    mean = float(np.dot(tilted, loss)) / total
    deviation = math.sqrt(steps * float(np.dot(tilted, (loss - mean) ** 2)) / total)
    stride = 2 * math.pi / (30 * deviation + 30 / a)
    result, k, block = 0.0, 0, 64
    while k < 400_000:
        u = stride * np.arange(k, k + block)
        moment = np.exp(1j * np.outer(u, loss)) @ tilted
        z = a + 1j * u
        term = np.exp(steps * np.log(moment) - 1j * u * epsilon) / (z * (z + 1))
        weight = np.where(u == 0, 0.5, 1.0)
        result += float((weight * term.real).sum())
        k += block
        if np.abs(term).max() < 1e-7 * abs(result):
            break
    return result * stride / math.pi * math.exp(top - a * epsilon)


def epsilon_of(loss: np.ndarray, p: np.ndarray, q: float, steps: int, delta: float) -> float:
    """Epsilon of `steps` sampled steps: the larger of both directions."""
    losses, with_record, without = sampled(loss, p, q)
    found = []
    for values, mass in ((losses, with_record), (-losses, without)):
        if delta_of(values, mass, steps, 1e-9) <= delta:
            found.append(0.0)
            continue
        high = 1.0
        while delta_of(values, mass, steps, high) > delta:
            high *= 2
        found.append(
            optimize.brentq(
                lambda e, v=values, m=mass: math.log(max(delta_of(v, m, steps, e), 1e-99) / delta), 1e-9, high, rtol=1e-5
            )
        )
    return max(found)


def epsilon_near(loss: np.ndarray, p: np.ndarray, q: float, steps: int, delta: float, guess: float) -> float:
    """The same where a value within a factor of two or so is known: a few evaluations instead of many."""
    losses, with_record, without = sampled(loss, p, q)

    def gap(epsilon: float) -> float:
        values = [delta_of(losses, with_record, steps, epsilon), delta_of(-losses, without, steps, epsilon)]
        return math.log(max(*values, 1e-99) / delta)

    low, high = guess / 1.02, guess * 1.001
    low_gap, high_gap = gap(low), gap(high)
    while low_gap < 0:
        low, high, high_gap = low / 1.3, low, low_gap
        low_gap = gap(low)
    while high_gap > 0:
        low, low_gap, high = high, high_gap, high * 1.1
        high_gap = gap(high)
    return optimize.brentq(gap, low, high, rtol=1e-5, xtol=1e-12)


def gaussian_delta(noise: float, epsilon: float) -> float:
    """The Gaussian mechanism in closed form (Balle and Wang 2018)."""
    a, b = 1 / (2 * noise), epsilon * noise
    return special.ndtr(a - b) - math.exp(epsilon + special.log_ndtr(-a - b))
