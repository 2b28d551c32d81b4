"""From a target epsilon to the noise or the number of steps. What is returned has been priced: it never overshoots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from dpulr.accounting import cache, checks
from dpulr.accounting.events import Charge, GaussianRelease, PaperRelease, Release, SampledStep, to_dict
from dpulr.accounting.functions import PerLayer, hidden_direction_release
from dpulr.accounting.pricing import epsilon, total_shift
from dpulr.accounting.small_signal import equivalent_noise, likely_noise, likely_shift

TOLERANCE = 5e-4  # relative width at which the search for the noise ends
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
    checks.positive("target_epsilon", target_epsilon)
    checks.delta(delta)
    checks.whole("steps", steps, 1)
    checks.method(method)

    def charge(noise: float) -> Charge:
        return Charge(SampledStep(make_release(noise), sample_rate, rejection_threshold, min_dataset_size), steps)

    _refuse_hopeless(charge(1.0), target_epsilon, delta)
    key = {
        "release": to_dict(charge(1.0)),
        "half": to_dict(charge(0.5)),
        "target": target_epsilon,
        "delta": delta,
        "method": method,
    }
    return cache.remember(
        "calibrate",
        key,
        lambda: _smallest(
            lambda noise: epsilon([charge(noise)], delta, method),
            target_epsilon,
            _start(make_release, likely_noise(target_epsilon, delta, sample_rate, steps)),
        ),
    )


def _start(make_release: Callable[[float], Release], wanted: float) -> float:
    """A noise multiplier at which the release is worth about `wanted`. Only a place to start: any error is harmless."""
    low, high = math.log(LEAST_NOISE), math.log(MOST_NOISE)
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if equivalent_noise(make_release(math.exp(middle))) < wanted else (low, middle)
    return math.exp(low)


def _refuse_hopeless(charge: Charge, target: float, delta: float) -> None:
    shift = total_shift([charge])
    if shift >= target or -math.expm1(-shift) >= delta:
        raise ValueError(
            "No noise reaches the target: rejection alone costs too much. Lower rejection_threshold, "
            "or let it be chosen with 'auto'."
        )


def _smallest(price: Callable[[float], float], target: float, start: float) -> float:
    """Root of the falling price(noise) = target, in logarithms, by false position; returns the upper end."""

    def gap(noise: float) -> float:
        value = price(noise)
        return math.log(value / target) if 0 < value < math.inf else (-10.0 if value == 0 else 10.0)

    low = high = start
    low_gap = high_gap = gap(low)
    stride = 1.1
    while low_gap <= 0:
        if low <= LEAST_NOISE:
            return low
        high, high_gap = low, low_gap
        low = max(low / stride, LEAST_NOISE)
        low_gap, stride = gap(low), min(stride**2, 4.0)
    stride = 1.1
    while high_gap > 0:
        if high >= MOST_NOISE:
            raise ValueError("No noise reaches the target epsilon at this delta, sample rate and number of steps.")
        low, low_gap = high, high_gap
        high *= stride
        high_gap, stride = gap(high), min(stride**2, 16.0)
    return _narrow(gap, low, low_gap, high, high_gap)


def _narrow(gap: Callable[[float], float], low: float, low_gap: float, high: float, high_gap: float) -> float:
    for turn in range(200):
        width = math.log(high / low)
        if width <= TOLERANCE:
            break
        share = low_gap / (low_gap - high_gap)
        if turn % 3 == 2:
            share = 0.5  # false position can stall on one side
        # Aim a little beyond the root, to either side in turn, so that both ends close in.
        nudge = 0.4 * TOLERANCE / width * (1 if turn % 2 == 0 else -1)
        share = min(max(share + nudge, 0.02), 0.98) if width > 10 * TOLERANCE else min(max(share + nudge, 0.1), 0.9)
        middle = low * math.exp(share * width)
        value = gap(middle)
        if value > 0:
            low, low_gap = middle, value
        else:
            high, high_gap = middle, value
    return high


def max_steps(
    step: SampledStep, *, target_epsilon: float, delta: float, already: Iterable[Charge] = (), method: str = "pld"
) -> int:
    """The largest number of such steps that stays within the target, on top of what is already spent. It may be 0."""
    checks.positive("target_epsilon", target_epsilon)
    checks.delta(delta)
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
