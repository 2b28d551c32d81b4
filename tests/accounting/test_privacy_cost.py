"""What must hold whatever the setting: monotone, additive, order-free, and sane over the whole stated range."""

import itertools
import math
import warnings

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from dpulr import accounting as acc
from tests.support.accounting_oracle import gaussian_delta

DELTA = 1e-5
noises = st.floats(0.4, 20)
rates = st.floats(1e-4, 1.0)
counts = st.integers(1, 2000)
SLACK = 1.004  # two bounds of one truth may differ by their tightness


def gaussian(noise, rate, **more):
    return acc.SampledStep(acc.GaussianRelease(noise), rate, **more)


def check_monotone_in_every_argument(noise, rate, steps, factor):
    base = acc.epsilon([acc.Charge(gaussian(noise, rate), steps)], DELTA)
    assert acc.epsilon([acc.Charge(gaussian(noise * factor, rate), steps)], DELTA) <= base * SLACK
    assert acc.epsilon([acc.Charge(gaussian(noise, rate / factor), steps)], DELTA) <= base * SLACK
    assert acc.epsilon([acc.Charge(gaussian(noise, rate), steps + 1 + steps // 10)], DELTA) * SLACK >= base
    assert acc.epsilon([acc.Charge(gaussian(noise, rate), steps)], DELTA * factor) <= base


@pytest.mark.parametrize(("noise", "rate", "steps", "factor"), [(0.7, 0.01, 1500, 1.1), (5.0, 0.4, 300, 2.0)])
def test_monotone_in_every_argument(noise, rate, steps, factor):
    check_monotone_in_every_argument(noise, rate, steps, factor)


@pytest.mark.slow
@given(noises, rates, counts, st.floats(1.02, 3))
@settings(max_examples=10, deadline=None)
def test_monotone_in_every_argument_anywhere(noise, rate, steps, factor):
    check_monotone_in_every_argument(noise, rate, steps, factor)


def check_splitting_and_order_do_not_matter(noise, rate, first, second):
    one, two = gaussian(noise, rate), gaussian(noise * 1.5, rate)
    whole = acc.epsilon([acc.Charge(one, first), acc.Charge(two, second)], DELTA)
    split = acc.epsilon([acc.Charge(two, second), acc.Charge(one, first - first // 2), acc.Charge(one, first // 2)], DELTA)
    assert whole == pytest.approx(split, rel=1e-9, abs=1e-12)
    ledger = acc.Ledger()
    for step, count in ((one, first), (two, second)):
        ledger.append(step, count)
    assert ledger.epsilon(DELTA) == whole
    assert ledger.steps == first + second


@pytest.mark.parametrize(("noise", "rate", "first", "second"), [(0.8, 0.01, 700, 300), (6.0, 0.3, 11, 2000)])
def test_splitting_and_order_do_not_matter(noise, rate, first, second):
    check_splitting_and_order_do_not_matter(noise, rate, first, second)


@pytest.mark.slow
@given(noises, rates, counts, counts)
@settings(max_examples=8, deadline=None)
def test_splitting_and_order_do_not_matter_anywhere(noise, rate, first, second):
    check_splitting_and_order_do_not_matter(noise, rate, first, second)


def check_a_mixture_of_steps_costs_between_the_larger_part_and_the_sum(noise, rate, steps, noise2, rate2, steps2):
    first, second = acc.Charge(gaussian(noise, rate), steps), acc.Charge(gaussian(noise2, rate2), steps2)
    joint = acc.epsilon([first, second], DELTA)
    assert joint * SLACK >= max(acc.epsilon([first], DELTA), acc.epsilon([second], DELTA))
    assert joint <= (acc.epsilon([first], DELTA / 2) + acc.epsilon([second], DELTA / 2)) * SLACK + 1e-9


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "noise2", "rate2", "steps2"), [(0.7, 0.01, 500, 3.0, 0.1, 200), (10.0, 0.9, 3, 1.0, 0.001, 2000)]
)
def test_a_mixture_of_steps_costs_between_the_larger_part_and_the_sum(noise, rate, steps, noise2, rate2, steps2):
    check_a_mixture_of_steps_costs_between_the_larger_part_and_the_sum(noise, rate, steps, noise2, rate2, steps2)


@pytest.mark.slow
@given(noises, rates, counts, st.floats(0.5, 10), rates, counts)
@settings(max_examples=8, deadline=None)
def test_a_mixture_of_steps_costs_between_the_larger_part_and_the_sum_anywhere(noise, rate, steps, noise2, rate2, steps2):
    check_a_mixture_of_steps_costs_between_the_larger_part_and_the_sum(noise, rate, steps, noise2, rate2, steps2)


@pytest.mark.parametrize("parts", [[(2.0, 3), (5.0, 10)], [(1.0, 1), (10.0, 100), (3.0, 2)]])
def test_different_noise_by_step_has_a_closed_form_at_full_batches(parts):
    single = 1 / math.sqrt(sum(count / noise**2 for noise, count in parts))
    exact = optimize.brentq(lambda e: gaussian_delta(single, e) - DELTA, 0, 100)
    ours = acc.epsilon([acc.Charge(gaussian(noise, 1.0), count) for noise, count in parts], DELTA)
    assert exact <= ours <= exact * 1.003


def test_layers_with_their_own_settings():
    """Weights and repeats by layer are the same as sites with their own ratios, in any order."""
    ours = acc.hidden_direction_epsilon(
        noise_multiplier=2.0,
        dims=[64, 10],
        layer_weights=[2.0, 1.0],
        repeats=[4, 1],
        sample_rate=0.01,
        steps=500,
        delta=DELTA,
    )
    sites = (acc.HiddenSite(10, 2.0), acc.HiddenSite(64, 1.0, 4))
    step = acc.SampledStep(acc.HiddenDirectionRelease(sites), 0.01)
    assert acc.epsilon([acc.Charge(step, 500)], DELTA) == pytest.approx(ours, rel=1e-9)


def test_profile_and_its_inverse_agree():
    charges = [acc.Charge(acc.SampledStep(acc.GaussianRelease(1.0), 0.01), 1000)]
    profile = acc.privacy_profile(charges, [1e-3, 1e-5, 1e-7])
    assert [delta for delta, _ in profile] == [1e-3, 1e-5, 1e-7]
    values = [value for _, value in profile]
    assert values == sorted(values)
    for delta, value in profile:
        assert acc.delta_at(charges, value) == pytest.approx(delta, rel=0.01)
    assert acc.delta_at(charges, 0.0) < 1
    with pytest.raises(ValueError, match="epsilon"):
        acc.delta_at(charges, -1.0)


def test_mixed_mechanisms_and_thresholds_by_step():
    hidden = acc.SampledStep(acc.hidden_direction_release(1.0, [32, 10]), 0.01)
    exact = gaussian(2.0, 0.02)
    rejecting = gaussian(2.0, 0.02, rejection_threshold=60, min_dataset_size=5000)
    joint = acc.epsilon([acc.Charge(hidden, 300), acc.Charge(exact, 200)], DELTA)
    dearer = acc.epsilon([acc.Charge(hidden, 300), acc.Charge(exact, 100), acc.Charge(rejecting, 100)], DELTA)
    assert acc.epsilon([acc.Charge(hidden, 300)], DELTA) < joint < dearer < joint * 1.1


@pytest.mark.parametrize("step", [acc.Unaccounted("a reason"), acc.SampledStep(acc.PaperRelease(4.0), 0.01)])
def test_anything_uncertified_makes_epsilon_infinite(step):
    charges = [acc.Charge(gaussian(2.0, 0.01), 10), acc.Charge(step, 1)]
    assert math.isinf(acc.epsilon(charges, DELTA))
    assert acc.delta_at(charges, 5.0) == 1.0
    assert not acc.Ledger(charges).certified
    assert acc.epsilon([*charges[:1], acc.Charge(step, 0)], DELTA) < 1


RANGE = [
    (dims, repeats, noise, rate, steps)
    for dims in ([1], [2], [128], [100_000], [128] * 100)
    for repeats in (1, 256)
    for noise in (0.05, 1.0, 100.0)
    for rate, steps in ((1.0, 1), (1e-5, 10**6), (1.0, 10**6))
]
QUICK = RANGE[::7]  # all dims, repeats, noises and rates occur


@pytest.mark.parametrize(
    ("dims", "repeats", "noise", "rate", "steps"),
    [pytest.param(*setting, marks=[] if setting in QUICK else pytest.mark.slow) for setting in RANGE],
)
def test_no_numerical_trouble_over_the_stated_range(dims, repeats, noise, rate, steps):
    """Finite or infinite, never negative, NaN, or a warning; and not above the Gaussian price of the same noise."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = acc.hidden_direction_epsilon(
            noise_multiplier=noise, dims=dims, repeats=repeats, sample_rate=rate, steps=steps, delta=DELTA
        )
        plain = acc.gaussian_epsilon(noise_multiplier=noise / math.sqrt(len(dims)), sample_rate=rate, steps=steps, delta=DELTA)
    assert ours >= 0
    assert ours <= plain * 1.01


def check_gaussian_over_a_wide_range(noise, rate, steps, delta):
    """No warning, not above full batches, whose epsilon has a closed form, and not below one step, which is exact as well."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = acc.gaussian_epsilon(noise_multiplier=noise, sample_rate=rate, steps=steps, delta=delta)
    if math.isinf(value):  # only where the losses are beyond the range of exponentials, or delta is below what rounding may take
        assert steps / noise**2 > 600 or delta < 1e-16 * steps
        return
    assert value <= full_batches(noise / math.sqrt(steps), delta) * 1.02 + 1e-9
    assert value >= one_step(noise, rate, delta) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta"),
    [
        (0.05, 1e-6, 1, 1e-3),
        (0.4, 1.0, 3, 1e-9),
        (1.0, 1e-5, 10**6, 1e-5),
        (9e3, 0.5, 10**7, 1e-8),
        (0.01, 1.0, 1, 0.5),
        (50.0, 0.02, 4000, 1e-12),
        pytest.param(7683.0, 1e-7, 1, 1e-12, marks=pytest.mark.slow),
        (2006.0, 0.5, 58_989, 1e-12),
        (2001.0, 1.0, 23_054, 1e-12),
    ],
)
def test_gaussian_over_a_wide_range(noise, rate, steps, delta):
    check_gaussian_over_a_wide_range(noise, rate, steps, delta)


@pytest.mark.slow
@given(st.floats(1e-3, 1e4), st.floats(1e-7, 1.0), st.integers(1, 10**7), st.floats(1e-12, 0.5))
@settings(max_examples=20, deadline=None)
def test_gaussian_over_a_wide_range_anywhere(noise, rate, steps, delta):
    check_gaussian_over_a_wide_range(noise, rate, steps, delta)


EXTREME = list(
    itertools.product(
        (1e-300, 1e-12, 0.005, 0.01, 0.1, 30.0, 1e9), (1e-300, 1e-17, 1e-15, 1e-9, 1e-3, 1.0), (1e-4, 1.0, 1e4), (1e-12, 1e-5, 0.3)
    )
)


def check_extreme(noise, rate, seen, delta):
    """An error or a bound: not below one step, whose price is exact; huge where a record is seen unhidden more often than delta."""
    steps = max(1, min(round(seen / rate), 10**12)) if rate > 1e-200 else 10**12
    with np.errstate(all="ignore"):
        try:
            value = acc.gaussian_epsilon(noise_multiplier=noise, sample_rate=rate, steps=steps, delta=delta)
        except ArithmeticError:
            return "error"
    assert value >= 0
    if 0.005 <= noise <= 30.0:
        assert value >= one_step(noise, rate, delta) * (1 - 1e-9)
    if noise <= 0.01 and -math.expm1(steps * math.log1p(-rate) if rate < 1 else -math.inf) > 1.5 * delta:
        assert value > 500  # with less noise than that the loss of a step exceeds 5,000 - ln(1/q)
    return "infinite" if math.isinf(value) else "finite"


def test_finding_13():
    """sigma 0.01, T q = 1e-4: version 0.1.0 printed 0.0001 at q = 1e-15 and 1e-17."""
    for rate in (1e-14, 1e-15, 1e-17):
        for noise in (0.005, 0.01):
            assert check_extreme(noise, rate, 1e-4, 1e-5) in ("infinite", "error")


@pytest.mark.parametrize(
    ("noise", "rate", "seen", "delta"),
    [
        pytest.param(*setting, marks=[] if number % 11 == 0 and setting[0] <= 0.01 else pytest.mark.slow)
        for number, setting in enumerate(EXTREME)
    ],
)
def test_extreme_settings(noise, rate, seen, delta):
    check_extreme(noise, rate, seen, delta)


def full_batches(noise, delta):
    """Epsilon of one release to the whole data set."""
    if gaussian_delta(noise, 0.0) <= delta:
        return 0.0
    high = 1 / (2 * noise**2) + 8 / noise  # the loss exceeds it by less than 1e-12
    return optimize.brentq(lambda e: gaussian_delta(noise, e) - delta, 0.0, high)


def one_step(noise, rate, delta):
    """Epsilon of one sampled step with the record, by the identity of sampling: q (D at 1 + (e^epsilon - 1) / q)."""

    def excess(epsilon):  # the difference of two tails that agree in many digits
        with mpmath.workdps(60):
            level = mpmath.log1p(mpmath.expm1(epsilon) / rate)
            upper = mpmath.ncdf(1 / (2 * mpmath.mpf(noise)) - noise * level)
            lower = mpmath.ncdf(-1 / (2 * mpmath.mpf(noise)) - noise * level)
            return float(rate * (upper - mpmath.exp(level) * lower) - delta)

    if excess(0.0) <= 0:
        return 0.0
    high = min(1 / (2 * noise**2) + 8 / noise, 700.0)
    return optimize.brentq(excess, 0.0, high, xtol=1e-20) if excess(high) < 0 else high
