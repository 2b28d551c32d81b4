"""What a run has spent, as a value and as a statement in words, and what is worth a warning (docs/accounting.md)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from dpulr import validate
from dpulr.accounting.events import MIXED, Charge, Release, SampledStep, Step, Unit, units_of
from dpulr.accounting.laplace import pure_epsilon
from dpulr.accounting.privacy_cost import epsilon as price
from dpulr.accounting.privacy_cost import merged
from dpulr.accounting.rounding import up

Guarantee = Literal["certified", "nominal", "none"]

NOT_COVERED = (
    "training losses or accuracies shown during the run, the choice of hyper-parameters on the same data, "
    "and the time it takes (a batch that is redrawn and a record whose pass raises an error take longer)"
)
FEW_RECORDS, LARGE_EPSILON = 300, 10.0
COUNTED: dict[Unit, str] = {"record": "records", "person": "people"}


@dataclass(frozen=True, slots=True)
class PrivacySpent:
    """epsilon is a number only if the guarantee is "certified", else None. nominal_epsilon is a formula's value only.

    pure_epsilon holds with delta 0: of Laplace noise only.
    """

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
    secrets: str = Release.secrets
    public_size: int | None = None
    schema: str | None = None
    unit: Unit = "record"
    pure_epsilon: float | None = None
    evaluation_epsilon: float = 0.0
    """The part of epsilon that noisy evaluations on held-out records have cost."""

    def __str__(self) -> str:
        return _sentence(self)


def privacy_spent(
    charges: Iterable[Charge],
    delta: float,
    *,
    reasons: Iterable[str] = (),
    method: str = "pld",
    public_size: int | None = None,
    schema: str | None = None,
    evaluation_epsilon: float = 0.0,
) -> PrivacySpent:
    """Price the charges, afresh, and say what kind of guarantee stands behind the number. `reasons` void it.

    public_size and schema: the number of records and what a record looks like, where the run took them as public.
    evaluation_epsilon: what noisy evaluations have cost on top; it is pure (delta 0), so it adds to that of the steps.
    """
    validate.delta_or_zero(delta)
    validate.method(method)
    joined = merged(charges)
    sampled = [charge.step for charge in joined if isinstance(charge.step, SampledStep)]
    releases = [step.release for step in sampled]
    guarantee, nominal, why = _kind(joined, releases, list(reasons), delta)
    value: float | None = None
    if guarantee == "certified":
        value = price(joined, delta, method, fresh=True) + evaluation_epsilon
        if math.isinf(value):
            value, guarantee = None, "none"
            why.append("too little noise, rejection or the number of steps makes epsilon infinite at this delta")
    return PrivacySpent(
        epsilon=value,
        delta=delta,
        guarantee=guarantee,
        nominal_epsilon=nominal,
        mechanism=" and ".join(dict.fromkeys(release.mechanism for release in releases)),
        steps=sum(charge.count for charge in joined),
        sample_rates=tuple(sorted({step.sample_rate for step in sampled})),
        rejection=any(step.rejection_threshold > 0 for step in sampled),
        reasons=tuple(why),
        method=method,
        secrets=_joined([release.secrets for release in releases] or [Release.secrets]),
        public_size=public_size,
        schema=schema,
        unit=next(iter(units_of(sampled)), "record"),
        pure_epsilon=pure if value is not None and math.isfinite(pure := pure_epsilon(joined) + evaluation_epsilon) else None,
        evaluation_epsilon=evaluation_epsilon,
    )


def guarantee_of(charges: Iterable[Charge], delta: float = 1e-5) -> Guarantee:
    """What stands behind the epsilon of these charges; "none" where it is infinite. The same charges are priced once."""
    return _guarantee_of(tuple(merged(charges)), validate.delta_or_zero(delta))


@lru_cache(maxsize=256)
def _guarantee_of(joined: tuple[Charge, ...], delta: float) -> Guarantee:
    releases = [charge.step.release for charge in joined if isinstance(charge.step, SampledStep)]
    kind = _kind(joined, releases, [], delta)[0]
    return "none" if kind == "certified" and math.isinf(price(joined, delta)) else kind


def planned_epsilon(charges: Iterable[Charge], step: Step, planned_steps: int, delta: float) -> float | None:
    """Epsilon of all planned steps, those to come being like `step`: what holds after a stop that depends on what was seen."""
    joined = merged(charges)
    left = max(0, planned_steps - sum(charge.count for charge in joined))
    return privacy_spent([*joined, Charge(step, left)], delta).epsilon


def stopped_early(epsilon: float | None, planned: float | None) -> str:
    """Both epsilons of an interrupted run, in words; nothing where there is no guarantee."""
    if epsilon is None or planned is None:
        return ""
    return (
        f"epsilon {up(epsilon)} for the steps taken, {up(planned)} for all planned steps: "
        "if the stop depends on what was seen, only the latter holds"
    )


def warnings_for(epsilon: float | None, delta: float, records: int, unit: Unit = "record") -> list[str]:
    """What a user should be told about these numbers, one sentence each. `records` should be public; epsilon None: no guarantee."""
    found = []
    if delta > 1 / records:
        found.append(
            f"delta is {delta:g}, above 1 / {records:,}: a mechanism that gives away a {unit} now and then would still be allowed; "
            "take a smaller delta."
        )
    if records < FEW_RECORDS:
        found.append(
            f"the data set has {records:,} {COUNTED[unit]}; with fewer than {FEW_RECORDS} the noise that privacy needs leaves "
            "little to learn."
        )
    if epsilon is not None and epsilon > LARGE_EPSILON:
        found.append(f"epsilon is {up(epsilon)}; above {LARGE_EPSILON:g} it promises hardly anything against a strong attacker.")
    return found


def _kind(
    joined: Sequence[Charge], releases: Sequence[Release], reasons: list[str], delta: float
) -> tuple[Guarantee, float | None, list[str]]:
    """The kind of guarantee, the value of an unproved formula if there is one, and what voids the guarantee."""
    why = list(dict.fromkeys([*reasons, *(reason for charge in joined for reason in charge.step.reasons)]))
    if len(units_of(charge.step for charge in joined)) > 1:
        why.append(MIXED)
    gaps = list(dict.fromkeys(release.gap for release in releases if not release.certified))
    if not gaps:
        return "none" if why else "certified", None, why
    nominal, violated = _nominal(joined, releases, delta)
    if nominal is not None and not why and not violated:
        return "nominal", nominal, []
    return "none", nominal, [*gaps, *why, *violated]


def _nominal(charges: Sequence[Charge], releases: Sequence[Release], delta: float) -> tuple[float | None, tuple[str, ...]]:
    """What an unproved formula gives, if all charges are of the one kind that it is for, and its conditions that fail."""
    kinds = {type(release) for release in releases}
    if len(kinds) > 1 or len(releases) < len(charges):
        return None, ()
    return kinds.pop().nominal(charges, delta) or (None, ())


def _joined(texts: Sequence[str]) -> str:
    """One list in words from several: "noise and batches" with "noise, directions and batches" is the latter."""
    *words, last = dict.fromkeys(word for text in sorted(texts, key=len, reverse=True) for word in re.split(", | and ", text))
    return f"{', '.join(words)} and {last}" if words else last


_UNITS: dict[Unit, str] = {
    "record": "record (the unit is one record)",
    "person": "person with all of their records (the unit is one person)",
}


def _pure(spent: PrivacySpent) -> str:
    if spent.pure_epsilon is None or spent.delta == 0 or not spent.steps:
        return ""
    return f" (and pure, with delta = 0: epsilon = {up(spent.pure_epsilon)})"


def _sentence(spent: PrivacySpent) -> str:
    run = f"{spent.steps} step{'s' * (spent.steps != 1)}" + (f" of the {spent.mechanism} mechanism" if spent.mechanism else "")
    if spent.guarantee == "none":
        why = "; ".join(spent.reasons) or Release.gap
        text = f"No privacy guarantee for {run}: {why}."
        if spent.nominal_epsilon is not None:
            text += f" The formula of the paper gives {spent.nominal_epsilon:.4g} (nominal, no guarantee)."
        return text
    if spent.guarantee == "nominal":
        return (
            f"Nominal epsilon {spent.nominal_epsilon:.4g} at delta {spent.delta:g} for {run} (no guarantee): the "
            "formula of the paper's theorem, whose proof has gaps. Do not report it as a privacy guarantee."
        )
    if spent.evaluation_epsilon:
        run += f" and noisy evaluations on held-out records (epsilon {up(spent.evaluation_epsilon)} of it)"
    rates = ", ".join(f"{rate:.4g}" for rate in spent.sample_rates) or "none"
    assumed = (
        f"Poisson sampling at rate {rates}, secret {spent.secrets} from the operating system, "
        "settings fixed before the data was seen, that a record's loss depends on that record alone (checked on synthetic inputs, "
        "not proved)"
    )
    public = []
    if spent.public_size is not None:
        public.append(f"the number of {COUNTED[spent.unit]} ({spent.public_size:,})")
    if spent.schema is not None:
        public.append(f"the shapes and types of a record ({spent.schema})")
    if public:
        assumed += f", {' and '.join(public)} taken as public"
    if spent.rejection:
        assumed += ", a data set at least as large as stated (small batches are redrawn; the cost is included)"
    return (
        f"(epsilon, delta)-differential privacy with epsilon = {up(spent.epsilon or 0.0)} and "
        f"delta = {spent.delta:g}{_pure(spent)}, for adding or removing one {_UNITS[spent.unit]}, after {run}. "
        f"Assumed: {assumed}. Not covered: {NOT_COVERED}."
    )
