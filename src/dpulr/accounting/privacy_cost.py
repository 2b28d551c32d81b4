"""The privacy cost of a list of charges: epsilon for a delta, delta for an epsilon (docs/theory.md, sections 3 to 5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from dpulr import validate
from dpulr.accounting import cache, rejection
from dpulr.accounting.composition import Curves, compose
from dpulr.accounting.dominating_pairs import pair_of, subsampled
from dpulr.accounting.events import Charge, SampledStep, Step, to_dict, units_of
from dpulr.accounting.finite_precision import SHARES, Slack, slack
from dpulr.accounting.laplace import pure_epsilon
from dpulr.accounting.renyi import epsilon_by_rdp
from dpulr.errors import InvalidArgument

LEAST_DELTA = 1e-12  # below it `delta_at` makes no statement
PROFILE_DELTA = 1e-9  # steers what is cut off where no delta is given
PROFILE_MASSES = (1e-13, 1e-10, 1e-7)  # what finite precision may take of delta where none is given; the best is taken


def merged(charges: Iterable[Charge]) -> list[Charge]:
    """Equal steps joined, in order of first appearance; empty charges dropped."""
    counts: dict[Step, int] = {}
    for charge in charges:
        if not isinstance(charge, Charge):
            raise InvalidArgument(f"{type(charge).__name__} is not a charge; its cost cannot be stated.")
        counts[charge.step] = counts.get(charge.step, 0) + charge.count
    return [Charge(step, count) for step, count in counts.items() if count]


def is_certified(charges: Iterable[Charge]) -> bool:
    """Whether every charge has a proved price, for the same unit."""
    steps = [charge.step for charge in charges if charge.count]
    return all(step.certified and not step.reasons for step in steps) and len(units_of(steps)) < 2


def epsilon(charges: Iterable[Charge], delta: float, method: str = "pld", *, fresh: bool = False) -> float:
    """Epsilon of all charges together at `delta`; 0 asks for pure epsilon. Infinite where no bound is known.

    fresh: computed in this process, not read from the cache on disk. So is every epsilon that is printed as a result.
    """
    validate.delta_or_zero(delta)
    validate.method(method)
    joined = merged(charges)
    if not joined:
        return 0.0
    if not is_certified(joined):
        return math.inf
    if delta == 0:
        return pure_epsilon(joined)
    if fresh:
        return _computed(tuple(joined), delta, method)
    return remembered("epsilon", joined, {"method": method, "delta": delta}, lambda: _computed(tuple(joined), delta, method))


def remembered(kind: str, charges: Sequence[Charge], key: Mapping[str, Any], compute: Callable[[], float]) -> float:
    """A slow result from the cache on disk. Releases from outside the package may change between runs: theirs are not kept."""
    described = [to_dict(charge) for charge in charges]  # what nobody registered fails here
    releases = [charge.step.release for charge in charges if isinstance(charge.step, SampledStep)]
    if not all(type(release).__module__.startswith("dpulr.") for release in releases):
        return compute()
    return cache.remember(kind, {**key, "charges": described}, compute)


@lru_cache(maxsize=256)
def _computed(charges: tuple[Charge, ...], delta: float, method: str) -> float:
    shift, slacks = total_shift(charges), _slacks(charges, [share * delta for share in SHARES])
    if method == "rdp":
        rooms = [(each.room(delta) + math.expm1(-shift), each.loss) for each in slacks]
        return checked(min(epsilon_by_rdp(charges, room) + shift + loss if room > 0 else math.inf for room, loss in rooms))
    pair = curves(charges, delta)
    composed = min(with_rejection(pair, each.room(delta), shift) + each.loss for each in slacks)
    return checked(min(composed, pure_epsilon(charges)))


def _slacks(charges: Sequence[Charge], masses: Sequence[float]) -> list[Slack]:
    """What finite precision adds (section 9), for several amounts of delta that it may take. Each is a bound."""
    found = [slack(charges, mass) for mass in masses]
    return list(dict.fromkeys(found))  # of ideal releases there is but one, and it is zero


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
    return min(_delta_at(pair, epsilon, shift, each) for each in _slacks(joined, PROFILE_MASSES))


def _delta_at(pair: Curves, epsilon: float, shift: float, precision: Slack) -> float:
    ideal, factor = epsilon - precision.loss, math.exp(min(precision.factor, 700.0))
    if ideal < 0:
        return 1.0
    remove = math.exp(-shift) * factor * (pair.remove.delta(ideal) + precision.mass) - math.expm1(-shift)
    add = factor * (pair.add.delta(max(ideal - shift, 0.0)) + precision.mass) if ideal >= shift else 1.0
    return min(1.0, max(checked(remove, "delta"), checked(add, "delta"), LEAST_DELTA))


def privacy_profile(charges: Iterable[Charge], deltas: Sequence[float], method: str = "pld") -> list[tuple[float, float]]:
    """(delta, epsilon) for each delta."""
    joined = merged(charges)
    return [(delta, epsilon(joined, delta, method)) for delta in deltas]


def checked(value: float, name: str = "epsilon") -> float:
    """Numerical trouble is an error, never an epsilon."""
    if math.isnan(value) or value < 0:
        raise ArithmeticError(f"The accountant computed {value!r} for {name}. Please report the setting.")
    return float(value)
