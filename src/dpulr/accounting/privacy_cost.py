"""The price of a list of charges: epsilon for a delta, delta for an epsilon (docs/theory.md, sections 3 to 5)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from dpulr import validate
from dpulr.accounting import cache, rejection
from dpulr.accounting.composition import Curves, compose
from dpulr.accounting.dominating_pairs import Cells, gaussian_cells, subsampled
from dpulr.accounting.events import (
    Charge,
    GaussianRelease,
    HiddenDirectionRelease,
    Release,
    SampledStep,
    Unaccounted,
    to_dict,
)


@lru_cache(maxsize=16)
def release_cells(release: Release) -> Cells:
    """The dominating pair of one release, before sampling. Anything unknown fails closed."""
    if isinstance(release, GaussianRelease):
        return gaussian_cells(release.noise_multiplier)
    if isinstance(release, HiddenDirectionRelease):
        from dpulr.accounting.hidden_direction import release_pair

        return release_pair(release)
    raise ValueError(f"{type(release).__name__} has no certified price.")


def merged(charges: Iterable[Charge]) -> list[Charge]:
    """Equal steps joined, in order of first appearance; empty charges dropped."""
    counts: dict[SampledStep | Unaccounted, int] = {}
    for charge in charges:
        if not isinstance(charge, Charge):
            raise ValueError(f"{type(charge).__name__} is not a charge; its cost cannot be stated.")
        counts[charge.step] = counts.get(charge.step, 0) + charge.count
    return [Charge(step, count) for step, count in counts.items() if count]


def is_certified(charges: Iterable[Charge]) -> bool:
    """Whether every charge has a proved price."""
    return all(_certified(charge.step) for charge in charges if charge.count)


def _certified(step: SampledStep | Unaccounted) -> bool:
    return isinstance(step, SampledStep) and isinstance(step.release, GaussianRelease | HiddenDirectionRelease)


def epsilon(charges: Iterable[Charge], delta: float, method: str = "pld") -> float:
    """Epsilon of all charges together at `delta`. Infinite where no bound is known."""
    validate.delta(delta)
    validate.method(method)
    joined = merged(charges)
    if not joined:
        return 0.0
    if not is_certified(joined):
        return math.inf
    key = {"method": method, "delta": delta, "charges": [to_dict(charge) for charge in joined]}
    return cache.remember("epsilon", key, lambda: _epsilon(joined, delta, method))


def _epsilon(charges: Sequence[Charge], delta: float, method: str) -> float:
    shift = total_shift(charges)
    if method == "rdp":
        from dpulr.accounting.renyi import epsilon_by_rdp

        room = delta + math.expm1(-shift)
        return checked(epsilon_by_rdp(charges, room) + shift) if room > 0 else math.inf
    return checked(_price(curves(charges, delta), delta, shift))


def _price(pair: Curves, delta: float, shift: float) -> float:
    """Both directions with the cost of rejection (section 3)."""
    room = delta + math.expm1(-shift)
    if room <= 0:
        return math.inf
    remove = pair.remove.epsilon(min(room * math.exp(shift), 1.0))
    add = pair.add.epsilon(delta) + shift
    return max(remove, add)


def curves(charges: Sequence[Charge], delta: float) -> Curves:
    """Composed loss distributions of certified charges, without the cost of rejection."""
    parts = []
    for charge in charges:
        if not isinstance(charge.step, SampledStep):
            raise ValueError("An unaccounted step has no loss distribution.")
        parts.append((subsampled(release_cells(charge.step.release), charge.step.sample_rate), charge.count))
    return compose(parts, delta)


def total_shift(charges: Iterable[Charge]) -> float:
    """Sum of ln(1 + x_r) over all steps."""
    total = 0.0
    for charge in charges:
        step = charge.step
        if isinstance(step, SampledStep):
            total += charge.count * rejection.shift(step.sample_rate, step.rejection_threshold, step.min_dataset_size)
    return total


def delta_at(charges: Iterable[Charge], epsilon: float) -> float:
    """The smallest delta this accountant can state at `epsilon`, not below 1e-12; 1 where no bound is known."""
    if validate.number("epsilon", epsilon) < 0:
        raise ValueError(f"epsilon is {epsilon!r}; it must not be negative.")
    joined = merged(charges)
    if not joined:
        return 0.0
    if not is_certified(joined):
        return 1.0
    shift = total_shift(joined)
    pair = curves(joined, 1e-9)
    remove = math.exp(-shift) * pair.remove.delta(epsilon) - math.expm1(-shift)
    return min(1.0, max(remove, pair.add.delta(max(epsilon - shift, 0.0)) if epsilon >= shift else 1.0, 1e-12))


def privacy_profile(charges: Iterable[Charge], deltas: Sequence[float], method: str = "pld") -> list[tuple[float, float]]:
    """(delta, epsilon) for each delta."""
    joined = merged(charges)
    return [(delta, epsilon(joined, delta, method)) for delta in deltas]


def checked(value: float) -> float:
    """Numerical trouble is an error, never an epsilon."""
    if math.isnan(value) or value < 0:
        raise ArithmeticError(f"The accountant computed {value!r} for epsilon. Please report the setting.")
    return float(value)
