"""The paper's theorem, evaluated as printed (docs/theory.md, section 2). Its epsilon is nominal: no guarantee."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dpulr import validate
from dpulr.accounting.events import Charge, PaperRelease, SampledStep
from dpulr.accounting.rejection import odds


@dataclass(frozen=True, slots=True)
class NominalEpsilon:
    """The formula's value, the order it is reached at, the impairment share of it, and the conditions it violates."""

    epsilon: float
    alpha: float
    impairment: float
    violated: tuple[str, ...]


def paper_nominal_epsilon(
    *,
    target_std: float,
    sample_rate: float,
    steps: int,
    delta: float,
    rejection_threshold: int,
    dataset_size: int,
    ignore_conditions: bool = False,
) -> float:
    """min over alpha of T*impairment + 2 T q^2 alpha / sigma0^2 + ln(1/delta)/(alpha-1). Raises if a condition fails.

    With ignore_conditions the bare formula is evaluated; `paper_nominal` names what it violates.
    """
    result = paper_nominal(
        target_std=target_std,
        sample_rate=sample_rate,
        steps=steps,
        delta=delta,
        rejection_threshold=rejection_threshold,
        dataset_size=dataset_size,
        enforce_alpha=not ignore_conditions,
    )
    if result.violated and not ignore_conditions:
        raise ValueError("The paper's theorem does not apply: " + "; ".join(result.violated) + ".")
    return result.epsilon


def paper_nominal(
    *,
    target_std: float,
    sample_rate: float,
    steps: int,
    delta: float,
    rejection_threshold: int,
    dataset_size: int,
    enforce_alpha: bool = False,
) -> NominalEpsilon:
    """The formula with its violated conditions named. With enforce_alpha, alpha stays where the theorem allows it."""
    sigma, q = validate.positive("target_std", target_std), validate.rate(sample_rate)
    validate.whole("steps", steps, 0)
    validate.delta(delta)
    validate.whole("rejection_threshold", rejection_threshold, 0)
    validate.whole("dataset_size", dataset_size, 1)
    if steps == 0:
        return NominalEpsilon(0.0, math.inf, 0.0, ())
    if rejection_threshold > dataset_size:
        raise ValueError(f"rejection_threshold is {rejection_threshold}, above dataset_size, which is {dataset_size}.")
    violated = []
    if sigma < 4:
        violated.append(f"sigma0 is {sigma:g}, but must be at least 4")
    if q > 1 / 5:
        violated.append(f"q is {q:g}, but must be at most 1/5")
    if not 1 <= rejection_threshold <= q * dataset_size * (1 + 1e-12):
        violated.append(f"N_B is {rejection_threshold}, but must lie between 1 and qN = {q * dataset_size:g}")
    impairment = steps * odds(q, rejection_threshold, dataset_size)

    def value(alpha: float) -> float:
        return impairment + 2 * steps * q**2 * alpha / sigma**2 + math.log(1 / delta) / (alpha - 1)

    best = 1 + sigma * math.sqrt(math.log(1 / delta) / (2 * steps)) / q
    top = largest_alpha(sigma, q)
    if best > top:
        if top <= 1:
            violated.append("no alpha above 1 meets the theorem's conditions")
        elif not enforce_alpha:
            violated.append(f"the best alpha is {best:.4g}, but must be at most {top:.4g}")
        if enforce_alpha and top > 1:
            best = top
    return NominalEpsilon(value(best), best, impairment, tuple(violated))


def nominal_of(charges: Iterable[Charge], delta: float) -> float | None:
    """The formula for steps that may differ: its terms are summed, then alpha is chosen. None if a step is of another kind.

    Where every step has the noise and the rate that the theorem asks for, alpha meets its conditions; else it is the bare formula.
    """
    impairment = slope = 0.0
    top = math.inf
    for charge in charges:
        step = charge.step
        if not isinstance(step, SampledStep) or not isinstance(step.release, PaperRelease):
            return None
        impairment += charge.count * odds(step.sample_rate, step.rejection_threshold, step.min_dataset_size)
        sigma, q = step.release.target_std, step.sample_rate
        slope += 2 * charge.count * q**2 / sigma**2
        top = min(top, largest_alpha(sigma, q) if sigma >= 4 and q <= 1 / 5 else 1.0)
    wanted = math.log(1 / validate.delta(delta))
    if slope == 0:
        return 0.0
    alpha = 1 + math.sqrt(wanted / slope)
    alpha = min(alpha, top) if top > 1 else alpha
    return impairment + slope * alpha + wanted / (alpha - 1)


def largest_alpha(sigma: float, q: float) -> float:
    """The end of the interval (1, alpha] on which both conditions of the theorem hold; 1 if there is none."""

    def holds(alpha: float) -> bool:
        a = math.log1p(1 / (q * (alpha - 1)))
        first = alpha <= 0.5 * sigma**2 * a - 2 * math.log(sigma)
        denominator = a + math.log(q * alpha) + 1 / (2 * sigma**2)
        second = alpha * denominator <= 0.5 * sigma**2 * a**2 - math.log(5) - 2 * math.log(sigma)
        return first and denominator > 0 and second

    return _last_true(holds, 1 + 1e-9, 1e9)


def _last_true(holds: Callable[[float], bool], low: float, high: float) -> float:
    """End of the leading stretch where `holds`, found on a fine geometric grid of alpha - 1 and then bisected."""
    if not holds(low):
        return 1.0
    previous = low
    for k in range(1, 2001):
        point = 1 + (low - 1) * ((high - 1) / (low - 1)) ** (k / 2000)
        if not holds(point):
            good, bad = previous, point
            for _ in range(60):
                middle = (good + bad) / 2
                good, bad = (middle, bad) if holds(middle) else (good, middle)
            return good
        previous = point
    return previous
