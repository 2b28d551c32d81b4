"""Composition of finite pairs, against exact sums and rational arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpulr.accounting import composition
from dpulr.accounting.dominating_pairs import Cells, atoms, subsampled
from dpulr.accounting.gaussian import gaussian_cells
from tests.accounting.finite_pairs import divergence, finite_pair, masses


@given(masses, masses, st.integers(1, 4), masses, masses, st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_composition_bounds_the_exact_product(p1, q1, n1, p2, q2, n2):
    """Two kinds of pairs, up to six factors, all outcomes enumerated."""
    first, second = finite_pair(p1, q1), finite_pair(p2, q2)
    p, q = np.ones(1), np.ones(1)
    for pair, count in ((first, n1), (second, n2)):
        for _ in range(count):
            p, q = np.outer(p, pair.p).ravel(), np.outer(q, pair.q).ravel()
    both = composition.compose([(first, n1), (second, n2)], 1e-5)
    for epsilon in (0.0, 0.1, 0.5, 1.5):
        a = math.exp(epsilon)
        for curve, exact in ((both.remove, divergence(p, q, a)), (both.add, divergence(q, p, a))):
            assert exact <= curve.delta(epsilon) + 1e-13
            assert curve.delta(epsilon) <= exact + 2e-3
    exact = divergence(p, q, 1.0) / 3
    if exact > 1e-6:
        epsilon = both.remove.epsilon(exact)
        assert divergence(p, q, math.exp(epsilon)) <= exact + 1e-12


def check_epsilon_and_delta_are_inverse(noise, steps, rate, delta):
    both = composition.compose([(subsampled(gaussian_cells(noise), rate), steps)], delta)
    for curve in (both.remove, both.add):
        epsilon = curve.epsilon(delta)
        assert epsilon >= 0
        assert curve.delta(epsilon) <= delta * (1 + 1e-6)
        if epsilon > 0:
            assert curve.delta(epsilon * (1 - 1e-6)) >= delta * (1 - 1e-3)


@pytest.mark.parametrize(("noise", "steps", "rate", "delta"), [(0.4, 10, 0.01, 1e-5), (2.0, 300, 0.1, 1e-8), (25.0, 50, 1.0, 1e-3)])
def test_epsilon_and_delta_are_inverse(noise, steps, rate, delta):
    check_epsilon_and_delta_are_inverse(noise, steps, rate, delta)


@pytest.mark.slow
@given(st.floats(0.3, 30), st.integers(1, 300), st.floats(1e-4, 1.0), st.floats(1e-8, 1e-2))
@settings(max_examples=30, deadline=None)
def test_epsilon_and_delta_are_inverse_anywhere(noise, steps, rate, delta):
    check_epsilon_and_delta_are_inverse(noise, steps, rate, delta)


def test_infinite_losses_are_kept():
    """A pair with disjoint parts: epsilon is infinite below their mass."""
    pair = atoms(np.array([0.0]), np.array([0.9]), np.array([0.9]), q_only=0.1, p_only=0.1)
    both = composition.compose([(pair, 1)], 1e-5)
    assert math.isinf(both.remove.epsilon(0.09))
    assert both.remove.epsilon(0.11) == 0.0
    sampled = subsampled(pair, 0.5)
    assert sampled.q_only == pytest.approx(0.05)
    assert sampled.p.sum() == pytest.approx(1)
    assert sampled.q.sum() + sampled.q_only == pytest.approx(1)


def test_the_error_bound_of_the_transform_holds():
    """Against exact convolution by rational arithmetic of a short pmf."""
    mass = np.zeros(64)
    mass[:3] = [0.25, 0.5, 0.25]
    count = 20
    exact = [Fraction(1)]
    for _ in range(count):
        longer = [Fraction(0)] * (len(exact) + 2)
        for i, value in enumerate(exact):
            for j, weight in enumerate((Fraction(1, 4), Fraction(1, 2), Fraction(1, 4))):
                longer[i + j] += value * weight
        exact = longer
    part = composition._Part(np.arange(64), mass, 1.0, count)
    for real in (np.float64, np.longdouble):
        computed, error, _ = composition._convolve_in(np.dtype(real), [part], 64, np.arange(33))
        difference = sum(abs(float(e) - c) for e, c in zip(exact, computed[: len(exact)], strict=True))
        assert difference <= error + 64 * 2e-16
        assert error < 1e-11


def test_a_window_too_wide_falls_back_to_a_coarser_grid(monkeypatch):
    cells = subsampled(gaussian_cells(0.4), 1e-3)
    fine = composition.compose([(cells, 1000)], 1e-5).remove.epsilon(1e-5)
    monkeypatch.setattr(composition, "MOST_BINS", 1 << 12)
    monkeypatch.setattr(composition, "FEWEST_BINS", 1 << 10)
    coarse = composition.compose([(cells, 1000)], 1e-5)
    assert len(coarse.remove.loss) <= 1 << 13
    assert fine <= coarse.remove.epsilon(1e-5) < 2 * fine


@pytest.mark.parametrize("damaged", [{"p": math.nan}, {"q": math.nan}, {"q": math.inf}, {"q_only": math.nan}, {"mean": math.nan}])
def test_what_is_not_finite_is_an_error(damaged):
    """A comparison with NaN is false: it must not pass for a small epsilon."""
    values = {"low": -0.2, "high": 0.3, "mean": 0.1, "p": 1.0, "q": 1.0} | damaged
    cells = Cells(**{name: value if name == "q_only" else np.array([0.0, value]) for name, value in values.items()})
    with pytest.raises(ArithmeticError, match="not finite"):
        composition.compose([(cells, 3)], 1e-5)


def test_a_curve_does_not_answer_with_what_is_not_finite():
    for curve in (
        composition.Curve(np.array([0.0, 1.0]), np.array([0.5, math.nan]), 0.0),
        composition.Curve(np.array([0.0, 1.0]), np.array([0.5, 0.5]), math.nan),
    ):
        with pytest.raises(ArithmeticError, match="not finite"):
            curve.delta(0.1)
        with pytest.raises(ArithmeticError, match="not finite"):
            curve.epsilon(0.1)
