"""What a run has spent, as a value and as a statement in words (docs/accounting.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dpulr import validate
from dpulr.accounting.events import (
    Charge,
    GaussianRelease,
    HiddenDirectionRelease,
    PaperRelease,
    SampledStep,
    Unaccounted,
)
from dpulr.accounting.privacy_cost import epsilon as price
from dpulr.accounting.privacy_cost import merged
from dpulr.paper.nominal import nominal_of

Guarantee = Literal["certified", "nominal", "none"]

NOT_COVERED = (
    "training losses or accuracies shown during the run, the choice of hyper-parameters on the same data, "
    "and the time it takes (redrawing small batches takes longer on smaller data sets)"
)


PAPER_GAPS = (
    "layers are clipped one by one, the noise is credited before clipping, and it depends on the records it should hide "
    "(docs/errata.md)"
)


@dataclass(frozen=True, slots=True)
class PrivacySpent:
    """epsilon is a number only if the guarantee is "certified", else None. nominal_epsilon is a formula's value only."""

    epsilon: float | None
    delta: float
    guarantee: Guarantee
    nominal_epsilon: float | None = None
    mechanism: str = ""
    steps: int = 0
    sample_rates: tuple[float, ...] = ()
    rejection: bool = False
    reasons: tuple[str, ...] = ()
    method: str = "pld"

    def __str__(self) -> str:
        return _sentence(self)


def privacy_spent(
    charges: Iterable[Charge],
    delta: float,
    *,
    nominal_epsilon: float | None = None,
    reasons: Iterable[str] = (),
    method: str = "pld",
) -> PrivacySpent:
    """Price the charges and say what kind of guarantee stands behind the number. `reasons` void it."""
    validate.delta(delta)
    joined = merged(charges)
    steps = [charge.step for charge in joined]
    sampled = [step for step in steps if isinstance(step, SampledStep)]
    why = list(dict.fromkeys([*reasons, *(step.reason for step in steps if isinstance(step, Unaccounted))]))
    paper = any(isinstance(step.release, PaperRelease) for step in sampled)
    if paper and nominal_epsilon is None:
        nominal_epsilon = nominal_of(joined, delta)
        why.insert(0, PAPER_GAPS)
    value = None if why or paper else price(joined, delta, method)
    guarantee: Guarantee = "certified" if value is not None else "none"
    if value is not None and math.isinf(value):
        guarantee, value = "none", None
        why.append("rejection or the number of steps makes epsilon infinite at this delta")
    if paper and not why and nominal_epsilon is not None:
        guarantee = "nominal"
    return PrivacySpent(
        epsilon=value,
        delta=delta,
        guarantee=guarantee,
        nominal_epsilon=nominal_epsilon,
        mechanism=_mechanism(sampled),
        steps=sum(charge.count for charge in joined),
        sample_rates=tuple(sorted({step.sample_rate for step in sampled})),
        rejection=any(step.rejection_threshold > 0 for step in sampled),
        reasons=tuple(why),
        method=method,
    )


def _mechanism(steps: Iterable[SampledStep]) -> str:
    names = {GaussianRelease: "gaussian", HiddenDirectionRelease: "hidden-direction", PaperRelease: "paper"}
    return " and ".join(dict.fromkeys(names[type(step.release)] for step in steps))


def _sentence(spent: PrivacySpent) -> str:
    run = f"{spent.steps} step{'s' * (spent.steps != 1)}" + (f" of the {spent.mechanism} mechanism" if spent.mechanism else "")
    if spent.guarantee == "none":
        why = "; ".join(spent.reasons) or "this mechanism has no proved bound"
        text = f"No privacy guarantee for {run}: {why}."
        if spent.nominal_epsilon is not None:
            text += f" The formula of the paper gives {spent.nominal_epsilon:.4g} (nominal, no guarantee)."
        return text
    if spent.guarantee == "nominal":
        return (
            f"Nominal epsilon {spent.nominal_epsilon:.4g} at delta {spent.delta:g} for {run} (no guarantee): the "
            "formula of the paper's theorem, whose proof has gaps. Do not report it as a privacy guarantee."
        )
    rates = ", ".join(f"{rate:.4g}" for rate in spent.sample_rates) or "none"
    assumed = (
        f"Poisson sampling at rate {rates}, secret noise{_secrets(spent)} from the operating system, "
        "settings fixed before the data was seen"
    )
    if spent.rejection:
        assumed += ", and a data set at least as large as stated (small batches are redrawn; the cost is included)"
    return (
        f"(epsilon, delta)-differential privacy with epsilon = {_rounded_up(spent.epsilon)} and "
        f"delta = {spent.delta:g}, for adding or removing one record (the unit is one record), after {run}. "
        f"Assumed: {assumed}. Not covered: {NOT_COVERED}."
    )


def _secrets(spent: PrivacySpent) -> str:
    return ", directions and batches" if "hidden-direction" in spent.mechanism else " and batches"


def _rounded_up(value: float | None) -> str:
    """Four figures, never below the value."""
    if not value:
        return "0"
    scale = 10.0 ** (3 - math.floor(math.log10(value)))
    return f"{math.ceil(value * scale * (1 - 1e-12)) / scale:.6g}"
