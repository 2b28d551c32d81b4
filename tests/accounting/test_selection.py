"""Private selection: the law of the number of runs, and the bound against the exact cost on small discrete mechanisms."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest

from dpulr import accounting
from dpulr.accounting import selection
from dpulr.accounting.events import Charge, GaussianRelease, SampledStep
from dpulr.accounting.renyi import ORDERS
from dpulr.accounting.selection import RandomRuns, RenyiCurve
from dpulr.errors import InvalidArgument

ETAS = (-0.5, 0.0, 0.5, 1.0, 3.0)
STEP = SampledStep(GaussianRelease(2.0, numbers=1_000), 1 / 120)


@pytest.mark.parametrize("eta", ETAS)
@pytest.mark.parametrize("mean", [1.5, 10])
def test_the_number_of_runs_has_the_law_that_it_says(eta: float, mean: float) -> None:
    runs = RandomRuns.about(mean, eta)
    masses = np.fromiter(islice(runs.probabilities(), 20_000), dtype=float)
    numbers = np.arange(1, len(masses) + 1)
    assert masses.sum() == pytest.approx(1, abs=1e-9)
    assert masses @ numbers == pytest.approx(mean, rel=1e-6)
    assert runs.mean == pytest.approx(mean, rel=1e-6)
    assert runs.miss(0.2) == pytest.approx(masses @ 0.8**numbers, rel=1e-9)
    for level in (0.3, 0.9, 0.999):
        number = runs.quantile(level)
        assert masses[:number].sum() >= level > masses[: number - 1].sum()


# --- exact costs ------------------------------------------------------------------------------------------------------------
def best_of(law: np.ndarray, runs: RandomRuns) -> np.ndarray:
    """The law of the largest of J draws from `law` (outcomes in rising order), by P[largest <= y] = E[F(y)^J]."""
    below = np.minimum(np.cumsum(law), 1.0)
    left = 1 - (1 - runs.gamma) * below
    if runs.eta == 0:
        reached = np.log(left) / math.log(runs.gamma)
    else:
        reached = np.expm1(-runs.eta * np.log(left)) / math.expm1(-runs.eta * math.log(runs.gamma))
    return np.diff(reached, prepend=0.0)


def drawn_best(law: np.ndarray, runs: RandomRuns, trials: int, rng: np.random.Generator) -> np.ndarray:
    """The same by doing it."""
    found = np.zeros(len(law))
    for level in rng.random(trials):
        found[rng.choice(len(law), runs.quantile(level), p=law).max()] += 1
    return found / trials


def renyi(p: np.ndarray, q: np.ndarray, order: float) -> float:
    with np.errstate(over="ignore"):
        return math.log(float(np.sum(p * (p / q) ** (order - 1)))) / (order - 1)


def curve_of(p: np.ndarray, q: np.ndarray) -> RenyiCurve:
    return RenyiCurve(np.array([max(renyi(p, q, a), renyi(q, p, a)) for a in ORDERS]), 0.0)


def mechanisms(rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs of laws on a few outcomes: a coin, a rare best outcome (the worst case of selection), random ones, a staircase."""
    found = []
    for epsilon in (0.1, 0.5, 1.5):
        right = math.exp(epsilon) / (1 + math.exp(epsilon))
        found.append((np.array([right, 1 - right]), np.array([1 - right, right])))
        for rare in (0.3, 0.03, 1e-3):
            found.append((np.array([1 - rare, rare]), np.array([1 - rare * math.exp(-epsilon), rare * math.exp(-epsilon)])))
        p = rng.dirichlet(np.ones(6))
        q = p * np.exp(epsilon * rng.uniform(-1, 1, 6))
        found.append((p, q / q.sum()))
        grid = np.exp(-epsilon * np.abs(np.arange(9) - 3.0)), np.exp(-epsilon * np.abs(np.arange(9) - 4.0))
        found.append((grid[0] / grid[0].sum(), grid[1] / grid[1].sum()))
    return found


@pytest.mark.parametrize("eta", ETAS)
def test_the_bound_is_never_below_the_truth(eta: float) -> None:
    rng, closest = np.random.default_rng(1), 0.0
    for p, q in mechanisms(rng):
        for mean in (1.5, 5, 30):
            runs = RandomRuns.about(mean, eta)
            curve, outcomes = curve_of(p, q), [best_of(law, runs) for law in (p, q)]
            for delta in (1e-6, 1e-3):
                epsilon = selection.selected(curve, runs, delta)
                for a, b in (outcomes, outcomes[::-1]):
                    assert np.maximum(a - math.exp(epsilon) * b, 0).sum() <= delta
                    exact = math.log(max(float(np.max(a / b)), 1.0))
                    closest = max(closest, min(exact, 10.0) / epsilon)
    assert closest > 0.2  # it is a bound of the right size, too


def test_the_exact_law_is_what_happens() -> None:
    """The oracle above, and the drawing of J, against doing it 20,000 times: five deviations, a false alarm in 10^5 runs."""
    rng = np.random.default_rng(3)
    law = np.array([0.5, 0.3, 0.15, 0.05])
    for eta in (0.0, 1.0):
        runs = RandomRuns.about(4, eta)
        exact, found = best_of(law, runs), drawn_best(law, runs, 20_000, rng)
        assert np.abs(found - exact).max() < 5 * math.sqrt(0.25 / 20_000)


def test_the_orders_are_those_of_the_theorem() -> None:
    """Renyi divergences themselves, order by order, against the formula as it is printed in the paper."""
    p, q = np.array([0.97, 0.03]), np.array([0.99, 0.01])
    runs = RandomRuns.about(8, 1.0)
    curve, (a, b) = curve_of(p, q), (best_of(law, runs) for law in (p, q))
    other = min((1 - 1 / order) * value - math.log(runs.gamma) / order for order, value in zip(ORDERS, curve.values, strict=True))
    for order, value in zip(ORDERS[::20], curve.values[::20], strict=True):
        bound = value + 2 * other + math.log(runs.mean) / (order - 1)
        assert max(renyi(a, b, order), renyi(b, a, order)) <= bound


# --- runs -------------------------------------------------------------------------------------------------------------------
def test_a_search_costs_more_than_a_run_and_grows_with_its_length() -> None:
    costs = [selection.search_cost([[Charge(STEP, 600)]], RandomRuns.about(n), 1e-5, None) for n in (1.5, 10, 100)]
    assert costs[0].run < costs[0].total < costs[1].total < costs[2].total < 3 * costs[0].run
    assert costs[0].run == pytest.approx(accounting.epsilon([Charge(STEP, 600)], 1e-5))


def test_the_worst_candidate_is_charged() -> None:
    runs, cheap = RandomRuns.about(5), SampledStep(GaussianRelease(4.0), 1 / 200)
    both = selection.search_cost([[Charge(cheap, 100)], [Charge(STEP, 600)]], runs, 1e-5, None)
    assert both.total >= selection.search_cost([[Charge(STEP, 600)]], runs, 1e-5, None).total
    assert both.total > selection.search_cost([[Charge(cheap, 100)]], runs, 1e-5, None).total


def test_hidden_directions_rejection_and_rounding_are_priced() -> None:
    runs = RandomRuns.about(5)
    hidden = accounting.hidden_direction_release(1.0, dims=[16, 10], repeats=4)
    plain = selection.search_cost([[Charge(SampledStep(hidden, 1 / 100), 200)]], runs, 1e-5, None)
    assert plain.run < plain.total < 4 * plain.run
    rejected = SampledStep(GaussianRelease(2.0), 1 / 120, 440, 60_000)
    cost = selection.search_cost([[Charge(rejected, 600)]], runs, 1e-5, None)
    assert cost.total > selection.search_cost([[Charge(SampledStep(GaussianRelease(2.0), 1 / 120), 600)]], runs, 1e-5, None).total
    ideal = selection.search_cost([[Charge(SampledStep(GaussianRelease(2.0), 1 / 120), 600)]], runs, 1e-5, None).total
    rounded = selection.search_cost([[Charge(SampledStep(GaussianRelease(2.0, numbers=100_000), 1 / 120), 600)]], runs, 1e-5, None)
    assert ideal < rounded.total < ideal + 0.01


def test_scores_cost_their_records_no_more_than_training_costs_the_others() -> None:
    runs = RandomRuns.about(10)
    noise = selection.score_noise_for(1.5, runs, 1e-5)
    cost = selection.search_cost([[Charge(STEP, 600)]], runs, 1e-5, noise)
    assert cost.scoring <= 1.5 < selection.search_cost([[Charge(STEP, 600)]], runs, 1e-5, noise / 1.01).scoring
    assert cost.total == max(cost.training, cost.scoring)


@pytest.mark.parametrize("eta", [0.0, 1.0, 10.0, 30.0])
def test_half_of_all_searches_are_longer_than_the_median(eta: float) -> None:
    """With a large eta the first masses are tiny, and so are the last."""
    runs = RandomRuns.about(1_000, eta)
    middle, probabilities = runs.quantile(0.5), runs.probabilities()
    below = math.fsum(next(probabilities) for _ in range(middle))
    assert below - 0.1 < 0.5 <= below


@pytest.mark.parametrize("mean", [1, 0, -3, math.nan, math.inf])
def test_odd_numbers_of_runs_are_refused(mean: float) -> None:
    with pytest.raises(InvalidArgument, match="runs is"):
        RandomRuns.about(mean)
    with pytest.raises(InvalidArgument, match="eta is -1"):
        RandomRuns.about(10, -1.0)
