"""The privacy cost of a list of charges: epsilon for a delta, delta for an epsilon (docs/theory.md, sections 3 to 5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dpulr import validate
from dpulr.accounting import cache, rejection
from dpulr.accounting.composition import Curves, compose
from dpulr.accounting.dominating_pairs import pair_of, subsampled
from dpulr.accounting.events import Charge, SampledStep, Step, to_dict
from dpulr.accounting.renyi import epsilon_by_rdp
from dpulr.errors import InvalidArgument

LEAST_DELTA = 1e-12  # below it `delta_at` makes no statement
PROFILE_DELTA = 1e-9  # steers what is cut off where no delta is given


def merged(charges: Iterable[Charge]) -> list[Charge]:
    """Equal steps joined, in order of first appearance; empty charges dropped."""
    counts: dict[Step, int] = {}
    for charge in charges:
        if not isinstance(charge, Charge):
            raise InvalidArgument(f"{type(charge).__name__} is not a charge; its cost cannot be stated.")
        counts[charge.step] = counts.get(charge.step, 0) + charge.count
    return [Charge(step, count) for step, count in counts.items() if count]


def is_certified(charges: Iterable[Charge]) -> bool:
    """Whether every charge has a proved price."""
    return all(charge.step.certified and not charge.step.reasons for charge in charges if charge.count)


def epsilon(charges: Iterable[Charge], delta: float, method: str = "pld") -> float:
    """Epsilon of all charges together at `delta`. Infinite where no bound is known."""
    validate.delta(delta)
    validate.method(method)
    joined = merged(charges)
    if not joined:
        return 0.0
    if not is_certified(joined):
        return math.inf
    return remembered("epsilon", joined, {"method": method, "delta": delta}, lambda: _epsilon(joined, delta, method))


def remembered(kind: str, charges: Sequence[Charge], key: Mapping[str, Any], compute: Callable[[], float]) -> float:
    """A slow result from the cache on disk. Releases from outside the package may change between runs: theirs are not kept."""
    described = [to_dict(charge) for charge in charges]  # what nobody registered fails here
    releases = [charge.step.release for charge in charges if isinstance(charge.step, SampledStep)]
    if not all(type(release).__module__.startswith("dpulr.") for release in releases):
        return compute()
    return cache.remember(kind, {**key, "charges": described}, compute)


def _epsilon(charges: Sequence[Charge], delta: float, method: str) -> float:
    shift = total_shift(charges)
    if method == "rdp":
        room = delta + math.expm1(-shift)
        return checked(epsilon_by_rdp(charges, room) + shift) if room > 0 else math.inf
    return checked(with_rejection(curves(charges, delta), delta, shift))


def with_rejection(pair: Curves, delta: float, shift: float) -> float:
    """Epsilon of both directions, with the cost of rejection (section 3)."""
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
        step = charge.step
        if not isinstance(step, SampledStep):
            raise InvalidArgument("An unaccounted step has no loss distribution.")
        parts.append((subsampled(pair_of(step.release), step.sample_rate), charge.count))
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
        validate.refuse("epsilon", epsilon, "a number of at least 0")
    joined = merged(charges)
    if not joined:
        return 0.0
    if not is_certified(joined):
        return 1.0
    shift = total_shift(joined)
    pair = curves(joined, PROFILE_DELTA)
    remove = math.exp(-shift) * pair.remove.delta(epsilon) - math.expm1(-shift)
    add = pair.add.delta(max(epsilon - shift, 0.0)) if epsilon >= shift else 1.0
    return min(1.0, max(remove, add, LEAST_DELTA))


def privacy_profile(charges: Iterable[Charge], deltas: Sequence[float], method: str = "pld") -> list[tuple[float, float]]:
    """(delta, epsilon) for each delta."""
    joined = merged(charges)
    return [(delta, epsilon(joined, delta, method)) for delta in deltas]


def checked(value: float) -> float:
    """Numerical trouble is an error, never an epsilon."""
    if math.isnan(value) or value < 0:
        raise ArithmeticError(f"The accountant computed {value!r} for epsilon. Please report the setting.")
    return float(value)
