"""From a target epsilon to the noise or the number of steps. What is returned has been priced: it never overshoots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from dpulr import validate
from dpulr.accounting import cache
from dpulr.accounting.events import Charge, GaussianRelease, PaperRelease, Release, SampledStep, to_dict
from dpulr.accounting.privacy_cost import epsilon, total_shift
from dpulr.accounting.shortcuts import PerLayer, hidden_direction_release
from dpulr.accounting.small_signal import equivalent_noise, likely_noise, likely_shift

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
    frames: int | Sequence[int] = 1,
    gaussian_weights: Sequence[float] = (),
    method: str = "pld",
) -> float:
    """The smallest noise multiplier (within 1e-3) whose epsilon does not exceed the target."""
    make: Callable[[float], Release]
    if mechanism == "gaussian":
        make = GaussianRelease
    elif mechanism == "hidden-direction":

        def make(noise: float) -> Release:
            return hidden_direction_release(
                noise,
                dims,
                layer_weights=layer_weights,
                repeats=repeats,
                frames=frames,
                gaussian_weights=gaussian_weights,
            )

    else:
        raise ValueError(f"mechanism is {mechanism!r}; only 'gaussian' and 'hidden-direction' can be calibrated.")
    return calibrate_release(
        make,
        target_epsilon=target_epsilon,
        delta=delta,
        sample_rate=sample_rate,
        steps=steps,
        rejection_threshold=rejection_threshold,
        min_dataset_size=min_dataset_size,
        method=method,
    )


def calibrate_release(
    make_release: Callable[[float], Release],
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
    validate.delta(delta)
    validate.whole("steps", steps, 1)
    validate.method(method)

    def charge(noise: float) -> Charge:
        return Charge(SampledStep(make_release(noise), sample_rate, rejection_threshold, min_dataset_size), steps)

    _refuse_hopeless(charge(1.0), target_epsilon, delta)
    key = {
        "charges": [to_dict(charge(noise)) for noise in (0.5, 1.0, 3.7)],
        "target": target_epsilon,
        "delta": delta,
        "method": method,
    }

    def price(noise: float) -> float:
        return epsilon([charge(noise)], delta, method)

    def search() -> float:
        wanted = likely_noise(target_epsilon, delta, sample_rate, steps)
        return _smallest(price, target_epsilon, _worth(make_release, wanted))

    return cache.remember("calibrate", key, search)


def _worth(make_release: Callable[[float], Release], wanted: float) -> float:
    """A noise multiplier at which the release is worth about `wanted`. Only a place to start: any error is harmless."""
    low, high = math.log(LEAST_NOISE), math.log(MOST_NOISE)
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (middle, high) if equivalent_noise(make_release(math.exp(middle))) < wanted else (low, middle)
    return math.exp(high)


def _refuse_hopeless(charge: Charge, target: float, delta: float) -> None:
    shift = total_shift([charge])
    if shift >= target or -math.expm1(-shift) >= delta:
        raise ValueError(
            "No noise reaches the target: rejection alone costs too much. Lower rejection_threshold, "
            "or let it be chosen with 'auto'."
        )


def _smallest(price: Callable[[float], float], target: float, start: float) -> float:
    """The upper end of a narrow interval around the root of price(noise) = target. Secant steps, both scales logarithmic."""

    def gap(log_noise: float) -> float:
        value = price(math.exp(log_noise))
        return math.log(value / target) if 0 < value < math.inf else math.copysign(UNKNOWN, value - target)

    least, most = math.log(LEAST_NOISE), math.log(MOST_NOISE)
    x = min(max(math.log(start), least), most)
    last: tuple[float, float] | None = None
    below: tuple[float, float] | None = None  # too little noise
    above: tuple[float, float] | None = None  # enough noise
    while True:
        point = (x, gap(x))
        if point[1] > 0:
            below = point
        else:
            above = point
        if below and above:
            return _narrow(gap, below, above)
        if below and x >= most:
            raise ValueError("No noise reaches the target epsilon at this delta, sample rate and number of steps.")
        if above and x <= least:
            return math.exp(x)
        # A little beyond the root, so that the next point lies on its other side.
        step = -point[1] / _slope(last, point) + math.copysign(0.4 * TOLERANCE, point[1])
        last, x = point, min(max(x + min(max(step, -1.4), 1.4), least), most)


def _slope(first: tuple[float, float] | None, second: tuple[float, float]) -> float:
    """Of ln epsilon by ln noise: from two points, or a common value."""
    if first is None or UNKNOWN in (abs(first[1]), abs(second[1])):
        return -2.0
    return min(max((second[1] - first[1]) / (second[0] - first[0]), -50.0), -0.5)


def _narrow(gap: Callable[[float], float], below: tuple[float, float], above: tuple[float, float]) -> float:
    """False position, now and then halving, until the interval is narrow; its upper end."""
    for turn in range(200):
        width = above[0] - below[0]
        if width <= TOLERANCE:
            break
        share = 0.5 if turn % 3 == 2 else below[1] / (below[1] - above[1])
        # Aim beyond the root as seen from the farther end, so that both ends close in.
        nudge = 0.4 * TOLERANCE / width * (1 if share > 0.5 else -1)
        x = below[0] + min(max(share - nudge, 0.02), 0.98) * width
        point = (x, gap(x))
        below, above = (point, above) if point[1] > 0 else (below, point)
    return math.exp(above[0])


def max_steps(
    step: SampledStep, *, target_epsilon: float, delta: float, already: Iterable[Charge] = (), method: str = "pld"
) -> int:
    """The largest number of such steps that stays within the target, on top of what is already spent. It may be 0."""
    validate.positive("target_epsilon", target_epsilon)
    validate.delta(delta)
    spent = list(already)

    def price(count: int) -> float:
        return epsilon([*spent, Charge(step, count)], delta, method)

    low, low_price = 0, price(0)
    if low_price > target_epsilon:
        return 0
    high, high_price, factor = 0, 0.0, 1.3
    count = _likely_steps(step, target_epsilon, delta)
    while not high:
        value = price(count)
        if value > target_epsilon:
            high, high_price = count, value
        elif count >= MOST_STEPS:
            raise ValueError("More than 1e9 steps fit: the target does not limit this step.")
        else:
            low, low_price = count, value
            count, factor = min(math.ceil(count * factor) + 1, MOST_STEPS), min(factor**2, 16.0)
    factor = 1.3
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
        low, low_price, high, high_price = (
            (count, value, high, high_price) if value <= target_epsilon else (low, low_price, count, value)
        )
    return low


def _likely_steps(step: SampledStep, target_epsilon: float, delta: float) -> int:
    """About how many steps fit; any error only costs time."""
    if isinstance(step.release, PaperRelease):
        return 1
    per_step = step.sample_rate**2 * math.expm1(min(equivalent_noise(step.release) ** -2, 50.0))
    return min(max(1, int(likely_shift(target_epsilon, delta) ** 2 / per_step)), MOST_STEPS // 2)
