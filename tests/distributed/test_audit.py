"""The audit of releases that two ranks have made together: not above the claim, and close to it."""

from __future__ import annotations

from typing import Any

import pytest

import dpulr
from dpulr.audit.one_step import one_step
from dpulr.mechanisms.base import FittedMechanism
from tests.support.processes import on_ranks

pytestmark = pytest.mark.slow


def audited(rank: int, mechanism: Any, dim: int, trials: int) -> tuple[float, float, bool]:
    """Both ranks play one game, each with the canaries of its own rows, and both see all that is released."""
    verdict = one_step(mechanism, dim=dim, noise_multiplier=1.0, trials=trials, delta=1e-5, seed=4 + rank)
    return verdict.curve_bound, verdict.claimed_epsilon, verdict.broken


@pytest.mark.parametrize(
    ("mechanism", "dim", "trials"),
    [
        ("gradient", 1, 400_000),
        (dpulr.HiddenDirection(repeats=1, subspace=None), 4, 400_000),
        ("gaussian", 1, 400_000),
    ],
)
def test_two_ranks_keep_the_claim_and_reach_four_fifths_of_it(mechanism: Any, dim: int, trials: int) -> None:
    """Fixed seeds; a true claim would be refuted in one of twenty choices of them at most."""
    found = on_ranks(2, audited, mechanism, dim, trials)
    assert found[0] == found[1]
    measured, claimed, broken = found[0]
    assert not broken
    assert 0.8 * claimed < measured < claimed


def with_too_little_noise(rank: int) -> tuple[float, float, bool]:
    """A planted bug: each of two ranks adds a fourth of the variance."""
    share = FittedMechanism.privatise
    FittedMechanism.privatise = lambda self, total, noise: share(self, total, noise / 2**0.5)  # type: ignore[method-assign]
    return audited(rank, "gradient", 1, 40_000)


def test_half_the_noise_would_be_noticed() -> None:
    assert on_ranks(2, with_too_little_noise)[0][2]
