"""Claims as curves, and the likelihood ratio of hidden directions, against closed forms and direct sums."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from dpulr.accounting import GaussianRelease, HiddenDirectionRelease, HiddenSite, SampledStep
from dpulr.accounting.likelihood import hidden_log_ratio, hidden_log_ratio_exact
from dpulr.audit.claims import Claim, largest_refuted, refuted

RATES = np.array([1e-5, 1e-3, 0.02, 0.3, 0.9])


def gaussian(noise: float, rate: float = 1.0, steps: int = 1) -> Claim:
    return Claim(SampledStep(GaussianRelease(noise), rate), steps)


@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0])
def test_power_of_a_gaussian_claim(noise: float) -> None:
    """At rate 1 the trade-off is that of two normals."""
    exact = stats.norm.sf(stats.norm.isf(RATES) - 1 / noise)
    power = gaussian(noise).power(RATES)
    assert (power >= exact * (1 - 1e-9)).all()
    assert power == pytest.approx(exact, rel=5e-3)


def test_power_of_two_steps_and_of_a_sample() -> None:
    exact = stats.norm.sf(stats.norm.isf(RATES) - np.sqrt(2))
    assert gaussian(1.0, steps=2).power(RATES) == pytest.approx(exact, rel=5e-3)
    threshold = stats.norm.isf(RATES)  # the best test of a mixture is a threshold, too
    mixed = 0.9 * RATES + 0.1 * stats.norm.sf(threshold - 1)
    assert gaussian(1.0, 0.1).power(RATES) == pytest.approx(mixed, rel=5e-3)


def test_what_is_true_is_not_refuted_and_what_is_false_is() -> None:
    claim = gaussian(1.0)
    exact = stats.norm.sf(stats.norm.isf(RATES) - 1)
    assert (refuted(claim, RATES, exact) <= 0).all()
    assert (refuted(claim, RATES, exact * 1.02)[:4] > 0).all()


def test_the_noise_that_explains_a_measurement() -> None:
    """Rates of noise 0.5 refute every claim of more noise, and none of less."""
    exact = stats.norm.sf(stats.norm.isf(RATES) - 2)
    found = largest_refuted(gaussian(1.0), RATES, exact)
    assert found is not None
    assert 2.0 ** (found[0] / 64) == pytest.approx(0.5, rel=0.03)
    assert 2.0 ** (found[0] / 64) >= 0.5
    assert largest_refuted(gaussian(1.0), RATES, RATES * 0.5) is None


def test_infinitely_many_shapes_are_no_claim() -> None:
    from dpulr.accounting import PaperRelease

    with pytest.raises(ValueError, match="no privacy curve"):
        Claim(SampledStep(PaperRelease(4.0), 1.0)).scaled(1)


@pytest.mark.parametrize(("dim", "noise"), [(2, 0.5), (10, 1.0), (128, 1.0)])
def test_the_likelihood_ratio_by_direct_sums(dim: int, noise: float) -> None:
    """The mean of exp((w.y - 1/2)/t^2) over random points y of the half sphere; 200,000 of them give 0.5 %."""
    rng = np.random.default_rng(5)
    y = rng.standard_normal((200_000, dim))
    y /= np.linalg.norm(y, axis=1, keepdims=True)
    y[:, 0] = np.abs(y[:, 0])
    for along, across in ((0.3 * noise, noise * np.sqrt(dim)), (1.5 * noise, 0.8 * noise * np.sqrt(dim))):
        w = np.zeros(dim)
        w[0], w[1] = along, across
        direct = special.logsumexp((y @ w - 0.5) / noise**2) - np.log(len(y))
        assert hidden_log_ratio_exact(np.array(along), np.array(across), dim, noise) == pytest.approx(direct, abs=0.02)
        assert hidden_log_ratio(np.array(along), np.array(across), dim, noise) == pytest.approx(direct, abs=0.02)


@pytest.mark.parametrize(("dim", "noise"), [(10, 1.0), (128, 1.0)])
def test_the_claimed_power_of_hidden_directions_is_that_of_the_ratio(dim: int, noise: float) -> None:
    """400,000 draws of each law: rates at the median within 5 standard errors of the claim (false alarm below 1e-6)."""
    rng = np.random.default_rng(7)
    count = 400_000
    heights = np.abs(rng.standard_normal(count)) / np.sqrt(rng.chisquare(dim - 1, count) + 1e-300)
    heights = heights / np.sqrt(1 + heights**2)
    out = hidden_log_ratio(noise * rng.standard_normal(count), noise * np.sqrt(rng.chisquare(dim - 1, count)), dim, noise)
    across = noise * np.sqrt(rng.noncentral_chisquare(dim - 1, (1 - heights**2) / noise**2, count))
    inside = hidden_log_ratio(heights + noise * rng.standard_normal(count), across, dim, noise)
    claim = Claim(SampledStep(HiddenDirectionRelease((HiddenSite(dim, noise),)), 1.0))
    for rate in (0.5, 0.05):
        power = (inside > np.quantile(out, 1 - rate)).mean()
        assert power == pytest.approx(float(claim.power(np.array([rate]))[0]), abs=5 * np.sqrt(2 * rate / count) * 1.5)
