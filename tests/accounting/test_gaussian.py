"""The sampled Gaussian mechanism against closed forms, dp-accounting, Opacus and the reference table."""

import math

import pytest
from scipy import optimize

from dpulr import accounting as acc
from tests.support.accounting_oracle import epsilon_of, gaussian_delta, nodes

DELTA = 1e-5


@pytest.mark.parametrize(
    ("noise", "pld", "rdp"),
    [(0.5, 18.59, 21.08), (1, 2.605, 2.875), (2, 0.917, 1.005), (4, 0.404, 0.445), (8, 0.186, 0.207)],
)
def test_reference_table(noise, pld, rdp):
    setting = {"noise_multiplier": noise, "sample_rate": 1 / 120, "steps": 3000, "delta": DELTA}
    assert acc.gaussian_epsilon(**setting) == pytest.approx(pld, rel=0.01)
    ours = acc.gaussian_epsilon(**setting, method="rdp")
    # The table has dp-accounting's default orders; ours are denser, so we may only be lower.
    assert ours <= rdp * 1.002
    assert ours == pytest.approx(rdp, rel=0.01)


@pytest.mark.parametrize(
    ("noise", "steps"),
    [(0.2, 1), (0.5, 1), (4.0, 1), (30.0, 1), (200.0, 1), (0.5, 10), (4.0, 10), (30.0, 10), (30.0, 10_000), (200.0, 10_000)],
)
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
def test_full_batches_have_a_closed_form(noise, steps, delta):
    single = noise / math.sqrt(steps)

    def gap(epsilon):
        return gaussian_delta(single, epsilon) - delta

    exact = optimize.brentq(gap, 0, 1000) if gap(0) > 0 else 0.0
    ours = acc.gaussian_epsilon(noise_multiplier=noise, sample_rate=1.0, steps=steps, delta=delta)
    assert exact <= ours <= exact * 1.003 + 1e-9


@pytest.mark.parametrize(
    ("noise", "rate", "steps"),
    [(0.5, 1e-3, 1000), (0.7, 0.01, 200), (1.0, 1e-5, 10**6), (0.6, 0.2, 50), (5.0, 0.5, 3000), (50.0, 0.1, 10**5)],
)
def test_against_the_contour_integral(noise, rate, steps):
    exact = epsilon_of(*nodes(1, noise), rate, steps, DELTA)
    ours = acc.gaussian_epsilon(noise_multiplier=noise, sample_rate=rate, steps=steps, delta=DELTA)
    assert exact * (1 - 2e-5) <= ours <= exact * 1.005


@pytest.mark.parametrize("noise", [0.6, 1.0, 3.0])
@pytest.mark.parametrize(
    ("rate", "steps"),
    [(1 / 120, 600), pytest.param(0.1, 100, marks=pytest.mark.slow), pytest.param(1e-3, 5000, marks=pytest.mark.slow)],
)
def test_against_dp_accounting(noise, rate, steps):
    """Both are upper bounds. dp-accounting's grid is fixed (here 1e-5 or 1e-4), ours follows the size of the losses."""
    import dp_accounting
    from dp_accounting.pld import privacy_loss_distribution as theirs
    from dp_accounting.rdp import RdpAccountant

    setting = {"noise_multiplier": noise, "sample_rate": rate, "steps": steps, "delta": DELTA}
    ours = acc.gaussian_epsilon(**setting)
    grid = 1e-5 if noise > 2 else 1e-4
    pld = theirs.from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=grid)
    other = pld.self_compose(steps).get_epsilon_for_delta(DELTA)
    assert ours == pytest.approx(other, rel=0.005)
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    renyi = RdpAccountant()
    renyi.compose(event, steps)
    assert ours <= acc.gaussian_epsilon(**setting, method="rdp") <= renyi.get_epsilon(DELTA) * 1.0001


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.0, 1 / 120, 600), (0.7, 0.02, 500), (2.0, 0.1, 1000)])
def test_against_opacus(noise, rate, steps):
    """PRV is a numerical estimate with error 0.01 by default. Opacus's RDP uses the same theory, with coarser orders."""
    from opacus.accountants import PRVAccountant, RDPAccountant

    setting = {"noise_multiplier": noise, "sample_rate": rate, "steps": steps, "delta": DELTA}
    prv, renyi = PRVAccountant(), RDPAccountant()
    for accountant in (prv, renyi):
        accountant.history = [(noise, rate, steps)]
    assert acc.gaussian_epsilon(**setting) == pytest.approx(prv.get_epsilon(DELTA), abs=0.015)
    theirs = renyi.get_epsilon(DELTA)
    assert theirs * 0.97 <= acc.gaussian_epsilon(**setting, method="rdp") <= theirs * 1.001


def test_both_directions_count():
    """At large noise the directions agree; at small noise the record's presence shows more than its absence."""
    step = acc.SampledStep(acc.GaussianRelease(0.6), 0.01)
    from dpulr.accounting.privacy_cost import curves

    both = curves([acc.Charge(step, 500)], DELTA)
    assert both.remove.epsilon(DELTA) > both.add.epsilon(DELTA) > 0
    assert acc.epsilon([acc.Charge(step, 500)], DELTA) == max(both.remove.epsilon(DELTA), both.add.epsilon(DELTA))


@pytest.mark.parametrize(("noise", "rate", "steps", "expected"), [(1.0, 1.0, 1, 4.38), (0.5, 1 / 300, 7500, 12.27)])
def test_reference_values_of_uncredited_noise(noise, rate, steps, expected):
    ours = acc.gaussian_epsilon(noise_multiplier=noise, sample_rate=rate, steps=steps, delta=DELTA)
    assert ours == pytest.approx(expected, rel=0.01)
