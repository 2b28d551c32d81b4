"""What redrawing small batches costs (docs/theory.md, section 3), and the largest threshold that is nearly free."""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy import special

from dpulr import search, validate
from dpulr.errors import InvalidArgument

AUTO_FRACTION = 0.01


def odds(sample_rate: float, rejection_threshold: int, min_dataset_size: int | None) -> float:
    """x_r = q p(N_B - 1) / Pr[Bin(N, q) >= N_B]: the chance to rescue a batch over the chance of acceptance."""
    if rejection_threshold == 0:
        return 0.0
    if min_dataset_size is None:
        raise InvalidArgument("Rejection needs min_dataset_size, the size of the smaller of two neighbouring data sets.")
    n, below, q = min_dataset_size, rejection_threshold - 1, sample_rate
    if q == 1:
        # Every batch is the whole data set: only a threshold above it could reject.
        return 0.0 if rejection_threshold <= n else math.inf
    accepted = float(special.bdtrc(below, n, q))
    log_mass = (
        math.lgamma(n + 1)
        - math.lgamma(below + 1)
        - math.lgamma(n - below + 1)
        + below * math.log(q)
        + (n - below) * math.log1p(-q)
    )
    return q * math.exp(log_mass) / accepted if accepted > 0 else math.inf


def shift(sample_rate: float, rejection_threshold: int, min_dataset_size: int | None) -> float:
    """ln(1 + x_r): what one step adds to the loss where the record is missing. 1e-9 covers the rounding."""
    return math.log1p(odds(sample_rate, rejection_threshold, min_dataset_size) * (1 + 1e-9))


def largest_threshold(
    epsilon_at: Callable[[int], float], *, sample_rate: float, min_dataset_size: int, fraction: float = AUTO_FRACTION
) -> int:
    """The largest N_B <= qN whose epsilon is at most (1 + fraction) times that without rejection."""
    validate.rate(sample_rate)
    validate.whole_number("min_dataset_size", min_dataset_size)
    validate.positive("fraction", fraction)
    allowed = (1 + fraction) * epsilon_at(0)
    beyond = int(sample_rate * min_dataset_size) + 1
    return search.last_true(lambda threshold: epsilon_at(threshold) <= allowed, 0, beyond)
