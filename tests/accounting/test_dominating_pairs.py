"""The machinery: spreading and sampling finite pairs, composing them, against exact sums over small discrete pairs."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpulr.accounting import composition as pld
from dpulr.accounting.dominating_pairs import atoms, gaussian_cells, normal_mass, spread, subsampled

masses = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6)


def pair_of(p, q):
    size = min(len(p), len(q))
    p, q = np.array(p[:size]), np.array(q[:size])
    p, q = p / p.sum(), q / q.sum()
    return atoms(np.log(q / p), p, q)


def divergence(p, q, a):
    return float(np.maximum(q - a * p, 0).sum())


@given(masses, masses, st.floats(0.001, 3.0))
@settings(max_examples=150, deadline=None)
def test_spreading_keeps_masses_and_raises_divergences(p, q, step):
    pair = pair_of(p, q)
    index, p_new, q_new = spread(pair, step)
    assert p_new.sum() == pytest.approx(1, abs=1e-12)
    assert q_new.sum() == pytest.approx(1, abs=1e-12)
    assert np.allclose(q_new, p_new * np.exp(index * step), rtol=1e-9, atol=1e-15)
    for a in (0.2, 0.7, 1.0, 1.5, 4.0):
        assert divergence(p_new, q_new, a) >= divergence(pair.p, pair.q, a) - 1e-12
        assert divergence(q_new, p_new, a) >= divergence(pair.q, pair.p, a) - 1e-12


@given(masses, masses, st.floats(1e-6, 1.0))
@settings(max_examples=100, deadline=None)
def test_sampling_follows_the_identities(p, q, rate):
    pair = pair_of(p, q)
    mixed = subsampled(pair, rate)
    assert np.allclose(mixed.q, (1 - rate) * pair.p + rate * pair.q)
    assert np.allclose(np.exp(mixed.mean), mixed.q / mixed.p)
    for a in (1.0, 1.3, 2.0):
        expected = rate * divergence(pair.p, pair.q, 1 + (a - 1) / rate)
        assert divergence(mixed.p, mixed.q, a) == pytest.approx(expected, abs=1e-12)
        rest = 1 - a * (1 - rate)
        expected = rest * divergence(pair.q, pair.p, a * rate / rest) if rest > 0 else 0.0
        assert divergence(mixed.q, mixed.p, a) == pytest.approx(expected, abs=1e-12)


@given(masses, masses, st.integers(1, 4), masses, masses, st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_composition_bounds_the_exact_product(p1, q1, n1, p2, q2, n2):
    """Two kinds of pairs, up to six factors, all outcomes enumerated."""
    first, second = pair_of(p1, q1), pair_of(p2, q2)
    p, q = np.ones(1), np.ones(1)
    for pair, count in ((first, n1), (second, n2)):
        for _ in range(count):
            p, q = np.outer(p, pair.p).ravel(), np.outer(q, pair.q).ravel()
    both = pld.compose([(first, n1), (second, n2)], 1e-5)
    for epsilon in (0.0, 0.1, 0.5, 1.5):
        a = math.exp(epsilon)
        for curve, exact in ((both.remove, divergence(p, q, a)), (both.add, divergence(q, p, a))):
            assert exact <= curve.delta(epsilon) + 1e-13
            assert curve.delta(epsilon) <= exact + 2e-3
    exact = divergence(p, q, 1.0) / 3
    if exact > 1e-6:
        epsilon = both.remove.epsilon(exact)
        assert divergence(p, q, math.exp(epsilon)) <= exact + 1e-12


@given(st.floats(0.3, 30), st.integers(1, 300), st.floats(1e-4, 1.0), st.floats(1e-8, 1e-2))
@settings(max_examples=30, deadline=None)
def test_epsilon_and_delta_are_inverse(noise, steps, rate, delta):
    both = pld.compose([(subsampled(gaussian_cells(noise), rate), steps)], delta)
    for curve in (both.remove, both.add):
        epsilon = curve.epsilon(delta)
        assert epsilon >= 0
        assert curve.delta(epsilon) <= delta * (1 + 1e-6)
        if epsilon > 0:
            assert curve.delta(epsilon * (1 - 1e-6)) >= delta * (1 - 1e-3)


def test_infinite_losses_are_kept():
    """A pair with disjoint parts: epsilon is infinite below their mass."""
    pair = atoms(np.array([0.0]), np.array([0.9]), np.array([0.9]), q_only=0.1, p_only=0.1)
    both = pld.compose([(pair, 1)], 1e-5)
    assert math.isinf(both.remove.epsilon(0.09))
    assert both.remove.epsilon(0.11) == 0.0
    sampled = subsampled(pair, 0.5)
    assert sampled.q_only == pytest.approx(0.05)
    assert sampled.p.sum() == pytest.approx(1)
    assert sampled.q.sum() + sampled.q_only == pytest.approx(1)


def test_normal_masses_keep_their_relative_precision():
    import mpmath

    edges = np.array([-9.0, -8.9, -0.1, 0.3, 5.0, 5.1, 9.0, 9.2])
    with mpmath.workdps(40):
        exact = [float(mpmath.ncdf(b) - mpmath.ncdf(a)) for a, b in itertools.pairwise(map(mpmath.mpf, edges.tolist()))]
    assert np.allclose(normal_mass(edges), exact, rtol=1e-12, atol=0)


def test_the_error_bound_of_the_transform_holds():
    """Against exact convolution by rational arithmetic of a short pmf."""
    from fractions import Fraction

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
    for real in (np.float64, np.longdouble):
        computed, error, _ = pld._convolve_in(np.dtype(real), [(mass, 1.0, count)], np.arange(33))
        difference = sum(abs(float(e) - c) for e, c in zip(exact, computed[: len(exact)], strict=True))
        assert difference <= error + 64 * 2e-16
        assert error < 1e-11


def test_a_window_too_wide_falls_back_to_a_coarser_grid(monkeypatch):
    cells = subsampled(gaussian_cells(0.4), 1e-3)
    fine = pld.compose([(cells, 1000)], 1e-5).remove.epsilon(1e-5)
    monkeypatch.setattr(pld, "MOST_BINS", 1 << 12)
    monkeypatch.setattr(pld, "FEWEST_BINS", 1 << 10)
    coarse = pld.compose([(cells, 1000)], 1e-5)
    assert len(coarse.remove.loss) <= 1 << 13
    assert fine <= coarse.remove.epsilon(1e-5) < 2 * fine
