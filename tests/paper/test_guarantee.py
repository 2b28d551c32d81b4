"""What is said about the privacy of the `paper` mechanism: never an epsilon, at best a nominal one."""

from __future__ import annotations

from typing import Any

import pytest

import dpulr
from dpulr import accounting
from dpulr.accounting import PrivacySpent
from dpulr.errors import BudgetError, InvalidArgument
from dpulr.paper.nominal import nominal_of
from tests.support.algorithm_1 import data, engine_for
from tests.support.core import Kept, normed_mlp, train


def ran(**settings: Any) -> tuple[dpulr.PrivacyEngine, PrivacySpent]:
    """Five steps at a rate of 0.1 on 200 records, with secret randomness."""
    options = {"batch_size": 20, "steps": 5, "noise_multiplier": 4.0, "insecure_noise_seed": None} | settings
    private = engine_for(normed_mlp().double(), data(200), dpulr.Paper(remedy="extra-noise"), **options)
    train(private)
    return private, private.privacy_spent()


@pytest.mark.parametrize("threshold", [1, 12, 20])
def test_where_the_theorem_applies_epsilon_is_nominal(threshold: int) -> None:
    """sigma0 at least 4, 1 <= N_B <= qN, q at most 1/5, Poisson batches: the formula has a value, which is no guarantee."""
    private, spent = ran(rejection_threshold=threshold)
    assert (spent.epsilon, spent.guarantee, private.guarantee) == (None, "nominal", "nominal")
    assert spent.reasons == ()
    smaller = {"rejection_threshold": threshold, "dataset_size": 199}  # rejection costs most on the smaller of two neighbours
    formula = accounting.paper_nominal(target_std=4.0, sample_rate=0.1, steps=5, delta=1e-5, enforce_alpha=True, **smaller)
    assert spent.nominal_epsilon == pytest.approx(formula.epsilon, rel=1e-9)
    assert str(spent).startswith("Nominal epsilon")
    assert "5 steps of the paper mechanism (no guarantee)" in str(spent)
    assert "Do not report it as a privacy guarantee" in str(spent)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rejection_threshold": 12, "noise_multiplier": 1.0}, "sigma0 is 1, but must be at least 4"),
        ({"rejection_threshold": 21}, "N_B is 21, but must lie between 1 and qN = 20"),
        ({"rejection_threshold": 12, "batch_size": 50}, "q is 0.25, but must be at most 1/5"),
        ({}, "no batch is redrawn, but N_B must be at least 1"),
        ({"sampling": "shuffle"}, "batches were shuffled, not sampled"),
        ({"rejection_threshold": 12, "insecure_noise_seed": 1}, "the noise comes from a seed"),
        ({"rejection_threshold": 12, "randomness": Kept()}, "a source of one's own"),
    ],
)
def test_where_it_does_not_there_is_nothing_but_reasons(settings: dict[str, Any], reason: str) -> None:
    private, spent = ran(**settings)
    assert (spent.epsilon, spent.guarantee, private.guarantee) == (None, "none", "none")
    assert any(reason in said for said in spent.reasons)
    assert reason in str(spent)
    assert str(spent).startswith("No privacy guarantee for 5 steps of the paper mechanism")
    assert "layers are clipped one by one" in str(spent)
    assert spent.nominal_epsilon is not None
    assert "nominal, no guarantee" in str(spent)


def test_no_epsilon_can_be_targeted() -> None:
    def refused(kind: type[Exception], message: str, settings: dpulr.Paper, **options: Any) -> None:
        with pytest.raises(kind, match=message):
            engine_for(normed_mlp().double(), data(), settings, **options)

    refused(BudgetError, "paper has no certified epsilon: no target_epsilon can be met", dpulr.Paper(), target_epsilon=1.0)
    refused(InvalidArgument, "paper needs noise_multiplier", dpulr.Paper())
    refused(InvalidArgument, "give one of the two", dpulr.Paper(target_std=2.0), noise_multiplier=1.0)
    refused(InvalidArgument, "give a number", dpulr.Paper(target_std=2.0), rejection_threshold="auto")


@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_layers_without_noise_are_named() -> None:
    private = engine_for(normed_mlp().double(), data(), dpulr.Paper(target_std=(0.0, 4.0, 4.0)), insecure_noise_seed=None)
    train(private)
    assert "for 1 step: no noise was added to some layers" in str(private.privacy_spent())


# --- the formula over several steps ---------------------------------------------------------------------------------------
def test_nominal_values_of_different_steps_add_up_before_alpha_is_chosen() -> None:
    step = accounting.SampledStep(accounting.PaperRelease(4.0), 0.01, 60, 10_000)
    one = accounting.paper_nominal_epsilon(
        target_std=4.0, sample_rate=0.01, steps=100, delta=1e-5, rejection_threshold=60, dataset_size=10_000
    )
    assert nominal_of([accounting.Charge(step, 100)], 1e-5) == pytest.approx(one, rel=1e-9)
    assert nominal_of([accounting.Charge(step, 40), accounting.Charge(step, 60)], 1e-5) == pytest.approx(one, rel=1e-9)
    louder = accounting.SampledStep(accounting.PaperRelease(8.0), 0.01, 60, 10_000)
    mixed = nominal_of([accounting.Charge(step, 40), accounting.Charge(louder, 60)], 1e-5)
    assert mixed is not None
    assert mixed < one
    assert nominal_of([accounting.Charge(accounting.Unaccounted("x"), 1)], 1e-5) is None


@pytest.mark.parametrize(("sigma0", "inverse"), [(4.0, 120), (8.0, 120), (4.0, 300), (8.0, 938)])
def test_the_nominal_value_at_algorithm_1s_own_threshold_meets_the_theorems_conditions(sigma0: float, inverse: int) -> None:
    rate, threshold = 1 / inverse, 60_000 // inverse
    step = accounting.SampledStep(accounting.PaperRelease(sigma0), rate, threshold, 59_999)
    one = accounting.paper_nominal_epsilon(
        target_std=sigma0, sample_rate=rate, steps=25 * inverse, delta=1e-5, rejection_threshold=threshold, dataset_size=60_000
    )
    assert nominal_of([accounting.Charge(step, 25 * inverse)], 1e-5) == pytest.approx(one, rel=2e-3)  # one record less
