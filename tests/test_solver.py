"""Planning: each quantity from the others, as a table and as JSON; epochs become steps by one rule."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpulr import accounting as acc
from dpulr.errors import BudgetError, InvalidArgument
from dpulr.plan import epochs_of, steps_of
from dpulr.solver import plan

FULL = {"epsilon": 1.0, "noise_multiplier": 2.0, "batch_size": 500, "epochs": 10.0, "dataset_size": 60_000}


def without(name):
    return {key: value for key, value in FULL.items() if key != name}


def price(result, **change):
    given = {
        "noise_multiplier": result.noise_multiplier,
        "sample_rate": result.sample_rate,
        "steps": result.steps,
        "delta": result.delta,
        **change,
    }
    return acc.gaussian_epsilon(**given)


@pytest.mark.parametrize("name", ["epsilon", "noise_multiplier", "batch_size", "epochs", "dataset_size"])
def test_each_quantity_is_computed_from_the_rest(name):
    result = plan(**without(name))
    assert result.solved_for == name
    assert price(result) == result.epsilon
    for key, value in without(name).items():
        if key != "epsilon":
            assert getattr(result, key) == value
    if name != "epsilon":
        assert 0.98 < result.epsilon <= 1.0


def test_what_is_computed_is_extreme():
    batch = plan(**without("batch_size"))
    assert plan(**{**without("epsilon"), "batch_size": batch.batch_size + 1}).epsilon > 1.0
    size = plan(**without("dataset_size"))
    assert plan(**{**without("epsilon"), "dataset_size": size.dataset_size - 1}).epsilon > 1.0
    epochs = plan(**without("epochs"))
    assert price(epochs, steps=epochs.steps + 1) > 1.0


def test_delta_when_all_else_is_given():
    result = plan(**FULL)
    assert result.solved_for == "delta"
    assert price(result, delta=result.delta * 1.01) <= 1.0 <= price(result, delta=result.delta * 0.98)


def test_automatic_rejection():
    result = plan(**without("epsilon"), rejection_threshold="auto")
    assert 0 < result.rejection_threshold < 500
    plain = plan(**without("epsilon"))
    assert plain.epsilon <= result.epsilon <= 1.01 * plain.epsilon
    solved = plan(**without("noise_multiplier"), rejection_threshold="auto")
    assert solved.rejection_threshold > 0
    assert solved.epsilon <= 1.0
    longest = plan(**without("epochs"), rejection_threshold="auto")
    assert longest.rejection_threshold > 0
    assert 0.98 < longest.epsilon <= 1.0


def test_hidden_direction_plan():
    result = plan(**without("epsilon"), mechanism="hidden-direction", dims=[32, 10], repeats=2)
    assert result.epsilon == acc.hidden_direction_epsilon(
        noise_multiplier=2.0, dims=[32, 10], repeats=2, sample_rate=1 / 120, steps=1200, delta=1e-5
    )
    assert result.equivalent_noise > 2.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": None, "epochs": None}, "only one of them"),
        ({"delta": 1e-5}, "Everything is given"),
        ({"batch_size": 70_000}, "the data set has only 60000 records"),
        ({"epsilon": -1.0}, "epsilon is -1"),
        ({"epochs": math.nan}, "epochs is nan"),
        ({"dataset_size": 1.5}, "dataset_size is 1.5"),
        ({"mechanism": "paper"}, "mechanism is 'paper'"),
        ({"dims": [10]}, "dims means nothing"),
    ],
)
def test_bad_plans(change, message):
    with pytest.raises(InvalidArgument, match=message):
        plan(**{**FULL, **change})


def test_a_mechanism_may_be_a_function():
    ours = plan(**without("noise_multiplier"), mechanism=lambda noise: acc.GaussianRelease(noise, mechanism="mine"))
    by_name = plan(**without("noise_multiplier"))
    assert ours.mechanism == "mine"
    assert ours.noise_multiplier == by_name.noise_multiplier


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("epochs", {"noise_multiplier": 0.1}, "Not even one step"),
        ("batch_size", {"noise_multiplier": 0.1, "epochs": 100.0}, "Not even batches of one record"),
        ("dataset_size", {"noise_multiplier": 0.01}, "No data set is large enough"),
    ],
)
def test_budgets_that_nothing_meets(name, change, message):
    with pytest.raises(BudgetError, match=message):
        plan(**{**without(name), **change})


def test_shown_as_a_table_and_as_json():
    result = plan(**without("epsilon"))
    assert json.loads(result.to_json())["epsilon"] == result.epsilon
    (marked,) = [line for line in result.table().splitlines() if "<- computed" in line]
    assert marked.startswith("epsilon")


def test_epochs_become_steps_by_rounding_up():
    """1,000 records in batches of 300: one epoch takes four steps. Three would be charged less than is taken."""
    assert steps_of(1.0, 0.3) == 4
    result = plan(epsilon=1.0, batch_size=300, epochs=1.0, dataset_size=1000)
    assert result.steps == 4
    assert price(result, steps=4) <= 1.0
    assert steps_of(5.0, 500 / 60_000) == 600
    assert steps_of(25, 64 / 60_000) == 23_438
    assert steps_of(1e-9, 0.5) == 1


@given(st.integers(1, 10**9), st.floats(1e-7, 1.0))
def test_steps_become_the_epochs_that_give_them_back(steps, rate):
    assert steps_of(epochs_of(steps, rate), rate) == steps
