"""Which layers share a direction in `hidden-direction`, which one is exact, and what that releases.

Statistical tests have fixed seeds; their false-alarm rates are stated.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

import dpulr
from dpulr.accounting.events import HiddenSite
from dpulr.errors import InvalidArgument, ModelRefused
from dpulr.mechanisms.base import WITH_MARGIN
from dpulr.randomness import RandomSource, normal_float32
from tests.support.core import LOSS, all_kinds, engine, fit, mlp, parts_of, points, train


# --- groups of layers -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("antithetic", [True, False])
@pytest.mark.parametrize("method", ["trace", "hook"])
def test_a_group_is_moved_in_one_pass_along_one_joint_direction(method: str, antithetic: bool) -> None:
    """Literally: all layers of the group are moved at once, and one bit goes with the joint direction."""
    model, dataset = mlp(), points(8)
    settings = dpulr.HiddenDirection(groups=1, subspace=None, layer_weights=(1.0,), radius=0.2, antithetic=antithetic)
    fitted = fit(settings, model, method=method)
    assert settings.release(fitted.forward.sites, 2.0).sites == (HiddenSite(8, 2.0, 1),)
    x, y = dataset[:]
    z = torch.from_numpy(normal_float32(RandomSource(3).numpy("directions"), 64)).view(8, 8)
    z = z / z.norm(dim=1, keepdim=True)
    wanted = [torch.zeros(5, 7), torch.zeros(3, 6)]
    for i in range(8):
        losses = []
        for sign in (1, -1 if antithetic else 0):
            step = sign * 0.2 * math.sqrt(8) * z[i]
            with torch.no_grad():
                hidden = torch.tanh(model[0](x[i]) + step[:5])
                losses.append(LOSS((model[2](hidden) + step[5:]).unsqueeze(0), y[i : i + 1])[0])
        b = torch.sign(losses[0] - losses[1])
        for share, layer_input, total in ((z[i, :5], x[i], wanted[0]), (z[i, 5:], torch.tanh(model[0](x[i])), wanted[1])):
            a = torch.cat([layer_input.detach(), torch.ones(1)])
            total += b * torch.outer(share, a / a.norm())
    for part, total in zip(parts_of(fitted, x, y, seed=3), wanted, strict=True):
        assert torch.allclose(part.float(), WITH_MARGIN * torch.cat([total[:, :-1].flatten(), total[:, -1]]), atol=5e-4)


def test_groups_share_the_layers_evenly() -> None:
    sites = fit(dpulr.HiddenDirection(), nn.Sequential(*[nn.Linear(6, 6) for _ in range(7)])).forward.sites
    assert [len(group) for group in dpulr.HiddenDirection(groups=3).layout(sites).groups] == [2, 3, 2]
    apart = dpulr.HiddenDirection(groups=2, last_layer="exact").layout(sites)
    assert [list(group) for group in apart.groups] == [[0, 1, 2], [3, 4, 5], [6]]
    assert apart.exact == 2


class Parallel(nn.Module):
    """The second layer does not lie behind the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def test_groups_that_can_not_be() -> None:
    with pytest.raises(ModelRefused, match=r"'a' \(Linear\) \+ 'b' \(Linear\) can't be one group"):
        fit(dpulr.HiddenDirection(groups=1), Parallel())
    with pytest.raises(InvalidArgument, match="groups is 3, but there are only 2 layers"):
        fit(dpulr.HiddenDirection(groups=3), mlp())


# --- the exact last layer -------------------------------------------------------------------------------------------------
def test_exact_last_layer_is_the_clipped_gradient() -> None:
    model = mlp()
    fitted = fit(dpulr.HiddenDirection(last_layer="exact", subspace=None, layer_weights=(1.0, 0.3)), model)
    x, y = points(8).tensors
    parameters = {n: p.detach() for n, p in model[2].named_parameters()}

    def loss(weights: dict[str, Tensor], hidden: Tensor, target: Tensor) -> Tensor:
        return LOSS(functional_call(model[2], weights, (hidden.unsqueeze(0),)), target.unsqueeze(0))[0]

    gradients = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, model[:2](x).detach(), y)
    norms = torch.sqrt(gradients["weight"].square().sum((1, 2)) + gradients["bias"].square().sum(1))
    factors = (0.3 / norms).clamp(max=1)
    assert float(factors.min()) < 1
    wanted = torch.cat([(factors.view(-1, 1, 1) * gradients["weight"]).sum(0).flatten(), factors @ gradients["bias"]])
    assert torch.allclose(parts_of(fitted, x, y)[1].float(), wanted, atol=2e-3)


def test_a_model_of_one_exact_layer_trains() -> None:
    model, dataset = nn.Sequential(nn.Linear(4, 3)), TensorDataset(torch.randn(50, 4), torch.randint(0, 3, (50,)))
    before = model[0].weight.detach().clone()
    settings = dpulr.HiddenDirection(last_layer="exact")
    train(engine(model, dataset, mechanism=settings, batch_size=25, steps=2, noise_multiplier=None, target_epsilon=1.0))
    assert not torch.equal(model[0].weight, before)


def test_a_last_layer_that_is_too_wide_or_has_no_outputs_is_not_exact() -> None:
    exact = dpulr.HiddenDirection(last_layer="exact")
    with pytest.raises(ModelRefused, match=r"at most 1000 numbers; '0' \(Linear\) has 1001 in output space"):
        fit(exact, nn.Sequential(nn.Linear(6, 1001)))
    with pytest.raises(ModelRefused, match=r"'1' \(PReLU\) has 1 in weight space"):
        fit(exact, nn.Sequential(nn.Linear(6, 3), nn.PReLU()))


# --- what is released -----------------------------------------------------------------------------------------------------
def test_the_release_has_the_numbers_that_the_mechanism_uses() -> None:
    settings = dpulr.HiddenDirection(repeats=4, subspace=3, last_layer="exact", layer_weights=(1.0, 2.0, 4.0, 0.5, 3.0))
    fitted = fit(settings, all_kinds(), noise=1.5)
    release = settings.release(fitted.forward.sites, 1.5)
    assert fitted.noise_std == 1.5
    assert [site.dim for site in release.sites] == [site.dim for site in fitted.sites[:-1]] == [3, 3, 3, 3]
    assert [site.noise_ratio for site in release.sites] == [1.5, 0.75, 0.375, 3.0]
    assert {site.repeats for site in release.sites} == {4}
    assert release.gaussian == (0.5,)


def test_automatic_weights_depend_on_nothing_private() -> None:
    settings = dpulr.HiddenDirection()
    first, second = fit(settings, mlp()), fit(settings, mlp())
    x, y = points().tensors
    parts_of(second, 100 * x, y)
    assert first.weights == second.weights
    assert settings.release(first.forward.sites, 1.0) == settings.release(second.forward.sites, 1.0)
