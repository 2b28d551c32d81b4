"""The Laplace release: pure epsilon, its pair against closed forms and dp-accounting, and noise that is drawn exactly."""

import math

import numpy as np
import pytest
from scipy import stats

from dpulr import accounting as acc
from dpulr.accounting.laplace import laplace_cells
from dpulr.errors import InvalidArgument
from dpulr.randomness import RandomSource


def charges(noise, rate, steps):
    return [acc.Charge(acc.SampledStep(acc.LaplaceRelease(noise), rate), steps)]


@pytest.mark.parametrize("noise", [0.3, 1.0, 7.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5])
def test_one_step_has_a_closed_form(noise, delta):
    """delta(epsilon) = 1 - e^((epsilon - 1/b) / 2)."""
    exact = max(0.0, 1 / noise + 2 * math.log1p(-delta))
    assert exact <= acc.epsilon(charges(noise, 1.0, 1), delta) <= exact * 1.001 + 1e-3 / noise


@pytest.mark.parametrize(("noise", "rate", "steps"), [(2.0, 0.01, 1000), (5.0, 0.1, 200)])
def test_against_dp_accounting(noise, rate, steps):
    from dp_accounting.pld import privacy_loss_distribution as pld

    theirs = pld.from_laplace_mechanism(noise, 1, sampling_prob=rate, value_discretization_interval=1e-4).self_compose(steps)
    assert acc.epsilon(charges(noise, rate, steps), 1e-5) == pytest.approx(theirs.get_epsilon_for_delta(1e-5), rel=1e-3)


def test_pure_epsilon_adds_up():
    assert acc.epsilon(charges(2.0, 0.25, 7), 0.0) == pytest.approx(7 * math.log(1 + 0.25 * math.expm1(0.5)))
    assert acc.epsilon([*charges(2.0, 0.25, 7), *charges(1.0, 1.0, 2)], 0) == pytest.approx(
        7 * math.log(1 + 0.25 * math.expm1(0.5)) + 2
    )
    gaussian = acc.Charge(acc.SampledStep(acc.GaussianRelease(2.0), 0.1), 1)
    with pytest.raises(InvalidArgument, match="delta is 0"):
        acc.epsilon([gaussian, *charges(2.0, 0.25, 7)], 0.0)
    with pytest.raises(InvalidArgument, match="delta is 0"):
        acc.calibrate(target_epsilon=1.0, delta=0, sample_rate=0.1, steps=3)
    with pytest.raises(InvalidArgument, match="delta is -1"):
        acc.epsilon(charges(2.0, 0.25, 7), -1)


def test_the_statement_gives_both():
    spent = acc.privacy_spent(charges(2.0, 0.01, 100), 1e-5)
    assert spent.epsilon < spent.pure_epsilon
    assert f"pure, with delta = 0: epsilon = {0.6467}" in str(spent)
    assert acc.privacy_spent([], 1e-5).pure_epsilon in (None, 0.0)


def test_pure_epsilon_holds_the_noisy_evaluations_too():
    alone, spent = (acc.privacy_spent(charges(2.0, 0.01, 100), 1e-5, evaluation_epsilon=own) for own in (0.0, 5.0))
    assert spent.pure_epsilon == pytest.approx(alone.pure_epsilon + 5)
    assert f"pure, with delta = 0: epsilon = {5.647}" in str(spent)


@pytest.mark.parametrize("scale", [1, 5, 40])
def test_the_pair_is_that_of_whole_numbers(scale):
    shift = 13
    pair = laplace_cells(scale, shift)
    x = np.arange(-60 * scale, 60 * scale + shift)
    p = stats.dlaplace.pmf(x, 1 / scale)
    q = stats.dlaplace.pmf(x - shift, 1 / scale)
    for epsilon in np.linspace(0, shift / scale, 5):
        exact = np.maximum(q - math.exp(epsilon) * p, 0).sum()
        ours = np.maximum(pair.q - math.exp(epsilon) * pair.p, 0).sum()
        assert ours == pytest.approx(exact, abs=1e-12)


def test_noise_is_drawn_exactly():
    """Chi-square over the middle and both tails; false alarms once in 10^4, with a fixed seed never."""
    draws = RandomSource(3).laplace_noise(4_000, 3).draw().numpy()
    inner = np.arange(-9, 10)
    expected = np.concatenate([[stats.dlaplace.cdf(-10, 1 / 3)], stats.dlaplace.pmf(inner, 1 / 3), [stats.dlaplace.sf(9, 1 / 3)]])
    found = np.array([(draws <= -10).sum(), *[(draws == x).sum() for x in inner], (draws >= 10).sum()])
    assert stats.chisquare(found, expected * len(draws)).pvalue > 1e-4
