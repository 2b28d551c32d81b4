"""The plan: from what was asked for to what every step does, is charged and may cost."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest

import dpulr
from dpulr import accounting
from dpulr.errors import BudgetError, InvalidArgument
from dpulr.plan import Request
from dpulr.sampling import PoissonSampling, ShuffledSampling
from tests.support.core import blobs, engine, train


def asked(**changes: Any) -> Request:
    return Request(**{"records": 200, "batch_size": 20, "steps": 4, "noise_multiplier": 1.0, **changes})


# --- rate and steps -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [100, 200])
def test_rate_steps_and_denominator_come_from_the_arguments(size: int) -> None:
    private = engine(data=blobs(size), sample_rate=0.1, expected_batch_size=30.0, steps=None, epochs=2)
    assert (private.sample_rate, private.expected_batch_size, private.planned_steps) == (0.1, 30.0, 20)
    short = engine(data=blobs(size), batch_size=20, steps=None, epochs=1)
    assert (short.sample_rate, short.expected_batch_size, short.planned_steps) == (20 / size, 20.0, size // 20)


@pytest.mark.parametrize(
    ("records", "batch_size", "epochs", "steps"), [(1_000, 300, 1, 4), (60_000, 500, 25, 3_000), (7, 7, 0.1, 1)]
)
def test_epochs_become_steps_in_one_way(records: int, batch_size: int, epochs: float, steps: int) -> None:
    """1,000 records in batches of 300: four steps, or a record would be seen less than once. Plan, solver and engine agree."""
    request = Request(records=records, batch_size=batch_size, epochs=epochs, noise_multiplier=1.0)
    assert request.planned_steps == steps
    assert accounting.steps_of(epochs, batch_size / records) == steps
    solved = accounting.plan(noise_multiplier=1.0, batch_size=batch_size, epochs=epochs, dataset_size=records)
    assert solved.steps == steps


def test_the_engine_takes_the_steps_of_its_epochs() -> None:
    private = engine(data=blobs(1_000), batch_size=300, steps=None, epochs=1)
    assert private.planned_steps == train(private) == 4


def test_the_noise_that_the_solver_prints_is_the_engine_s() -> None:
    """And so it meets the target in the steps that the engine takes."""
    asked = {"batch_size": 300, "epochs": 1}
    private = engine(data=blobs(1_000), steps=None, noise_multiplier=None, target_epsilon=2.0, **asked)
    release = partial(private.mechanism.release, private.forward.sites)
    solved = accounting.plan(epsilon=2.0, dataset_size=1_000, mechanism=release, **asked)
    assert private.noise_multiplier == solved.noise_multiplier
    train(private)
    assert private.privacy_spent().epsilon <= 2.0


# --- one value for all ----------------------------------------------------------------------------------------------------
def test_a_plan_and_what_was_asked_for_are_frozen() -> None:
    private = engine()
    for name in ("steps", "noise_multiplier", "sample_rate", "rejection_threshold", "step", "void"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(private.plan, name, 1)
    before = private.plan
    train(private)
    assert private.plan is before  # no step changes it
    with pytest.raises(dataclasses.FrozenInstanceError):
        asked().steps = 2  # type: ignore[misc]


def test_noise_sampling_and_charge_come_from_the_same_plan() -> None:
    private = engine(noise_multiplier=1.7, batch_size=20, rejection_threshold=5, steps=3)
    plan = private.plan
    assert plan.event == accounting.SampledStep(accounting.GaussianRelease(1.7, numbers=58), 0.1, 5, 199)
    assert plan.sampler() == PoissonSampling(0.1, 5)
    assert private.fitted.noise_std == plan.noise_multiplier == private.noise_multiplier == 1.7
    assert plan.at(2) is plan
    train(private)
    assert private.ledger.charges == [accounting.Charge(plan.event, 3)]


def test_shuffled_batches_have_a_sampler_of_their_own() -> None:
    plan = dpulr.Gaussian().plan(asked(sampling="shuffle"), ())
    assert isinstance(plan.sampler(), ShuffledSampling)
    assert plan.event == accounting.Unaccounted("batches were shuffled, not sampled")


# --- what it costs --------------------------------------------------------------------------------------------------------
def test_the_target_is_never_exceeded() -> None:
    private = engine(steps=None, noise_multiplier=2.0, target_epsilon=1.5)
    step = private.plan.event
    train(private)
    taken = private.steps_taken
    assert taken == private.planned_steps
    assert private.privacy_spent().epsilon <= 1.5
    assert accounting.epsilon([accounting.Charge(step, taken + 1)], 1e-5) > 1.5
    assert train(private) == 0


def test_a_plan_just_above_the_target_is_cut() -> None:
    step = engine(noise_multiplier=2.0).plan.event
    cost = accounting.epsilon([accounting.Charge(step, 50)], 1e-5)
    assert engine(noise_multiplier=2.0, steps=50, target_epsilon=cost * 1.0001).planned_steps == 50
    assert engine(noise_multiplier=2.0, steps=50, target_epsilon=cost * 0.9999).planned_steps == 49


def test_the_charge_is_what_was_done() -> None:
    private = engine(noise_multiplier=1.3)
    train(private)
    ideal = accounting.gaussian_epsilon(noise_multiplier=1.3, sample_rate=0.1, steps=4, delta=1e-5)
    spent = private.privacy_spent().epsilon
    assert ideal < spent < 1.0001 * ideal  # the rounding of 58 numbers costs a little
    assert private.privacy_spent(1e-3).epsilon < ideal
    noise = [engine(noise_multiplier=s, mechanism=dpulr.Gaussian(max_grad_norm=c)) for s, c in ((1.0, 1.0), (2.0, 1.0), (1.0, 3.0))]
    assert [private.fitted.noise_std for private in noise] == [1.0, 2.0, 3.0]


def test_an_automatic_threshold_is_priced() -> None:
    private = engine(rejection_threshold="auto", noise_multiplier=None, target_epsilon=3.0, target_delta=1e-3)
    threshold = private.plan.rejection_threshold
    assert 0 < threshold < 20
    assert private.plan.event.rejection_threshold == threshold
    assert accounting.epsilon([accounting.Charge(private.plan.event, 4)], 1e-3) <= 3.0


def test_a_budget_that_no_step_meets_is_an_error_of_its_own() -> None:
    with pytest.raises(BudgetError, match="not one step fits"):
        dpulr.Gaussian().plan(asked(target_epsilon=0.01, noise_multiplier=0.5), ())


def test_a_plan_on_top_of_what_is_spent_counts_it() -> None:
    plan = dpulr.Gaussian().plan(asked(steps=None, noise_multiplier=2.0, target_epsilon=1.5), ())
    spent = [accounting.Charge(plan.event, 10)]
    assert plan.limited(spent) == plan
    costly = [accounting.Charge(accounting.SampledStep(accounting.GaussianRelease(1.0), 0.1), 10)]
    shorter = plan.limited(costly)
    assert 10 <= shorter.steps < plan.steps
    with pytest.raises(BudgetError):
        dataclasses.replace(plan, target_epsilon=1e-3).limited()


def test_what_a_checkpoint_has_spent_shortens_the_plan() -> None:
    costly = engine(noise_multiplier=1.0, steps=10)
    train(costly)
    limits = {"noise_multiplier": 2.0, "target_epsilon": 3.0, "steps": 100}
    fresh, resumed = engine(**limits), engine(**limits)
    resumed.load_state_dict(costly.state_dict())
    train(fresh)
    train(resumed)
    assert fresh.steps_taken == 100
    assert 10 < resumed.steps_taken < 100
    assert resumed.privacy_spent().epsilon <= 3.0
    assert resumed.steps_taken == resumed.planned_steps


# --- what has no price ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"insecure_noise_seed": 0}, "insecure_noise_seed"),
        ({"sampling": "shuffle"}, "shuffled"),
        ({"noise_multiplier": 0.0}, "no noise"),
        ({"insecure_noise_seed": 0, "noise_multiplier": None, "target_epsilon": 1.0}, "insecure_noise_seed"),
    ],
)
def test_what_voids_the_guarantee(settings: dict[str, Any], reason: str) -> None:
    private = engine(**settings)
    assert private.guarantee == "none"
    train(private, 1)
    spent = private.privacy_spent()
    assert (spent.guarantee, spent.epsilon) == ("none", None)
    assert reason in str(spent)


@pytest.mark.parametrize("options", [{"rejection_threshold": "auto"}, {"rejection_threshold": 3}], ids=str)
def test_shuffled_batches_reject_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="nothing to reject"):
        engine(sampling="shuffle", **options)
