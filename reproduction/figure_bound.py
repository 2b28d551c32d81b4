"""The paper's figure of the impairment ratio, beside ours (docs/accounting.md).

The paper divides the first term of its bound, q p(N_B - 1)/(1 - P(N_B - 1)), by the second, 2 q^2 alpha / sigma0^2, at alpha = 1.1
and sigma0 = 4. An order so close to 1 does not reach delta = 1e-5 with a useful epsilon. Ours is what counts for a run: epsilon
with rejection over epsilon without it, minus one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpulr.accounting import rejection
from dpulr.accounting.events import Charge, GaussianRelease, SampledStep
from dpulr.accounting.privacy_cost import curves, with_rejection
from dpulr.plan import steps_of

ALPHA, SIGMA, DELTA, EPOCHS = 1.1, 4.0, 1e-5, 25
RATES = (0.001, 0.01, 0.1)


@dataclass(frozen=True, slots=True)
class BoundPoint:
    """One point: the paper's ratio of terms, and our relative increase of epsilon (infinite where epsilon is)."""

    sample_rate: float
    dataset_size: int
    share: float
    rejection_threshold: int
    paper_ratio: float
    epsilon_increase: float


def paper_ratio(sample_rate: float, dataset_size: int, threshold: int, alpha: float = ALPHA, sigma: float = SIGMA) -> float:
    """First term of the paper's bound over its second."""
    return rejection.odds(sample_rate, threshold, dataset_size) / (2 * sample_rate**2 * alpha / sigma**2)


def bound_points(
    rates: Sequence[float] = RATES,
    sizes: Sequence[int] | None = None,
    shares: Sequence[float] | None = None,
    epochs: int = EPOCHS,
) -> list[BoundPoint]:
    """Both ratios over data set sizes and N_B / (qN). Points whose threshold would be 0 are left out."""
    sizes = [round(10 ** (3 + 3 * k / 24)) for k in range(25)] if sizes is None else sizes
    shares = [0.5 + 0.5 * k / 25 for k in range(26)] if shares is None else shares
    points = []
    for rate in rates:
        steps = steps_of(epochs, rate)
        plain = curves([Charge(SampledStep(GaussianRelease(SIGMA), rate), steps)], DELTA)
        base = with_rejection(plain, DELTA, 0.0)
        for size in sizes:
            for share in shares:
                threshold = math.floor(share * rate * size)
                if threshold < 1:
                    continue
                price = with_rejection(plain, DELTA, steps * rejection.shift(rate, threshold, size))
                points.append(BoundPoint(rate, size, share, threshold, paper_ratio(rate, size, threshold), price / base - 1))
    return points


def draw(points: Sequence[BoundPoint], path: str) -> None:
    """Contours of both ratios, one column per sample rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = sorted({point.sample_rate for point in points})
    figure, axes = plt.subplots(2, len(rates), figsize=(4 * len(rates), 7), squeeze=False, layout="constrained")
    for column, rate in enumerate(rates):
        chosen = [point for point in points if point.sample_rate == rate]
        for row, (values, title) in enumerate(
            [
                ([point.paper_ratio for point in chosen], "paper: first term / second term"),
                ([point.epsilon_increase for point in chosen], "ours: relative increase of epsilon"),
            ]
        ):
            _contours(axes[row][column], chosen, values)
            axes[row][column].set_title(f"{title}\nq = {rate:g}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("data set size N")
    for axis in axes[:, 0]:
        axis.set_ylabel("N_B / (q N)")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _contours(axis: Any, points: Sequence[BoundPoint], values: Sequence[float]) -> None:
    powers = [max(-12.0, min(1.99, math.log10(max(value, 1e-12)))) if value < math.inf else 1.99 for value in values]
    sizes = [math.log10(point.dataset_size) for point in points]
    picture = axis.tricontourf(sizes, [point.share for point in points], powers, levels=range(-12, 3), cmap="viridis")
    axis.tricontour(sizes, [point.share for point in points], powers, levels=[-3], colors="white")
    axis.figure.colorbar(picture, ax=axis, label="log10 (top: 100 and above, or infinite)")
    ticks = sorted({math.ceil(min(sizes)), *range(math.ceil(min(sizes)), math.floor(max(sizes)) + 1)})
    axis.set_xticks(ticks, [f"$10^{tick}$" for tick in ticks])
