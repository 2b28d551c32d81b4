"""Calibration returns a noise that was priced and does not overshoot, close to the smallest such noise."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpulr import accounting as acc
from dpulr.accounting import calibration
from dpulr.errors import BudgetError, InvalidArgument


def check_gaussian_noise_never_overshoots(target, rate, steps, delta):
    noise = acc.calibrate(target_epsilon=target, delta=delta, sample_rate=rate, steps=steps)
    setting = {"sample_rate": rate, "steps": steps, "delta": delta}
    assert acc.gaussian_epsilon(noise_multiplier=noise, **setting) <= target
    if noise > 0.0011:
        assert acc.gaussian_epsilon(noise_multiplier=noise * 0.999, **setting) > target


@pytest.mark.parametrize(
    ("target", "rate", "steps", "delta"), [(0.1, 0.02, 4000, 1e-7), (1.0, 1 / 120, 600, 1e-5), (30.0, 1.0, 10, 1e-4)]
)
def test_gaussian_noise_never_overshoots(target, rate, steps, delta):
    check_gaussian_noise_never_overshoots(target, rate, steps, delta)


@pytest.mark.slow
@given(st.floats(0.01, 50), st.floats(1e-4, 1.0), st.integers(1, 5000), st.floats(1e-8, 1e-3))
@settings(max_examples=8, deadline=None)
def test_gaussian_noise_never_overshoots_anywhere(target, rate, steps, delta):
    check_gaussian_noise_never_overshoots(target, rate, steps, delta)


def check_hidden_direction_noise_never_overshoots(target, dims, repeats, exact_part):
    setting = {
        "dims": dims,
        "repeats": repeats,
        "gaussian_weights": [0.5] if exact_part else [],
        "sample_rate": 0.01,
        "steps": 500,
        "delta": 1e-5,
    }
    noise = acc.calibrate(target_epsilon=target, mechanism="hidden-direction", **setting)
    assert acc.hidden_direction_epsilon(noise_multiplier=noise, **setting) <= target
    assert acc.hidden_direction_epsilon(noise_multiplier=noise * 0.999, **setting) > target


@pytest.mark.parametrize(("target", "dims", "repeats", "exact_part"), [(0.5, [3, 2], 2, True), (8.0, [10], 1, False)])
def test_hidden_direction_noise_never_overshoots(target, dims, repeats, exact_part):
    check_hidden_direction_noise_never_overshoots(target, dims, repeats, exact_part)


@pytest.mark.slow
@given(st.floats(0.05, 20), st.sampled_from([[10], [128, 10], [3, 2]]), st.integers(1, 3), st.booleans())
@settings(max_examples=4, deadline=None)
def test_hidden_direction_noise_never_overshoots_anywhere(target, dims, repeats, exact_part):
    check_hidden_direction_noise_never_overshoots(target, dims, repeats, exact_part)


def test_the_generic_form_and_rejection():
    setting = {"target_epsilon": 1.0, "delta": 1e-5, "sample_rate": 1 / 120, "steps": 3000}
    plain = acc.calibrate_release(acc.GaussianRelease, **setting)
    assert plain == acc.calibrate(**setting)
    dearer = acc.calibrate_release(acc.GaussianRelease, **setting, rejection_threshold=390, min_dataset_size=59_999)
    assert dearer >= plain
    by_rdp = acc.calibrate(**setting, method="rdp")
    assert by_rdp > plain


def check_the_largest_number_of_steps(noise, rate, target):
    step = acc.SampledStep(acc.GaussianRelease(noise), rate)
    most = acc.max_steps(step, target_epsilon=target, delta=1e-5)
    if most:
        assert acc.epsilon([acc.Charge(step, most)], 1e-5) <= target
    assert acc.epsilon([acc.Charge(step, most + 1)], 1e-5) > target


@pytest.mark.parametrize(("noise", "rate", "target"), [(0.7, 0.01, 3.0), (3.0, 0.2, 0.5)])
def test_the_largest_number_of_steps(noise, rate, target):
    check_the_largest_number_of_steps(noise, rate, target)


@pytest.mark.slow
@given(st.floats(0.5, 5), st.floats(1e-3, 0.5), st.floats(0.1, 10))
@settings(max_examples=8, deadline=None)
def test_the_largest_number_of_steps_anywhere(noise, rate, target):
    check_the_largest_number_of_steps(noise, rate, target)


def test_steps_on_top_of_what_is_spent():
    step = acc.SampledStep(acc.GaussianRelease(1.0), 0.01)
    other = acc.Charge(acc.SampledStep(acc.GaussianRelease(2.0), 0.01), 500)
    alone = acc.max_steps(step, target_epsilon=2.0, delta=1e-5)
    after = acc.max_steps(step, target_epsilon=2.0, delta=1e-5, already=[other])
    assert 0 < after < alone
    assert acc.epsilon([other, acc.Charge(step, after)], 1e-5) <= 2.0
    assert acc.max_steps(step, target_epsilon=2.0, delta=1e-5, already=[acc.Charge(step, alone)]) == 0
    assert acc.max_steps(step, target_epsilon=2.0, delta=1e-5, already=[acc.Charge(acc.Unaccounted("x"), 1)]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_epsilon": 0.0}, "target_epsilon"),
        ({"target_epsilon": math.nan}, "target_epsilon"),
        ({"steps": 0}, "steps"),
        ({"steps": 2.5}, "steps"),
        ({"delta": 0.0}, "delta"),
        ({"sample_rate": 0.0}, "sample_rate"),
        ({"mechanism": "paper"}, "mechanism is 'paper'"),
        ({"mechanism": "hidden-direction"}, "dims is empty"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(InvalidArgument, match=message):
        acc.calibrate(**{"target_epsilon": 1.0, "delta": 1e-5, "sample_rate": 0.01, "steps": 100, **change})


def test_a_search_prices_few_noises(monkeypatch):
    """A price of many layers takes a second: Gaussian searches need at most six, those of hidden directions at most ten."""
    priced = []

    def counting(charges, delta, method="pld"):
        priced.append(charges)
        return acc.epsilon(charges, delta, method)

    monkeypatch.setattr(calibration, "epsilon", counting)
    for target in (0.1, 8.0):
        for mechanism, layers, most in (("gaussian", {}, 6), ("hidden-direction", {"dims": [10]}, 10)):
            priced.clear()
            calibration.calibrate(target_epsilon=target, delta=1e-5, sample_rate=1 / 120, steps=600, mechanism=mechanism, **layers)
            assert len(priced) <= most


def test_what_no_noise_can_reach(monkeypatch):
    hopeless = {"sample_rate": 1 / 120, "steps": 3000, "rejection_threshold": 500, "min_dataset_size": 59_999}
    with pytest.raises(BudgetError, match="No noise reaches the target: rejection alone"):
        acc.calibrate(target_epsilon=1.0, delta=1e-5, **hopeless)
    with pytest.raises(BudgetError, match="No noise reaches the target epsilon"):
        calibration._smallest(lambda noise: 2.0, 1.0, 1.0)
    monkeypatch.setattr(calibration, "MOST_STEPS", 1000)
    with pytest.raises(BudgetError, match="steps fit: the target does not limit this step"):
        acc.max_steps(acc.SampledStep(acc.GaussianRelease(1e3), 1e-3), target_epsilon=5.0, delta=1e-5)
