"""The one list of mechanisms, and a mechanism from outside of the package that the engine runs like its own."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import dpulr
from dpulr import accounting, mechanisms
from dpulr.accounting.kinds import from_dict, to_dict
from dpulr.errors import InvalidArgument
from dpulr.randomness import RandomSource
from tests.support.core import LOSS, accuracy, blobs, engine, fit, gradient, rounded, small_mlp, total, train
from tests.support.own_mechanism import CoordinateDifferences, CoordinateRelease


# --- the list -------------------------------------------------------------------------------------------------------------
def test_all_mechanisms_are_known_by_name() -> None:
    known = mechanisms.registry()
    assert {"hidden-direction", "gaussian", "zeroth-order", "paper", "coordinate-differences"} <= set(known)
    assert all(kind.name == name for name, kind in known.items())
    assert mechanisms.by_name("paper") == dpulr.Paper()
    own = dpulr.Gaussian(repeats=3)
    assert mechanisms.by_name(own) is own
    assert mechanisms.kind_of(own) is mechanisms.kind_of("gaussian") is dpulr.Gaussian
    with pytest.raises(InvalidArgument, match=r"mechanism is 'magic'; it must be one of .*'coordinate-differences'"):
        mechanisms.by_name("magic")


def test_every_mechanism_says_what_an_audit_attacks() -> None:
    for kind in mechanisms.registry().values():
        assert isinstance(kind.worst_case().mechanism, kind)


def test_a_name_is_given_once() -> None:
    @dataclass(frozen=True)
    class Another(CoordinateDifferences):
        name = "gaussian"

    with pytest.raises(InvalidArgument, match="there is a mechanism 'gaussian' already"):
        mechanisms.register(Another)
    assert mechanisms.kind_of("gaussian") is dpulr.Gaussian
    assert mechanisms.register(CoordinateDifferences) is CoordinateDifferences  # a module may be loaded again


@pytest.mark.parametrize("what", [int, "gaussian", CoordinateDifferences()])
def test_only_mechanisms_are_registered(what: object) -> None:
    with pytest.raises(InvalidArgument, match="is not a mechanism"):
        mechanisms.register(what)  # type: ignore[type-var]


# --- one from outside -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_an_own_mechanism_trains_by_its_name() -> None:
    model = small_mlp()
    private = engine(
        model,
        mechanism="coordinate-differences",
        learning_rate=3.0,
        batch_size=100,
        steps=60,
        noise_multiplier=None,
        target_epsilon=8.0,
    )
    assert train(private) == 60
    assert accuracy(model, blobs()) > 0.9
    spent = private.privacy_spent()
    assert spent.guarantee == private.guarantee == "certified"
    assert 7.5 < spent.epsilon <= 8.0
    assert "60 steps of the coordinate-differences mechanism" in str(spent)
    assert "secret noise and batches" in str(spent)


@pytest.mark.slow
def test_its_plan_is_priced_by_its_own_release() -> None:
    private = engine(mechanism=CoordinateDifferences(coordinates=3), noise_multiplier=1.3)
    assert private.plan.event == accounting.SampledStep(CoordinateRelease(1.3, 3), 0.1)
    train(private)
    expected = accounting.gaussian_epsilon(noise_multiplier=1.3, sample_rate=0.1, steps=4, delta=1e-5)
    assert private.privacy_spent().epsilon == expected
    open_end = engine(mechanism="coordinate-differences", steps=None, noise_multiplier=2.0, target_epsilon=1.5)
    gaussian = engine(steps=None, noise_multiplier=2.0, target_epsilon=1.5)
    assert open_end.planned_steps == gaussian.planned_steps


def test_a_gaussian_release_may_bear_another_name() -> None:
    """For a mechanism that needs no release of its own."""

    @dataclass(frozen=True)
    class Renamed(CoordinateDifferences):
        name = "mine"

        def release(self, sites: object, noise_multiplier: float) -> accounting.GaussianRelease:  # type: ignore[override]
            return accounting.GaussianRelease(noise_multiplier, mechanism=self.name)

    private = engine(mechanism=Renamed(), steps=1)
    train(private)
    assert "1 step of the mine mechanism" in str(private.privacy_spent())


@pytest.mark.slow
def test_its_run_resumes() -> None:
    first = engine(mechanism="coordinate-differences", steps=6)
    train(first, 4)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = engine(dpulr.models.mlp((4, 8, 2), seed=5), mechanism="coordinate-differences", steps=6)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    assert second.privacy_spent() == first.privacy_spent()
    assert train(second) == 2
    assert second.privacy_spent().steps == 6
    assert second.ledger.charges == [accounting.Charge(second.plan.event, 6)]


def test_its_release_is_written_and_read() -> None:
    event = accounting.SampledStep(CoordinateRelease(1.5, 8), 0.01)
    assert from_dict(json.loads(json.dumps(to_dict(event)))) == event


def test_its_step_is_what_it_says() -> None:
    """The slopes of a model of one layer by autograd, clipped record by record; noise from the engine's stream."""
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(4, 2)), blobs(50)
    mechanism = CoordinateDifferences(coordinates=5, width=1e-3, max_grad_norm=0.5)
    private = engine(model, data, mechanism=mechanism, batch_size=10, steps=1, noise_multiplier=0.6, insecure_noise_seed=2)
    inputs, targets = next(private.batches())
    chosen = private.fitted.draw_public(0)
    expected = torch.zeros(5)
    for x, y in zip(inputs, targets, strict=True):
        loss = LOSS(model(x.unsqueeze(0)), y.unsqueeze(0)).sum()
        slopes = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])[chosen]
        expected += slopes * min(1, 0.5 / slopes.norm().item())
    noise = torch.from_numpy(RandomSource(2).numpy("noise").standard_normal(5))
    private.step(inputs, targets)
    flat = torch.zeros(10).index_add_(0, chosen, rounded(expected + 0.3 * noise, 0.3).float() / 10)
    torch.testing.assert_close(gradient(model), flat, rtol=1e-3, atol=1e-4)


def test_its_records_are_bounded() -> None:
    fitted = fit(CoordinateDifferences(max_grad_norm=0.3), nn.Sequential(nn.Linear(6, 3)), loss_fn=lambda o, y: 1e4 * LOSS(o, y))
    for row in np.random.default_rng(0).standard_normal((5, 1, 6)):
        assert 0.29 < total(fitted, torch.from_numpy(row).float(), torch.zeros(1).long()).norm() <= 0.3
