"""The Renyi cross-check: its conversion to epsilon, from a pair of its own and from that of hidden directions."""

import math
import sys

import numpy as np
import pytest
from scipy import optimize

from dpulr import accounting as acc
from dpulr.accounting import renyi
from tests.support.accounting_oracle import gaussian_delta

DELTA = 1e-5


def test_tight_rdp_conversion():
    """min over orders of value + ln(1-1/a) - ln(delta a)/(a-1); never above the classic ln(1/delta)/(a-1)."""
    values = renyi.ORDERS / (2 * 3.0**2)
    classic = float(np.min(values + math.log(1 / DELTA) / (renyi.ORDERS - 1)))
    tight = renyi.to_epsilon(renyi.ORDERS, values, DELTA)
    exact = optimize.brentq(lambda e: gaussian_delta(3.0, e) - DELTA, 0, 50)
    assert exact < tight < classic


def test_renyi_cross_check_of_hidden_directions():
    """Moments of the same finite pair, converted: a few per cent to a fifth above."""
    setting = {"noise_multiplier": 1.0, "dims": [32, 10], "sample_rate": 0.01, "steps": 1000, "delta": DELTA}
    tight = acc.hidden_direction_epsilon(**setting)
    assert tight < acc.hidden_direction_epsilon(**setting, method="rdp") < 1.25 * tight


@pytest.mark.parametrize(("noise", "rate"), [(1.0, 1.0), (2.0, 0.01), (0.7, 0.1)])
def test_moments_of_the_pair_are_those_of_dp_accounting(noise, rate):
    """Two ways that share no code: dp-accounting's series, and moments of our finite pair, up to what it cuts off."""
    release = acc.GaussianRelease(noise)
    theirs, lost = release.renyi(rate)
    ours, cut = renyi.of_pair(release, rate)
    assert lost == 0.0
    assert 0 < cut < 1e-19
    usual = (renyi.ORDERS.round() == renyi.ORDERS) & (renyi.ORDERS >= 2) & (renyi.ORDERS <= 4)
    assert usual.sum() == 3
    assert np.allclose(ours[usual], theirs[usual], rtol=2e-3)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ModuleNotFoundError, match="pip install dp-accounting"):
        acc.gaussian_epsilon(noise_multiplier=2.0, sample_rate=0.01, steps=10, delta=DELTA, method="rdp")
