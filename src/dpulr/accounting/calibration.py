"""From a target epsilon to the noise or the number of steps. What is returned has been priced: it never overshoots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from dpulr import search, validate
from dpulr.accounting.events import Charge, SampledStep
from dpulr.accounting.privacy_cost import LEAST_DELTA, epsilon, remembered, total_shift
from dpulr.accounting.shortcuts import MakeRelease, PerLayer, release_maker
from dpulr.accounting.small_signal import likely_noise, likely_shift
from dpulr.errors import BudgetError

TOLERANCE = 5e-4  # relative width at which the search for the noise ends
UNKNOWN = 10.0  # stands for the logarithm of an infinite epsilon over the target, or with a minus of zero
LEAST_NOISE, MOST_NOISE = 1e-3, 1e7
MOST_STEPS = 10**9


def calibrate(
    *,
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    mechanism: str = "gaussian",
    rejection_threshold: int = 0,
    min_dataset_size: int | None = None,
    dims: Sequence[int] = (),
    layer_weights: PerLayer = None,
    repeats: int | Sequence[int] = 1,
    gaussian_weights: Sequence[float] = (),
    method: str = "pld",
) -> float:
    """The smallest noise multiplier (within 1e-3) whose epsilon does not exceed the target."""
    layers = {"dims": dims, "layer_weights": layer_weights, "repeats": repeats, "gaussian_weights": gaussian_weights}
    return calibrate_release(
        release_maker(mechanism, **({} if mechanism == "gaussian" else layers)),
        target_epsilon=target_epsilon,
        delta=delta,
        sample_rate=sample_rate,
        steps=steps,
        rejection_threshold=rejection_threshold,
        min_dataset_size=min_dataset_size,
        method=method,
    )


def calibrate_release(
    make_release: MakeRelease,
    *,
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    rejection_threshold: int = 0,
    min_dataset_size: int | None = None,
    method: str = "pld",
) -> float:
    """The same for any release that gets cheaper as the noise multiplier grows."""
    validate.positive("target_epsilon", target_epsilon)
    validate.delta_or_zero(delta)
    validate.whole_number("steps", steps)
    validate.method(method)

    def charge(noise: float) -> Charge:
        return Charge(SampledStep(make_release(noise), sample_rate, rejection_threshold, min_dataset_size), steps)

    def find() -> float:
        wanted = likely_noise(target_epsilon, delta or LEAST_DELTA, sample_rate, steps)
        return _smallest(lambda noise: epsilon([charge(noise)], delta, method), target_epsilon, _worth(make_release, wanted))

    _refuse_hopeless(charge(1.0), target_epsilon, delta)
    samples = [charge(noise) for noise in (0.5, 1.0, 3.7)]  # they tell two functions from each other
    return remembered("calibrate", samples, {"target": target_epsilon, "delta": delta, "method": method}, find)


def _worth(make_release: MakeRelease, wanted: float) -> float:
    """A noise multiplier at which the release is worth about `wanted`. Only a place to start: any error is harmless."""

    def is_below(log_noise: float) -> bool:
        return make_release(math.exp(log_noise)).equivalent_noise() < wanted

    _, high = search.boundary(is_below, math.log(LEAST_NOISE), math.log(MOST_NOISE), width=1e-5)
    return math.exp(high)


def _refuse_hopeless(charge: Charge, target: float, delta: float) -> None:
    shift = total_shift([charge])
    if delta == 0 and math.isinf(epsilon([charge], delta)):
        raise BudgetError("delta is 0, and this mechanism has no pure epsilon: its noise has to be Laplace's.")
    if shift and (shift >= target or -math.expm1(-shift) >= delta):
        raise BudgetError(
            "No noise reaches the target: rejection alone costs too much. Lower rejection_threshold, "
            "or let it be chosen with 'auto'."
        )


class _Point(NamedTuple):
    """A noise multiplier that was priced: its logarithm, and that of its epsilon over the target."""

    x: float
    gap: float


def _smallest(price: Callable[[float], float], target: float, start: float) -> float:
    """The upper end of a narrow interval around the root of price(noise) = target. Secant steps, both scales logarithmic.

    A price takes up to a second: this search needs about four, where halving would need twenty.
    """

    def priced(x: float) -> _Point:
        value = price(math.exp(x))
        return _Point(x, math.log(value / target) if 0 < value < math.inf else math.copysign(UNKNOWN, value - target))

    least, most = math.log(LEAST_NOISE), math.log(MOST_NOISE)
    x = min(max(math.log(start), least), most)
    last = below = above = None
    while True:
        point = priced(x)
        if point.gap > 0:
            below = point  # too little noise
        else:
            above = point  # enough
        if below and above:
            return _narrow(priced, below, above)
        if below and x >= most:
            raise BudgetError("No noise reaches the target epsilon at this delta, sample rate and number of steps.")
        if above and x <= least:
            return math.exp(x)
        # A little beyond the root, so that the next point lies on its other side.
        step = -point.gap / _slope(last, point) + math.copysign(0.4 * TOLERANCE, point.gap)
        last, x = point, min(max(x + min(max(step, -1.4), 1.4), least), most)


def _slope(first: _Point | None, second: _Point) -> float:
    """Of ln epsilon by ln noise: from two points, or a common value."""
    if first is None or UNKNOWN in (abs(first.gap), abs(second.gap)):
        return -2.0
    return min(max((second.gap - first.gap) / (second.x - first.x), -50.0), -0.5)


def _narrow(priced: Callable[[float], _Point], below: _Point, above: _Point) -> float:
    """False position, now and then halving, until the interval is narrow; its upper end."""
    for turn in range(200):
        width = above.x - below.x
        if width <= TOLERANCE:
            break
        share = 0.5 if turn % 3 == 2 else below.gap / (below.gap - above.gap)
        # Aim beyond the root as seen from the farther end, so that both ends close in.
        nudge = 0.4 * TOLERANCE / width * (1 if share > 0.5 else -1)
        point = priced(below.x + min(max(share - nudge, 0.02), 0.98) * width)
        below, above = (point, above) if point.gap > 0 else (below, point)
    return math.exp(above.x)


def max_steps(
    step: SampledStep, *, target_epsilon: float, delta: float, already: Iterable[Charge] = (), method: str = "pld"
) -> int:
    """The largest number of such steps that stays within the target, on top of what is already spent. It may be 0."""
    validate.positive("target_epsilon", target_epsilon)
    validate.delta_or_zero(delta)
    spent = list(already)

    def price(count: int) -> float:
        return epsilon([*spent, Charge(step, count)], delta, method)

    low, low_price = 0, price(0)
    if low_price > target_epsilon:
        return 0
    count, factor = _likely_steps(step, target_epsilon, delta), 1.3
    while (high_price := price(count)) <= target_epsilon:
        if count >= MOST_STEPS:
            raise BudgetError(f"More than {MOST_STEPS:g} steps fit: the target does not limit this step.")
        low, low_price = count, high_price
        count, factor = min(math.ceil(count * factor) + 1, MOST_STEPS), min(factor**2, 16.0)
    high, factor = count, 1.3
    while high - low > 1:
        if low == 0:
            count, factor = int(high / factor), min(factor**2, 16.0)  # from a guess that was too high, downwards
        elif low_price > 0 and high_price < math.inf and factor < 2:
            # Interpolate, both scales logarithmic; where the function is smooth the answer is within a step or two.
            share = math.log(target_epsilon / low_price) / math.log(high_price / low_price)
            count, factor = round(low * (high / low) ** share), factor * 1.3
        else:
            count, factor = (low + high) // 2, 1.3
        count = min(max(count, low + 1), high - 1)
        value = price(count)
        if value <= target_epsilon:
            low, low_price = count, value
        else:
            high, high_price = count, value
    return low


def _likely_steps(step: SampledStep, target_epsilon: float, delta: float) -> int:
    """About how many steps fit; any error only costs time."""
    if not step.certified:
        return 1
    per_step = step.sample_rate**2 * math.expm1(min(step.release.equivalent_noise() ** -2, 50.0))
    return min(max(1, int(likely_shift(target_epsilon, delta or LEAST_DELTA) ** 2 / per_step)), MOST_STEPS // 2)
