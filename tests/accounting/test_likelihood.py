"""Likelihood ratios in closed form, against brute-force averages over the sphere and against the oracle."""

import numpy as np
import pytest
from scipy import special, stats

from dpulr import accounting as acc
from dpulr.accounting.likelihood import gaussian_log_ratio, hidden_log_ratio, hidden_log_ratio_exact
from tests.support.accounting_oracle import log_ratio


def test_two_normals():
    x = np.linspace(-3, 4, 15)
    assert gaussian_log_ratio(x, 1.7) == pytest.approx(stats.norm.logpdf(x, 1, 1.7) - stats.norm.logpdf(x, 0, 1.7))


@pytest.mark.parametrize(("dim", "noise"), [(2, 0.7), (5, 1.0), (60, 0.5)])
def test_an_average_over_the_half_sphere(dim, noise):
    """200,000 directions; the error of the logarithm is some 1e-3."""
    rng = np.random.default_rng(3)
    y = rng.standard_normal((200_000, dim))
    y /= np.linalg.norm(y, axis=1, keepdims=True)
    y[:, 0] = np.abs(y[:, 0])
    for along, across in ((0.3, 0.5), (-0.5, 1.0), (1.2, 2.0)):
        direct = special.logsumexp((y[:, 0] * along + y[:, 1] * across - 0.5) / noise**2) - np.log(len(y))
        assert hidden_log_ratio_exact(np.array(along), np.array(across), dim, noise) == pytest.approx(direct, abs=0.02)


@pytest.mark.parametrize(("dim", "noise"), [(3, 0.5), (10, 1.0), (128, 1.0)])
def test_the_table_is_the_oracle(dim, noise):
    w = np.linspace(-2 * noise, 1 + 2 * noise, 9)
    s = noise * np.sqrt(dim - 1) * np.linspace(0.9, 1.2, 7)
    exact = log_ratio(dim, noise, w, s)
    assert hidden_log_ratio_exact(w[:, None], s[None, :], dim, noise) == pytest.approx(exact, abs=1e-4)
    table = hidden_log_ratio(np.repeat(w, len(s)), np.tile(s, len(w)), dim, noise).reshape(exact.shape)
    assert table == pytest.approx(exact, abs=5e-3)


def test_releases_know_their_ratio():
    w, s = np.array([0.2, 0.9]), np.array([3.0, 3.5])
    assert acc.GaussianRelease(2.0).log_ratio(w, s) == pytest.approx(gaussian_log_ratio(w, 2.0))
    assert acc.hidden_direction_release(2.0, [10]).log_ratio(w, s) == pytest.approx(hidden_log_ratio(w, s, 10, 2.0))
    assert acc.hidden_direction_release(2.0, [1]).log_ratio(w, s) == pytest.approx(gaussian_log_ratio(w, 2.0))
    assert acc.hidden_direction_release(2.0, [10], repeats=2).log_ratio(w, s) is None
    assert acc.hidden_direction_release(2.0, [10, 4]).log_ratio(w, s) is None
    assert acc.hidden_direction_release(2.0, [10], gaussian_weights=[1.0]).log_ratio(w, s) is None
