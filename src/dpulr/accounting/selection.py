"""What it costs to choose among several private runs: a random number of them, the best one released (docs/theory.md, section 13).

The number of runs J has a truncated negative binomial law with shape `eta` and `gamma` [Papernot, Steinke 2022]. A run is a list of
charges; where it is scored on private records that it was not trained on, the score has a charge of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import ClassVar

import numpy as np

from dpulr import search, validate
from dpulr.accounting.dominating_pairs import Array
from dpulr.accounting.events import Charge, GaussianRelease, Release, SampledStep
from dpulr.accounting.finite_precision import slack
from dpulr.accounting.kinds import register
from dpulr.accounting.privacy_cost import epsilon as price
from dpulr.accounting.privacy_cost import is_certified, merged, total_shift
from dpulr.accounting.renyi import ORDERS, of_pair, to_epsilon
from dpulr.errors import BudgetError, InvalidArgument

ROOMS = (0.999, 0.99, 0.9, 0.5)  # shares of delta that the conversion gets; the rest is for what was left out
RARES = (1e-9, 1e-6, 1e-3)  # shares of delta that finite precision may take of all runs; the best is taken
LEAST_GAMMA = 1e-9


@register
@dataclass(frozen=True, slots=True)
class RandomRuns:
    """How many runs there are: P[J = j] is proportional to (1-gamma)^j (eta)(eta+1)...(eta+j-1) / j!, j from 1 on.

    eta 0 is the logarithmic law, 1 the geometric one. The smaller eta is, the cheaper the search and the more uneven its length.
    """

    kind: ClassVar[str] = "random-runs"

    eta: float
    gamma: float

    def __post_init__(self) -> None:
        if not validate.number("eta", self.eta) > -1:
            validate.refuse("eta", self.eta, "a number above -1")
        validate.fraction("gamma", self.gamma)

    @classmethod
    def about(cls, mean: float, eta: float = 0.0) -> RandomRuns:
        """The law with this mean."""
        if not 1 < validate.number("runs", mean) <= 10_000:
            validate.refuse("runs", mean, "a number above 1 (and at most 10,000), the mean number of runs")
        ends = math.log(LEAST_GAMMA), math.log1p(-1e-9)
        found = cls(eta, math.exp(search.boundary(lambda log_gamma: cls(eta, math.exp(log_gamma)).mean > mean, *ends)[1]))
        if abs(found.mean / mean - 1) > 1e-3:
            raise InvalidArgument(f"no number of runs with eta={eta:g} has a mean of {mean:g}: take fewer runs, or a larger eta.")
        return found

    @property
    def mean(self) -> float:
        """E[J]."""
        eta, gamma = self.eta, self.gamma
        if abs(eta) < 1e-9:
            return (1 / gamma - 1) / math.log(1 / gamma)
        return eta * (1 - gamma) / (gamma * -math.expm1(eta * math.log(gamma)))

    def probabilities(self) -> Iterator[float]:
        """P[J = 1], P[J = 2], ..."""
        eta, gamma = self.eta, self.gamma
        first = -(1 - gamma) / math.log(gamma) if abs(eta) < 1e-9 else (1 - gamma) * eta / math.expm1(-eta * math.log(gamma))
        j = 1
        while True:
            yield first
            first *= (1 - gamma) * (j + eta) / (j + 1)
            j += 1

    def quantile(self, level: float) -> int:
        """The least number that J exceeds with probability at most 1 - level. For a secret uniform level: a draw of J."""
        total = 0.0
        for j, mass in enumerate(self.probabilities(), 1):
            total += mass
            if total >= level or (total > 0.5 and mass < 1e-18):  # masses may grow first
                return j
        raise AssertionError

    def miss(self, share: float) -> float:
        """The probability that none of the runs is among the best `share` of all settings."""
        left = 1 - (1 - self.gamma) * (1 - share)
        if abs(self.eta) < 1e-9:
            return math.log(left) / math.log(self.gamma)
        return math.expm1(-self.eta * math.log(left)) / math.expm1(-self.eta * math.log(self.gamma))


@dataclass(frozen=True, slots=True)
class RenyiCurve:
    """Renyi divergences of a run at `renyi.ORDERS`, both directions, after a part of mass `lost` was taken off on either side."""

    values: Array
    lost: float

    @classmethod
    def of(cls, charges: Sequence[Charge], rare: float) -> RenyiCurve:
        """From the dominating pairs of the steps; with what finite precision and rejection add (`rare`: mass for the former)."""
        if not is_certified(charges):
            raise BudgetError("a search over runs without a guarantee has none, either.")
        values, lost = np.zeros_like(ORDERS), -math.expm1(-total_shift(charges))
        for charge in charges:
            assert isinstance(charge.step, SampledStep)
            own, missing = _of_pair(charge.step.release, charge.step.sample_rate)
            values, lost = values + charge.count * own, lost + charge.count * missing
        rounding = slack(charges, rare)
        lost += rounding.mass * math.exp(min(rounding.factor, 700.0))
        if lost >= 1:
            return cls(np.full_like(ORDERS, math.inf), 1.0)
        values = values + rounding.loss + rounding.factor / (ORDERS - 1) - ORDERS / (ORDERS - 1) * math.log1p(-lost)
        return cls(values, lost)

    def worst(self, other: RenyiCurve) -> RenyiCurve:
        """A bound for both."""
        return RenyiCurve(np.maximum(self.values, other.values), max(self.lost, other.lost))


def selected(curve: RenyiCurve, runs: RandomRuns, delta: float) -> float:
    """Epsilon of the whole search: the output of the best of a random number of runs, each with this curve."""
    mean, finite = runs.mean, np.isfinite(curve.values)
    if not finite.any():
        return math.inf
    extra = (1 - 1 / ORDERS) * curve.values - math.log(runs.gamma) / ORDERS
    values = curve.values + (1 + runs.eta) * float(extra[finite].min()) + math.log(mean) / (ORDERS - 1)
    found = math.inf
    for room in ROOMS:
        epsilon = to_epsilon(ORDERS, values, room * delta)
        if mean * curve.lost * (1 + math.exp(min(epsilon, 700.0))) <= (1 - room) * delta:
            found = min(found, epsilon)
    return found


@dataclass(frozen=True, slots=True)
class SearchCost:
    """`run` is what one run costs by itself, `training` and `scoring` what the search costs records of either part."""

    run: float
    training: float
    scoring: float
    delta: float
    runs: RandomRuns
    score_noise: float | None

    @property
    def total(self) -> float:
        return max(self.training, self.scoring)


def search_cost(
    candidates: Sequence[Sequence[Charge]], runs: RandomRuns, delta: float, score_noise: float | None, *, alone: bool = True
) -> SearchCost:
    """What a search costs in which a run takes one of these candidates at random. score_noise None: it is scored on public data.

    A record is trained on or scored on, never both: epsilon is the larger of the two. A run's settings come out with it, so that
    the divergence of a run is at most the largest of all candidates', order by order. alone=False leaves out the cost of one run.
    """
    validate.delta(delta)
    trained = _best([tuple(merged(charges)) for charges in candidates], runs, delta)
    scored = 0.0 if score_noise is None else _best([(score_charge(score_noise),)], runs, delta)
    single = max(price(charges, delta) for charges in candidates) if alone else math.nan
    return SearchCost(single, trained, scored, delta, runs, score_noise)


def score_noise_for(training: float, runs: RandomRuns, delta: float) -> float:
    """The least noise on a count of right answers with which scoring costs its records no more than training costs the others."""

    def fits(log_noise: float) -> bool:
        return _best([(score_charge(math.exp(log_noise)),)], runs, delta) <= training

    low, high = math.log(0.1), math.log(1e6)
    if not fits(high):
        raise BudgetError(f"the budget is too small: no noise on the scores of about {runs.mean:g} runs stays within it.")
    return math.exp(low if fits(low) else search.boundary(lambda log_noise: not fits(log_noise), low, high, 1e-3)[1])


def score_charge(score_noise: float) -> Charge:
    """A count of right answers, to which a record adds at most 1, with normal noise of this deviation."""
    return Charge(SampledStep(GaussianRelease(score_noise, mechanism="score", numbers=1), 1.0), 1)


def _best(candidates: Sequence[tuple[Charge, ...]], runs: RandomRuns, delta: float) -> float:
    """Epsilon of a search over these, order by order the worst of them. Each share for finite precision gives a bound."""

    def with_share(rare: float) -> float:
        curves = [RenyiCurve.of(charges, rare * delta / runs.mean) for charges in dict.fromkeys(candidates)]
        return selected(reduce(RenyiCurve.worst, curves), runs, delta)

    return min(map(with_share, RARES))


@lru_cache(maxsize=512)
def _of_pair(release: Release, sample_rate: float) -> tuple[Array, float]:
    return of_pair(release, sample_rate)
