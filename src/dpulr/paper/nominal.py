"""The paper's theorem, evaluated as printed (docs/theory.md, section 2). Its epsilon is nominal: no guarantee."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dpulr import search, validate
from dpulr.accounting.events import Charge, GaussianRelease, Release, SampledStep, register_release
from dpulr.accounting.rejection import odds
from dpulr.errors import InvalidArgument

LEAST_STD, MOST_RATE = 4, 1 / 5  # what the theorem asks of sigma0 and q


@register_release
@dataclass(frozen=True, slots=True)
class PaperRelease(Release):
    """The paper's release at target deviation sigma0. Never certified. `reasons`: what voids the paper's own formula too."""

    kind = "paper"
    certified = False
    gap = (
        "layers are clipped one by one, the noise is credited before clipping, and it depends on the records it should hide "
        "(docs/errata.md)"
    )

    target_std: float
    layers: int = 1
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "reasons", tuple(self.reasons))
        validate.positive("target_std", self.target_std)
        validate.whole_number("layers", self.layers)

    def claimed(self) -> Release:
        """What its proof takes it for."""
        return GaussianRelease(self.target_std, mechanism=self.mechanism)

    @classmethod
    def nominal(cls, charges: Sequence[Charge], delta: float) -> tuple[float, tuple[str, ...]] | None:
        value = nominal_of(charges, delta)
        return None if value is None else (value, violated_by(charges))


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
        raise InvalidArgument("The paper's theorem does not apply: " + "; ".join(result.violated) + ".")
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
    validate.whole_number("steps", steps, 0)
    validate.delta(delta)
    validate.whole_number("rejection_threshold", rejection_threshold, 0)
    validate.whole_number("dataset_size", dataset_size)
    if steps == 0:
        return NominalEpsilon(0.0, math.inf, 0.0, ())
    if rejection_threshold > dataset_size:
        raise InvalidArgument(f"rejection_threshold is {rejection_threshold}, above dataset_size, which is {dataset_size}.")
    violated = _violated(sigma, q, rejection_threshold, dataset_size)
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


def _violated(sigma: float, q: float, rejection_threshold: int, dataset_size: int | None) -> list[str]:
    """Conditions of the theorem on the settings that fail, in words."""
    violated = []
    if sigma < LEAST_STD:
        violated.append(f"sigma0 is {sigma:g}, but must be at least 4")
    if q > MOST_RATE:
        violated.append(f"q is {q:g}, but must be at most 1/5")
    if dataset_size is None:
        violated.append("no batch is redrawn, but N_B must be at least 1")
    elif not 1 <= rejection_threshold <= q * dataset_size * (1 + 1e-12):
        violated.append(f"N_B is {rejection_threshold}, but must lie between 1 and qN = {q * dataset_size:g}")
    return violated


def violated_by(charges: Iterable[Charge]) -> tuple[str, ...]:
    """Conditions that fail in some of these steps of the paper. N is the larger of two neighbours, the data set itself."""
    found: dict[str, None] = {}
    for charge in charges:
        step = charge.step
        if isinstance(step, SampledStep) and isinstance(step.release, PaperRelease):
            size = step.min_dataset_size if step.rejection_threshold else None
            sigma, q = step.release.target_std, step.sample_rate
            found |= dict.fromkeys(_violated(sigma, q, step.rejection_threshold, None if size is None else size + 1))
            if largest_alpha(sigma, q) <= 1:
                found |= {"no alpha above 1 meets the theorem's conditions": None}
    return tuple(found)


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
        top = min(top, largest_alpha(sigma, q) if sigma >= LEAST_STD and q <= MOST_RATE else 1.0)
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

    return _end_of_start(holds, 1 + 1e-9, 1e9)


def _end_of_start(holds: Callable[[float], bool], low: float, high: float) -> float:
    """End of the leading stretch of alpha where `holds`: looked for on a fine geometric grid of alpha - 1, then by halving."""
    if not holds(low):
        return 1.0
    previous = low
    for k in range(1, 2001):
        point = 1 + (low - 1) * ((high - 1) / (low - 1)) ** (k / 2000)
        if not holds(point):
            return search.boundary(holds, previous, point)[0]
        previous = point
    return previous
