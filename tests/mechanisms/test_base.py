"""What every mechanism keeps to: finished when it is made, and nothing left on it between the stages of a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import dpulr
from dpulr.mechanisms import FittedMechanism, Mechanism
from tests.support.core import all_kinds, directions, engine, fit, named, points, rounded, total, train
from tests.support.own_mechanism import CoordinateDifferences

MECHANISMS: list[Mechanism] = [
    dpulr.HiddenDirection(repeats=2, subspace=2),
    dpulr.HiddenDirection(groups=2, antithetic=True, subspace=2),
    dpulr.HiddenDirection(last_layer="exact", subspace=2),
    dpulr.Gaussian(repeats=2, subspace=2),
    dpulr.ZerothOrder(repeats=2),
    dpulr.Paper(repeats=2, remedy="parameters"),
    CoordinateDifferences(),
]
every = pytest.mark.parametrize("mechanism", MECHANISMS, ids=named)


def outcome(fitted: Any, public: Any) -> list[Tensor]:
    """The sum, the release and the gradients of one step, with fixed secrets."""
    x, y = points(5).tensors
    into = [{name: torch.zeros_like(p) for name, p in site.parameters.items()} for site in fitted.forward.sites]
    with torch.inference_mode():
        summed = fitted.sum_of_bounded_signals((x, y), public, directions(4))
        values = fitted.privatise(summed, torch.linspace(-1, 1, fitted.size, dtype=torch.float64))
        fitted.gradients(values, public, into)
    return [values, *[part for parts in into for part in parts.values()]]


@every
def test_settings_are_frozen_and_equal_by_value(mechanism: Mechanism) -> None:
    assert dataclasses.is_dataclass(mechanism)
    assert mechanism == dataclasses.replace(mechanism)
    assert hash(mechanism) == hash(dataclasses.replace(mechanism))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(mechanism, dataclasses.fields(mechanism)[0].name, 7)


@every
def test_a_fitted_mechanism_is_finished_and_no_step_changes_it(mechanism: Mechanism) -> None:
    """The same attributes with the same values before the first step and after it. Random generators move on inside."""
    private = engine(all_kinds(), points(), mechanism=mechanism, steps=2)
    things = (private.fitted, private.forward, private.mechanism, private.plan)
    before = [dict(vars(thing)) for thing in things]
    train(private)
    for thing, values in zip(things, before, strict=True):
        assert list(vars(thing)) == list(values)
        assert all(vars(thing)[name] is value for name, value in values.items())


@every
def test_it_has_what_the_engine_asks_for(mechanism: Mechanism) -> None:
    fitted = fit(mechanism, all_kinds())
    assert isinstance(fitted, FittedMechanism)
    assert isinstance(fitted.size, int)
    values = outcome(fitted, fitted.draw_public(0))[0]
    assert values.shape == (fitted.size,)
    assert mechanism.release(fitted.forward.sites, 1.0).mechanism == mechanism.name


@every
def test_what_is_drawn_in_public_is_a_value(mechanism: Mechanism) -> None:
    """Two draws, then a step with the first: the same as if there had been no second. Nothing is read from the last draw."""
    alone, fitted = (fit(mechanism, all_kinds(), seed=5) for _ in range(2))
    expected = outcome(alone, alone.draw_public(0))
    first, second = fitted.draw_public(0), fitted.draw_public(1)
    outcome(fitted, second)
    for found, wanted in zip(outcome(fitted, first), expected, strict=True):
        assert torch.equal(found, wanted)


@every
@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_an_empty_batch_adds_nothing(mechanism: Mechanism) -> None:
    fitted = fit(mechanism, all_kinds())
    x, y = points(5).tensors
    summed = total(fitted, x[:0], y[:0])
    assert not (summed if isinstance(summed, Tensor) else summed.flat).any()


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if m.name != "paper"], ids=named)
@pytest.mark.parametrize("noise", [0.3, pytest.param(700.0, marks=pytest.mark.slow)])
def test_releases_lie_on_a_public_grid(mechanism: Mechanism, noise: float) -> None:
    """The low bits of a float64 sum would tell what was summed. The grid is 1,024 times finer than the noise."""
    seen: list[Tensor] = []
    private = engine(all_kinds(), points(), mechanism=mechanism, steps=1, noise_multiplier=noise)
    private.on_release(lambda released: seen.append(released.values))
    train(private)
    assert torch.equal(seen[0], rounded(seen[0], private.fitted.noise_std))
    assert len(seen[0].unique()) > 1


@pytest.mark.parametrize(
    "mechanism",
    [m for m in MECHANISMS if m.name != "paper"],  # whose noise differs from number to number
    ids=named,
)
def test_the_deviation_of_its_noise_is_stated(mechanism: Mechanism) -> None:
    assert fit(mechanism, all_kinds(), noise=2.0).noise_std == 2 * fit(mechanism, all_kinds(), noise=1.0).noise_std > 0
