"""Spreading and sampling finite pairs, against exact sums over small discrete ones."""

import itertools

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpulr.accounting.dominating_pairs import normal_mass, spread, subsampled
from tests.accounting.finite_pairs import divergence, finite_pair, masses


@given(masses, masses, st.floats(0.001, 3.0))
@settings(max_examples=150, deadline=None)
def test_spreading_keeps_masses_and_raises_divergences(p, q, step):
    pair = finite_pair(p, q)
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
    pair = finite_pair(p, q)
    mixed = subsampled(pair, rate)
    assert np.allclose(mixed.q, (1 - rate) * pair.p + rate * pair.q)
    assert np.allclose(np.exp(mixed.mean), mixed.q / mixed.p)
    for a in (1.0, 1.3, 2.0):
        expected = rate * divergence(pair.p, pair.q, 1 + (a - 1) / rate)
        assert divergence(mixed.p, mixed.q, a) == pytest.approx(expected, abs=1e-12)
        rest = 1 - a * (1 - rate)
        expected = rest * divergence(pair.q, pair.p, a * rate / rest) if rest > 0 else 0.0
        assert divergence(mixed.q, mixed.p, a) == pytest.approx(expected, abs=1e-12)


def test_normal_masses_keep_their_relative_precision():
    edges = np.array([-9.0, -8.9, -0.1, 0.3, 5.0, 5.1, 9.0, 9.2])
    with mpmath.workdps(40):
        exact = [float(mpmath.ncdf(b) - mpmath.ncdf(a)) for a, b in itertools.pairwise(map(mpmath.mpf, edges.tolist()))]
    assert np.allclose(normal_mass(edges), exact, rtol=1e-12, atol=0)
