"""Settings of the `paper` mechanism: by layer and by step, thresholds, and what is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import dpulr
from dpulr.errors import InvalidArgument
from dpulr.paper.step import StepSettings
from tests.support.algorithm_1 import BASE, Literal, convolutions, data, engine_for, fitted_to
from tests.support.core import Kept, gradient, normed_mlp, train


# --- by layer and by step -------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_settings_may_differ_by_layer_and_step() -> None:
    settings = dpulr.Paper(
        target_std={0: 1.0, 2: (2.0, 3.0, 4.0)},
        repeats=(1, 2, 3),
        max_grad_norm=lambda step, layer: 0.5 + step + 10 * layer,
        rejection_threshold={"0": 4, "1": (5, 6, 7)},
        sigma=0.3,
        remedy="extra-noise",
    )
    private = engine_for(normed_mlp().double(), data(40), settings, steps=4, batch_size=8)
    sizes: list[int] = []
    seen: list[StepSettings] = []
    private.on_release(lambda released: seen.append(released.public))
    for inputs, targets in private.batches():
        sizes.append(len(inputs))
        private.step(inputs, targets)
    assert [step.target_std for step in seen] == [(1, 1, 1), (1, 1, 1), (2, 3, 4), (2, 3, 4)]
    assert seen[0].repeats == (1, 2, 3)
    assert seen[3].clip == (3.5, 13.5, 23.5)
    assert [step.divisors for step in seen] == [(4, 4, 4), (5, 6, 7), (5, 6, 7), (5, 6, 7)]
    assert sizes[0] >= 4
    assert min(sizes[1:]) >= 7
    steps = [(c.step.release.target_std, c.step.rejection_threshold, c.count) for c in private.ledger.charges]
    assert steps == [(1.0, 4, 1), (1.0, 7, 1), (2.0, 7, 2)]


@pytest.mark.parametrize("make", [normed_mlp, convolutions])
@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_layers_with_settings_of_their_own_are_algorithm_1(make: Any) -> None:
    """The step of the literal transcription, layer by layer, in the second step of a schedule."""
    stds, repeats, clips, thresholds = (0.5, 0.9, 1.4), (1, 3, 2), (0.4, 0.7, 2.0), (2, 4, 5)
    settings = dpulr.Paper(
        target_std={0: 1.0, 1: stds}, repeats=repeats, max_grad_norm=clips, sigma=0.4, rejection_threshold=thresholds
    )
    torch.manual_seed(0)
    model = make().double()
    source = Kept(12)
    private = engine_for(model, data(), settings, steps=2, insecure_noise_seed=None, randomness=source)
    batches = private.batches()
    private.step(*next(batches))
    inputs, targets = next(batches)
    literal = Literal(model, TensorDataset(inputs, targets), settings, rate=1.0, threshold=0)
    literal.batch = list(zip(inputs, targets, strict=True))
    literal.directions, literal.noise = (copy.deepcopy(source.streams[purpose]) for purpose in ("directions", "noise"))
    expected = [summed / n for summed, n in zip(literal.step(stds, repeats, clips), thresholds, strict=True)]
    private.step(inputs, targets)
    for layer, wanted in zip(literal.layers, expected, strict=True):
        torch.testing.assert_close(gradient(layer), wanted, rtol=1e-5, atol=1e-5)


# --- thresholds -----------------------------------------------------------------------------------------------------------
def test_the_engines_threshold_divides_too() -> None:
    """N_B given to the mechanism or to the private: the same step; both, and different: refused."""
    norms = []
    for own, given in ((4, 0), (None, 4), (None, 0)):
        torch.manual_seed(0)
        model = normed_mlp().double()
        private = engine_for(model, data(), dpulr.Paper(target_std=0, rejection_threshold=own), rejection_threshold=given)
        train(private)
        norms.append(gradient(model).norm().item())
    assert norms[0] == pytest.approx(norms[1])
    assert norms[2] == pytest.approx(norms[0] * 4 / 6)
    with pytest.raises(InvalidArgument, match="different rejection thresholds"):
        engine_for(normed_mlp().double(), data(), dpulr.Paper(target_std=0, rejection_threshold=4), rejection_threshold=5)


def test_each_layer_divides_by_its_own_threshold() -> None:
    settings = dpulr.Paper(**BASE, target_std=0, rejection_threshold=(2, 4, 5))
    fitted, _, _ = fitted_to(normed_mlp, settings, 3)
    into = [{name: torch.zeros_like(p) for name, p in site.parameters.items()} for site in fitted.sites]
    with torch.inference_mode():
        fitted.gradients(torch.ones(fitted.size, dtype=torch.float64), fitted.draw_public(0), into)
    assert [views["bias"][0].item() for views in into] == [0.5, 0.25, 0.2]


# --- what is refused ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats is 0; it must be a whole number of at least 1"),
        ({"repeats": (1, 2)}, "repeats has 2 values, but the model has 3 layers"),
        ({"repeats": {5: 1}}, "repeats must say what holds from step 0 on"),
        ({"repeats": {"soon": 1}}, "repeats has the key 'soon'"),
        ({"target_std": -1.0}, "target_std is -1.0; it must be a number of at least 0"),
        ({"sigma": math.inf}, "sigma is inf; it must be a positive number"),
        ({"remedy": "prayer"}, "remedy is 'prayer'; it must be 'auto'"),
        ({"simultaneous": True, "repeats": (1, 2, 3)}, "repeats must be the same for all"),
        ({"simultaneous": True, "repeats": {0: 1, 4: (1, 2, 3)}}, "repeats must be the same for all"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        engine_for(normed_mlp().double(), data(), dpulr.Paper(**({"target_std": 1.0} | options)))


def test_simultaneous_noise_shares_its_repeats_in_every_step() -> None:
    settings = dpulr.Paper(target_std=0, simultaneous=True, repeats=lambda step, layer: 2 if step == 0 else 1 + layer)
    private = engine_for(normed_mlp().double(), data(), settings, steps=2)
    batches = private.batches()
    private.step(*next(batches))
    with pytest.raises(InvalidArgument, match="repeats must be the same for all"):
        private.step(*next(batches))
