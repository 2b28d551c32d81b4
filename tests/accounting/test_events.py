"""Events are values: equal, hashable, JSON-able; anything unknown or impossible is refused in a plain sentence."""

import dataclasses
import json
import math

import pytest

from dpulr import accounting as acc
from dpulr.accounting import events

SAMPLES = [
    acc.GaussianRelease(2.0),
    acc.HiddenDirectionRelease((acc.HiddenSite(128, 0.5, 4, 2), acc.HiddenSite(10, 1.0)), (3.0,)),
    acc.PaperRelease(4.0, 4),
    acc.Unaccounted("shuffled batches"),
    acc.SampledStep(acc.GaussianRelease(2.0), 0.01, 5, 1000),
    acc.Charge(acc.SampledStep(acc.PaperRelease(4.0), 0.01), 7),
    acc.Charge(acc.Unaccounted("seeded noise"), 1),
]


@pytest.mark.parametrize("event", SAMPLES, ids=lambda e: type(e).__name__)
def test_round_trip_through_json(event):
    assert events.from_dict(json.loads(json.dumps(events.to_dict(event)))) == event
    assert hash(event) == hash(events.from_dict(events.to_dict(event)))


@pytest.mark.parametrize("event", SAMPLES, ids=lambda e: type(e).__name__)
def test_events_cannot_be_changed(event):
    field = dataclasses.fields(event)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(event, field, 1)


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "laplace", "scale": 1.0},
        {"noise_multiplier": 2.0},
        {"kind": ["gaussian"]},
        {"kind": "gaussian", "noise_multiplier": 2.0, "discount": 0.5},
        {"kind": "gaussian"},
        {"kind": "charge", "count": 3, "step": {"kind": "other"}},
        {"kind": "sampled-step", "sample_rate": 0.1, "release": {"kind": "unaccounted", "reason": "x"}},
    ],
)
def test_unknown_events_fail_closed(data):
    with pytest.raises(ValueError):
        events.from_dict(data)


def test_unknown_release_has_no_price():
    with pytest.raises(ValueError, match="not a release"):
        acc.SampledStep("gaussian", 0.1)
    with pytest.raises(ValueError, match="not a charge"):
        acc.epsilon(["gaussian"], 1e-5)


def good(**change):
    given = {"noise_multiplier": 2.0, "sample_rate": 0.01, "steps": 10, "delta": 1e-5, **change}
    return acc.gaussian_epsilon(**given)


def hidden(**change):
    given = {"noise_multiplier": 2.0, "dims": [10, 4], "sample_rate": 0.01, "steps": 10, "delta": 1e-5, **change}
    return acc.hidden_direction_epsilon(**given)


@pytest.mark.parametrize("name", ["noise_multiplier", "sample_rate", "delta"])
@pytest.mark.parametrize("value", [math.nan, -1.0, 0.0, math.inf, "2", None, True])
def test_bad_numbers(name, value):
    with pytest.raises(ValueError, match=name):
        good(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("sample_rate", 1.0001), ("delta", 1.0), ("delta", 1.5)])
def test_numbers_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        good(**{name: value})


@pytest.mark.parametrize("value", [1.5, -1, 10.0, math.nan, None])
def test_steps_must_be_whole(value):
    with pytest.raises(ValueError, match="steps"):
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
        ({"repeats": 6, "frames": 4}, "multiple of frame"),
        ({"repeats": 16, "frames": 16}, "only 10 orthonormal directions fit"),
        ({"rejection_threshold": 3}, "min_dataset_size"),
        ({"rejection_threshold": 300, "min_dataset_size": 200}, "no batch would ever be accepted"),
        ({"rejection_threshold": 2.5, "min_dataset_size": 200}, "rejection_threshold is 2.5"),
        ({"method": "moments"}, "method is 'moments'"),
    ],
)
def test_bad_layers_and_thresholds(change, message):
    with pytest.raises(ValueError, match=message):
        hidden(**change)
