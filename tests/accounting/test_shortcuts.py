"""Epsilon in one call: impossible input is refused in a plain sentence, no steps cost nothing."""

import math

import numpy as np
import pytest

from dpulr import accounting as acc
from dpulr.accounting.shortcuts import release_maker
from dpulr.errors import InvalidArgument


def good(**change):
    given = {"noise_multiplier": 2.0, "sample_rate": 0.01, "steps": 10, "delta": 1e-5, **change}
    return acc.gaussian_epsilon(**given)


def hidden(**change):
    given = {"noise_multiplier": 2.0, "dims": [10, 4], "sample_rate": 0.01, "steps": 10, "delta": 1e-5, **change}
    return acc.hidden_direction_epsilon(**given)


@pytest.mark.parametrize("name", ["noise_multiplier", "sample_rate", "delta"])
@pytest.mark.parametrize("value", [math.nan, -1.0, 0.0, math.inf, "2", None, True])
def test_bad_numbers(name, value):
    with pytest.raises(InvalidArgument, match=name):
        good(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("sample_rate", 1.0001), ("delta", 1.0), ("delta", 1.5)])
def test_numbers_out_of_range(name, value):
    with pytest.raises(InvalidArgument, match=name):
        good(**{name: value})


@pytest.mark.parametrize("value", [1.5, -1, 10.0, math.nan, None])
def test_steps_must_be_whole(value):
    with pytest.raises(InvalidArgument, match="steps"):
        good(steps=value)


def test_no_steps_cost_nothing():
    assert good(steps=0) == 0.0
    assert hidden(steps=0) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dims": []}, "dims is empty"),
        ({"layer_weights": [1.0]}, "layer_weights has 1 entries for 2 layers"),
        ({"layer_weights": [1.0, 0.0]}, "layer_weights is 0.0"),
        ({"repeats": [1, 2, 3]}, "repeats has 3"),
        ({"repeats": 0}, "repeats is 0"),
        ({"dims": [10.5, 4]}, "dim is 10.5"),
        ({"dims": [0, 4]}, "dim is 0"),
        ({"repeats": [1, 2.5]}, "repeats is 2.5"),
        ({"layer_weights": "12"}, "layer_weights is '12'"),
        ({"rejection_threshold": 3}, "min_dataset_size"),
        ({"rejection_threshold": 300, "min_dataset_size": 200}, "no batch would ever be accepted"),
        ({"rejection_threshold": 2.5, "min_dataset_size": 200}, "rejection_threshold is 2.5"),
        ({"method": "moments"}, "method is 'moments'"),
    ],
)
def test_bad_layers_and_thresholds(change, message):
    with pytest.raises(InvalidArgument, match=message):
        hidden(**change)


def test_layers_may_come_as_arrays():
    ours = acc.hidden_direction_release(2.0, [10, 4], layer_weights=np.array([1.0, 2.0]), repeats=np.array([1, 2]))
    assert ours == acc.HiddenDirectionRelease((acc.HiddenSite(10, 2.0, 1), acc.HiddenSite(4, 1.0, 2)))


def test_from_a_name_to_a_release():
    assert release_maker("gaussian")(2.0) == acc.GaussianRelease(2.0)
    assert release_maker("hidden-direction", dims=[10], repeats=3)(2.0) == acc.hidden_direction_release(2.0, [10], repeats=3)
    own = release_maker(lambda noise: acc.GaussianRelease(noise, mechanism="mine"))
    assert own(2.0).mechanism == "mine"
    assert release_maker("gradient")(2.0) == release_maker("zeroth-order")(2.0) == acc.GaussianRelease(2.0)
    for mechanism in ("gaussian", acc.GaussianRelease):
        with pytest.raises(InvalidArgument, match="dims means nothing"):
            release_maker(mechanism, dims=[10])
    with pytest.raises(InvalidArgument, match="mechanism is 'paper'; it must be 'gaussian', "):
        release_maker("paper")
