"""Rejection against exact mixtures on tiny data sets."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from dpulr import accounting as acc
from dpulr.accounting import rejection
from dpulr.accounting.privacy_cost import curves, total_shift, with_rejection

GRID = np.linspace(-14, 14, 28_001)


def output(values, rate, threshold, noise):
    """Density of one release on GRID: all accepted subsets, enumerated."""
    density, accepted = np.zeros_like(GRID), 0.0
    for chosen in itertools.product((0, 1), repeat=len(values)):
        if sum(chosen) < threshold:
            continue
        chance = math.prod(rate if bit else 1 - rate for bit in chosen)
        accepted += chance
        density += chance * stats.norm.pdf(GRID, sum(v for v, bit in zip(values, chosen, strict=True) if bit), noise)
    return density / accepted


def divergence(upper, lower, epsilon):
    return float(np.sum(np.maximum(upper - math.exp(epsilon) * lower, 0)) * (GRID[1] - GRID[0]))


@pytest.mark.parametrize("others", [(0, 0, 0, 0), (1, -1, 0.5, 0), (-1, -1, -1, -1, -1)], ids=["zeros", "mixed", "against"])
@pytest.mark.parametrize("threshold", [0, 1, 2, 3])
@pytest.mark.parametrize("rate", [0.3, 0.7])
def test_exact_mixtures_are_dominated(others, threshold, rate):
    noise = 1.3
    without = output(others, rate, threshold, noise)
    with_record = output((*others, 1), rate, threshold, noise)
    step = acc.SampledStep(acc.GaussianRelease(noise), rate, threshold, len(others) if threshold else None)
    charge = [acc.Charge(step, 1)]
    shift = total_shift(charge)
    for epsilon in (0.05, 0.2, 0.5, 1.0, 2.0):
        bound = acc.delta_at(charge, epsilon)
        truth = max(divergence(with_record, without, epsilon), divergence(without, with_record, epsilon))
        assert truth <= bound + 1e-9
        # Where the other records are silent and nothing is rejected, the bound is the truth.
        if threshold == 0 and not any(others):
            assert bound == pytest.approx(truth, rel=0.01, abs=1e-7)
    assert shift == pytest.approx(math.log1p(rate_odds(others, rate, threshold)), rel=1e-6)


def rate_odds(others, rate, threshold):
    size = len(others)
    return rate * stats.binom.pmf(threshold - 1, size, rate) / stats.binom.sf(threshold - 1, size, rate) if threshold else 0.0


def test_two_adaptive_steps_are_dominated():
    """The product of two mixtures, on a plane."""
    others, rate, threshold, noise = (0, 0, 0), 0.4, 1, 1.5
    coarse = slice(None, None, 70)
    without, with_record = (output(v, rate, threshold, noise)[coarse] for v in (others, (*others, 1)))
    cell = (GRID[70] - GRID[0]) ** 2
    p, q = np.outer(without, without), np.outer(with_record, with_record)
    charge = [acc.Charge(acc.SampledStep(acc.GaussianRelease(noise), rate, threshold, len(others)), 2)]
    for epsilon in (0.3, 0.6, 1.0):
        truth = max(float(np.maximum(q - math.exp(epsilon) * p, 0).sum()), float(np.maximum(p - math.exp(epsilon) * q, 0).sum()))
        assert truth * cell <= acc.delta_at(charge, epsilon) + 1e-6


def test_the_formula_of_the_theory_is_never_beaten_from_above():
    """Using each direction's own cost can only improve on PLD.epsilon(delta - d_rej) + shift."""
    step = acc.SampledStep(acc.GaussianRelease(2.0), 1 / 120, 380, 59_999)
    charges = [acc.Charge(step, 3000)]
    shift, pair = total_shift(charges), curves(charges, 1e-5)
    lost = -math.expm1(-shift)
    assert 0 < lost < 1e-5
    plain = max(pair.remove.epsilon(1e-5 - lost), pair.add.epsilon(1e-5 - lost)) + shift
    ours = acc.epsilon(charges, 1e-5)
    assert pair.remove.epsilon(1e-5) <= ours <= plain * (1 + 1e-12)
    assert with_rejection(pair, 1e-5, shift) == ours


def test_infinite_where_rejection_alone_exceeds_delta():
    setting = {"noise_multiplier": 2.0, "sample_rate": 1 / 120, "steps": 3000, "delta": 1e-5, "min_dataset_size": 59_999}
    assert math.isinf(acc.gaussian_epsilon(**setting, rejection_threshold=500))
    assert math.isinf(acc.gaussian_epsilon(**setting, rejection_threshold=500, method="rdp"))
    assert math.isfinite(acc.gaussian_epsilon(**setting, rejection_threshold=366))
    with pytest.raises(ValueError, match="rejection alone"):
        acc.calibrate(
            target_epsilon=1.0, delta=1e-5, sample_rate=1 / 120, steps=3000, rejection_threshold=500, min_dataset_size=59_999
        )


@given(size=st.integers(5, 400), rate=st.floats(0.01, 0.99), share=st.floats(0, 1), seed=st.integers(0, 10))
@settings(max_examples=60, deadline=None)
def test_odds_fall_with_the_size_and_match_scipy(size, rate, share, seed):
    threshold = 1 + int(share * (size - 1))
    value = rejection.odds(rate, threshold, size)
    accepted = special.bdtrc(threshold - 1, size, rate)
    if accepted > 1e-250:
        exact = rate * stats.binom.pmf(threshold - 1, size, rate) / accepted
        assert value == pytest.approx(exact, rel=1e-8, abs=1e-300)
        assert rejection.odds(rate, threshold, size + 1 + seed) <= value * (1 + 1e-9)


def test_auto_threshold_is_the_largest_that_is_nearly_free():
    release = acc.GaussianRelease(2.0)
    setting = {"sample_rate": 1 / 120, "steps": 3000, "delta": 1e-5, "min_dataset_size": 59_999}
    chosen = acc.auto_rejection_threshold(release, **setting)

    def price(threshold):
        step = acc.SampledStep(release, 1 / 120, threshold, 59_999)
        return acc.epsilon([acc.Charge(step, 3000)], 1e-5)

    assert 0 < chosen < 500
    assert price(chosen) <= 1.01 * price(0) < price(chosen + 1)
    assert acc.auto_rejection_threshold(release, **setting, fraction=0.1) >= chosen


def test_auto_is_the_threshold_it_stands_for() -> None:
    setting = {"noise_multiplier": 2.0, "sample_rate": 1 / 120, "steps": 3000, "delta": 1e-5}
    threshold = acc.auto_rejection_threshold(
        acc.GaussianRelease(2.0), sample_rate=1 / 120, steps=3000, delta=1e-5, min_dataset_size=59_999
    )
    price = acc.gaussian_epsilon(**setting, rejection_threshold="auto", min_dataset_size=59_999)
    assert price == acc.gaussian_epsilon(**setting, rejection_threshold=threshold, min_dataset_size=59_999)
    assert acc.gaussian_epsilon(**setting) < price <= 1.01 * acc.gaussian_epsilon(**setting)
    with pytest.raises(ValueError, match="min_dataset_size"):
        acc.gaussian_epsilon(**setting, rejection_threshold="auto")
