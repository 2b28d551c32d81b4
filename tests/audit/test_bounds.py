"""Limits from counts, against direct calculations that share no code with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpulr.audit.bounds import epsilon_from_guesses, epsilon_from_rates, guessing_risk, lower_rate, upper_rate


@pytest.mark.parametrize(("hits", "trials"), [(0, 10), (3, 10), (10, 10), (7, 1000), (999, 1000)])
def test_limits_are_clopper_pearson(hits: int, trials: int) -> None:
    """The rate at which so few (so many) hits have exactly the allowed chance."""
    risk = 0.01
    high, low = float(upper_rate(hits, trials, risk)), float(lower_rate(hits, trials, risk))
    if hits < trials:
        assert stats.binom.cdf(hits, trials, high) == pytest.approx(risk, rel=1e-6)
    else:
        assert high == 1
    if hits > 0:
        assert stats.binom.sf(hits - 1, trials, low) == pytest.approx(risk, rel=1e-6)
    else:
        assert low == 0


@pytest.mark.parametrize("rate", [0.001, 0.03, 0.5, 0.97])
def test_limits_cover_the_truth(rate: float) -> None:
    """Exactly: the chance of all counts whose limit misses the rate is at most the risk."""
    counts, risk = np.arange(201), 0.05
    mass = stats.binom.pmf(counts, 200, rate)
    assert mass[upper_rate(counts, 200, risk) < rate].sum() <= risk
    assert mass[lower_rate(counts, 200, risk) > rate].sum() <= risk


def test_epsilon_of_randomised_response() -> None:
    truth = 1.3
    yes = math.exp(truth) / (1 + math.exp(truth))
    assert epsilon_from_rates(1 - yes, yes, 0.0) == pytest.approx(truth)
    assert epsilon_from_rates(1 - yes, yes, 0.01) < truth
    assert epsilon_from_rates(0.5, 0.4, 0.0) == 0
    # the other direction: an event that is never seen with the record
    assert epsilon_from_rates(0.2, 0.99, 0.0) == pytest.approx(math.log(0.8 / 0.01))


def _direct_risk(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The theorem as printed: f(v) + 2 m delta max_i (f(v - i) - f(v)) / i, term by term."""

    def f(v: int) -> float:
        p = math.exp(epsilon) / (1 + math.exp(epsilon))
        return math.fsum(math.comb(guesses, k) * p**k * (1 - p) ** (guesses - k) for k in range(max(v, 0), guesses + 1))

    slopes = [(f(correct - i) - f(correct)) / i for i in range(1, canaries + 1)]
    return min(1.0, f(correct) + 2 * canaries * delta * max(slopes))


@pytest.mark.parametrize(("canaries", "guesses", "correct"), [(20, 20, 15), (40, 20, 20), (30, 30, 18), (10, 5, 0)])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (0.5, 1e-3), (2.0, 1e-5), (1.0, 0.02)])
def test_risk_of_guesses(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> None:
    assert guessing_risk(canaries, guesses, correct, epsilon, delta) == pytest.approx(
        _direct_risk(canaries, guesses, correct, epsilon, delta), rel=1e-9
    )


@pytest.mark.parametrize(("truth", "delta"), [(0.0, 0.0), (0.7, 0.0), (2.0, 0.0), (1.0, 1e-3), (0.5, 0.01)])
def test_guesses_never_prove_more_than_the_truth(truth: float, delta: float) -> None:
    """Randomised response on each canary; with probability delta it shouts out the answer. Exactly summed over all counts."""
    count, risk = 120, 0.05
    right = delta + (1 - delta) * math.exp(truth) / (1 + math.exp(truth))
    bounds = np.array([epsilon_from_guesses(count, count, k, delta, risk) for k in range(count + 1)])
    mass = stats.binom.pmf(np.arange(count + 1), count, right)
    assert mass[bounds > truth].sum() <= risk
    if truth > 0 and delta == 0:
        assert (mass * bounds).sum() > 0.5 * truth - 0.2  # and it is no empty statement


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="impossible"):
        guessing_risk(10, 12, 5, 1.0, 0.0)
