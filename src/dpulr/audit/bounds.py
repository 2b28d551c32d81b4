"""What counts can prove: exact binomial limits, epsilon from the rates of an event, and guesses in a single run (docs/audit.md)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from dpulr import search
from dpulr.errors import InvalidArgument

Array = npt.NDArray[np.float64]


def upper_rate(hits: npt.ArrayLike, trials: int, risk: float) -> Array:
    """Clopper-Pearson: with probability 1 - risk the true rate is at most this."""
    count = np.asarray(hits, dtype=np.float64)
    limit = special.betaincinv(count + 1, np.maximum(trials - count, 1), 1 - risk)
    bounded: Array = np.where(count >= trials, 1.0, limit)
    return bounded


def lower_rate(hits: npt.ArrayLike, trials: int, risk: float) -> Array:
    """Clopper-Pearson: with probability 1 - risk the true rate is at least this."""
    return 1 - upper_rate(trials - np.asarray(hits, dtype=np.float64), trials, risk)


def epsilon_from_rates(false_positive: npt.ArrayLike, true_positive: npt.ArrayLike, delta: float) -> Array:
    """The least epsilon that allows an event these rates, in either direction.

    `false_positive` bounds the event's probability without the record from above, `true_positive` that with it from below.
    """
    fpr, tpr = np.asarray(false_positive, dtype=np.float64), np.asarray(true_positive, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        removed = np.log(np.maximum(tpr - delta, 0.0)) - np.log(fpr)
        added = np.log(np.maximum(1 - fpr - delta, 0.0)) - np.log(1 - tpr)
    found: Array = np.maximum(np.maximum(np.nan_to_num(removed, nan=0.0, posinf=math.inf, neginf=0.0), 0.0), np.maximum(added, 0.0))
    return found


def guessing_risk(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """An upper bound on the chance of at least this many right guesses, if the whole run is (epsilon, delta)-private.

    Theorem 5.2 of Steinke, Nasr, Jagielski (2023). `canaries` records were each included on a fair coin; about `guesses` of them
    the attacker made a guess. With f(v) = Pr[Bin(guesses, e^eps / (1 + e^eps)) >= v] the bound is
    f(correct) + 2 * canaries * delta * max over i of (f(correct - i) - f(correct)) / i.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise InvalidArgument(f"{correct} right of {guesses} guesses about {canaries} canaries is impossible.")
    chance = special.expit(epsilon)
    tail = float(stats.binom.sf(correct - 1, guesses, chance))
    if delta == 0 or correct == 0:
        return min(tail, 1.0)
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, chance))  # f(correct - i) - f(correct)
    slope = float((below / np.arange(1, correct + 1)).max())
    return min(tail + 2 * canaries * delta * slope, 1.0)


def epsilon_from_guesses(canaries: int, guesses: int, correct: int, delta: float, risk: float) -> float:
    """The largest epsilon that this many right guesses refute at this risk; 0 if none."""
    low, high = 0.0, 1.0
    if guessing_risk(canaries, guesses, correct, 0.0, delta) > risk:
        return 0.0
    while guessing_risk(canaries, guesses, correct, high, delta) <= risk:
        low, high = high, 2 * high
        if high > 1e3:
            return low
    width = (high - low) / 2**30
    return search.boundary(lambda eps: guessing_risk(canaries, guesses, correct, eps, delta) <= risk, low, high, width)[0]
