"""Quick approximations: good where the noise is large; they only start searches."""

import math

import numpy as np
import pytest

from dpulr import accounting as acc
from dpulr.accounting.small_signal import likely_noise, likely_shift, mean_overlap
from tests.support.accounting_oracle import gaussian_delta, panels

DELTA = 1e-5


def test_a_hidden_direction_release_is_worth_its_gaussian():
    release = acc.hidden_direction_release(8.0, [128, 64, 32, 10])
    ours = acc.epsilon([acc.Charge(acc.SampledStep(release, 0.01), 1000)], DELTA)
    rough = acc.gaussian_epsilon(noise_multiplier=release.equivalent_noise(), sample_rate=0.01, steps=1000, delta=DELTA)
    assert ours == pytest.approx(rough, rel=0.01)


def test_dimension_one_and_exact_parts_are_worth_their_noise():
    release = acc.HiddenDirectionRelease((acc.HiddenSite(1, 3.0),), (4.0,))
    assert release.equivalent_noise() == pytest.approx(2.4)


@pytest.mark.parametrize("dim", [2, 3, 10, 128, 10_000])
def test_the_mean_overlap(dim):
    """E|z_1| on the sphere, by quadrature over the angle to the first axis: density proportional to sin^(dim - 2)."""
    angle, weight = panels(np.linspace(0, math.pi, 401), 8)
    density = weight * np.sin(angle) ** (dim - 2)
    assert mean_overlap(dim) == pytest.approx(float(np.dot(density, np.abs(np.cos(angle))) / density.sum()), rel=1e-8)
    assert mean_overlap(1) == pytest.approx(1.0)


@pytest.mark.parametrize("target", [0.1, 1.0, 10.0])
def test_the_likely_shift_has_the_target(target):
    shift = likely_shift(target, DELTA)
    assert gaussian_delta(1 / (shift * 0.998), target) < DELTA < gaussian_delta(1 / (shift * 1.002), target)
    assert likely_noise(target, DELTA, 1.0, 1) > 0
