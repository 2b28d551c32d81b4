"""Whole training runs: one with many canaries, many with one."""

from __future__ import annotations

import numpy as np
import pytest

import dpulr
from dpulr.accounting import GaussianRelease, SampledStep
from dpulr.audit.claims import Claim
from dpulr.audit.whole_run import judge_run
from reproduction import planted_bugs as broken


def test_one_run_with_many_canaries() -> None:
    """One step without sampling, where guesses can tell most; a thousandth of the claim's mass of delta."""
    verdict = dpulr.audit.one_run(
        "gaussian", dim=1, sample_rate=1.0, steps=1, noise_multiplier=1.0, canaries=50_000, delta=1e-8, seed=3
    )
    assert not verdict.broken
    assert 1.5 < verdict.lower_bound < verdict.claimed_epsilon
    assert verdict.game == "one run"


@pytest.mark.parametrize(("mechanism", "canary"), [("hidden-direction", "crafted"), ("gaussian", "mislabelled")])
def test_one_run_holds(mechanism: str, canary: str) -> None:
    verdict = dpulr.audit.one_run(mechanism, canary, noise_multiplier=0.5, canaries=500, steps=10, seed=1)
    assert not verdict.broken


def test_one_run_without_clipping_is_caught() -> None:
    verdict = dpulr.audit.one_run(broken.Unclipped(), dim=1, noise_multiplier=2.0, sample_rate=1.0, steps=2, canaries=500, seed=1)
    assert verdict.broken
    assert verdict.lower_bound > verdict.claimed_epsilon


def test_guessing_at_random_proves_nothing() -> None:
    """At confidence 0.95, 60 times: a bound above 0 in at most 5 % on average. False alarm 1e-3."""
    claim = Claim(SampledStep(GaussianRelease(1.0), 1.0))
    proved = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        verdict = judge_run(
            {"chance": rng.standard_normal(1_000)},
            rng.random(1_000) < 0.5,
            claim,
            mechanism="gaussian",
            canary="none",
            delta=1e-6,
            confidence=0.95,
        )
        proved += verdict.lower_bound > 0
    assert proved <= 9


@pytest.mark.slow
def test_many_runs() -> None:
    verdict = dpulr.audit.many_runs("gaussian", runs=300, noise_multiplier=1.0, sample_rate=1.0, steps=3, seed=1)
    assert not verdict.broken
    assert verdict.game == "many runs"
    assert 0 < verdict.measured < verdict.claimed_epsilon


def test_refused() -> None:
    with pytest.raises(ValueError, match="a whole run takes"):
        dpulr.audit.one_run(canary="large")
    with pytest.raises(ValueError, match="steps is 0"):
        dpulr.audit.many_runs(steps=0)
    with pytest.raises(ValueError, match="102,000 digits are needed"):
        dpulr.audit.one_run(canary="mislabelled", canaries=100_000)
