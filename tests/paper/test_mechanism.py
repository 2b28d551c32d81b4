"""A step of the `paper` mechanism against a slow, literal transcription of Algorithm 1."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr.errors import InvalidArgument
from dpulr.randomness import RandomSource, normal_float32
from tests.support.algorithm_1 import BASE, SIGMA0, Literal, Residual, convolutions, data, engine_for, images
from tests.support.core import LOSS, gradient, normed_mlp, total, train


# --- Algorithm 1, literally -----------------------------------------------------------------------------------------------
def check_step(make: Any, settings: dpulr.Paper, std: float, *, threshold: int = 0) -> tuple[dpulr.PrivacyEngine, list[float]]:
    """Compare a step with the literal one. Returns the engine, and the sigmas that the controller chose."""
    torch.manual_seed(0)
    model, records = make().double(), data()
    literal = Literal(model, records, settings, rate=0.5, threshold=threshold)
    expected = [summed / (threshold or 6) for summed in literal.step(std)]
    private = engine_for(model, records, settings, noise_multiplier=std, rejection_threshold=threshold)
    before = [p.detach().clone() for p in model.parameters()]
    batch = next(private.batches())
    sigmas = [control.sigma for control in total(private.fitted, *batch).controls]
    private.step(*batch)
    for layer, wanted in zip(literal.layers, expected, strict=True):
        torch.testing.assert_close(gradient(layer), wanted, rtol=1e-5, atol=1e-5)
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old - parameter.grad)
    return private, sigmas


@pytest.mark.parametrize("make", [normed_mlp, convolutions, images, Residual])
@pytest.mark.parametrize("simultaneous", [False, True])
@pytest.mark.parametrize("remedy", ["auto", "extra-noise"])
@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_a_step_is_algorithm_1(make: Any, simultaneous: bool, remedy: Any) -> None:
    settings = dpulr.Paper(**{**BASE, "sigma": 1.5}, remedy=remedy, simultaneous=simultaneous)
    _, sigmas = check_step(make, settings, SIGMA0, threshold=7)
    if remedy == "auto":
        assert min(sigmas) < 1.5  # some layer has full rank, and eq:sigma asks for less
    else:
        assert sigmas == [1.5] * len(sigmas)


class Reversed(nn.Module):
    """Layers are registered in another order than they run, one is called by keyword, and one input is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.first, self.middle = nn.Linear(4, 3), nn.Linear(5, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        y = self.middle(input=x).tanh()
        x += y
        return self.out(x)


@pytest.mark.parametrize("simultaneous", [False, True])
@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_layers_may_run_in_any_order(simultaneous: bool) -> None:
    check_step(Reversed, dpulr.Paper(**BASE, simultaneous=simultaneous), SIGMA0)


@pytest.mark.parametrize("make", [normed_mlp, convolutions, images, Reversed])
@pytest.mark.parametrize("simultaneous", [False, True])
@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_single_precision_gives_the_same_step(make: Any, simultaneous: bool) -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = make().to(dtype)
        settings = dpulr.Paper(**BASE, remedy="extra-noise", simultaneous=simultaneous)
        inputs, targets = data().tensors
        private = engine_for(model, TensorDataset(inputs.to(dtype), targets), settings, noise_multiplier=SIGMA0)
        train(private)
        found.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


# --- passes that raise ----------------------------------------------------------------------------------------------------
class Moody(nn.Module):
    """A black box that takes no large input."""

    def forward(self, x: Tensor) -> Tensor:
        if np.abs(x.numpy()).max() > 2.5:
            raise RuntimeError("out of range")
        return x


@pytest.mark.parametrize("simultaneous", [False, True])
def test_a_pass_that_raises_counts_as_no_loss(simultaneous: bool) -> None:
    """The other rows are as if it had not been there."""

    class Silent(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x.abs().amax(-1, keepdim=True) > 2.5, torch.nan, x)

    found = []
    for box in (Moody(), Silent()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), box, nn.Linear(4, 3)).double()
        settings = dpulr.Paper(**{**BASE, "sigma": 3.0, "max_grad_norm": 1e9}, target_std=0, simultaneous=simultaneous)
        private = engine_for(model, data(), settings)
        train(private)
        found.append(gradient(model))
    assert found[0].norm() > 0
    torch.testing.assert_close(*found)


# --- plain ULR ------------------------------------------------------------------------------------------------------------
def test_without_target_it_is_plain_ulr() -> None:
    private, _ = check_step(normed_mlp, dpulr.Paper(**BASE), 0.0)
    assert private.guarantee == "none"
    assert private.privacy_spent().nominal_epsilon is None


def test_plain_ulr_need_not_clip() -> None:
    norms = []
    for clip in (1e9, math.inf):
        torch.manual_seed(0)
        model = normed_mlp().double()
        private = engine_for(model, data(), dpulr.Paper(target_std=0, max_grad_norm=clip))
        train(private)
        norms.append([p.grad.norm().item() for p in model.parameters()])
    assert norms[0] == pytest.approx(norms[1])
    private = engine_for(model, data(), dpulr.Paper(target_std=1, max_grad_norm=math.inf))
    batch = next(private.batches())
    with pytest.raises(InvalidArgument, match="max_grad_norm is infinite"):
        private.step(*batch)


# --- the virtual linear layer ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("most", [100.0, 0.4])
def test_the_virtual_linear_layer_perturbs_parameters(most: float) -> None:
    """J is the identity: the covariance is the sum of squared losses times the identity, and eq:sigma is explicit."""
    torch.manual_seed(0)
    model, records = normed_mlp().double(), data()
    private = engine_for(model, records, dpulr.Paper(**{**BASE, "sigma": most}, remedy="parameters"), noise_multiplier=SIGMA0)
    inputs, targets = next(private.batches())
    with torch.no_grad():
        losses = LOSS(model(inputs), targets)
        clean = {n: p.clone() for n, p in model.named_parameters()}
    controls = total(private.fitted, inputs, targets).controls
    private.step(inputs, targets)
    asked = math.sqrt(losses.square().sum().item() / 3) / (0.7 * SIGMA0)
    sigmas = [min(asked, most * site.scale) for site in private.forward.sites]
    assert [control.sigma for control in controls] == pytest.approx(sigmas)
    assert (sigmas[0] < asked) == (most == 0.4)
    rng = RandomSource(12).numpy("directions")
    for layer, sigma in zip(("0", "2", "3"), sigmas, strict=True):
        names = [n for n in clean if n.startswith(layer)]
        width = sum(clean[n].numel() for n in names)
        z = torch.from_numpy(normal_float32(rng, 3 * len(inputs) * width)).view(3, -1, width).double() * sigma
        summed = torch.zeros(width, dtype=torch.float64)
        for i in range(len(inputs)):
            proxy = torch.zeros(width, dtype=torch.float64)
            for k in range(3):
                parts = torch.split(z[k, i], [clean[n].numel() for n in names])
                moved = clean | {n: clean[n] + part.view_as(clean[n]) for n, part in zip(names, parts, strict=True)}
                loss = LOSS(torch.func.functional_call(model, moved, (inputs[i : i + 1],)), targets[i : i + 1])
                proxy += z[k, i] * loss.item() / sigma**2 / 3
            summed += proxy / max(1, proxy.norm().item() / 0.7)
        found = gradient(model.get_submodule(layer))
        torch.testing.assert_close(found, summed / 6, rtol=1e-5, atol=1e-5)
