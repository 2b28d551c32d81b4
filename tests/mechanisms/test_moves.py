"""radius="auto": how far hidden directions reach, from synthetic records."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpulr
from dpulr.errors import InvalidArgument
from dpulr.model.prepare import prepare
from tests.support.core import CPU, LOSS, engine, fit, points, train

IMAGES = (torch.zeros(1, 1, 28, 28), torch.zeros(1, dtype=torch.int64))


class Signs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sign(x)


def radius(model: nn.Module, example: Any = IMAGES, **settings: Any) -> Any:
    forward = prepare(model, LOSS, example, CPU, again=True)
    return dpulr.HiddenDirection(radius="auto", **settings).settled(forward).radius


def test_a_smooth_model_keeps_the_usual_radius() -> None:
    assert radius(dpulr.models.mlp(seed=0)) == dpulr.HiddenDirection().radius


@pytest.mark.parametrize(("threshold", "expected"), [(0.1, (0.1, 0.32)), (1.0, (0.32, 1.0)), (10.0, (3.2, 10.0))])
def test_it_follows_the_threshold_of_spikes(threshold: float, expected: tuple[float, ...]) -> None:
    found = radius(dpulr.models.spiking(seed=0, threshold=threshold))
    first, last = found if isinstance(found, tuple) else (found, found)
    assert first in expected
    assert last == dpulr.HiddenDirection().radius  # nothing steps behind it


def test_it_follows_the_size_of_what_a_sign_sees() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), Signs(), nn.Linear(40, 3))
    example = (torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64))
    usual = radius(model, example)
    assert usual[0] > usual[1]
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter *= 30
    wide = radius(model, example)
    assert wide[0] >= 3 * usual[0]
    assert wide[1] == usual[1]


def test_it_is_a_number_before_the_first_step_and_nothing_private_decides_it() -> None:
    found = set()
    for scale in (1.0, 100.0):
        data = points(600)
        data.tensors[0].mul_(scale)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 20), Signs(), nn.Linear(20, 3))
        private = engine(model, data, mechanism=dpulr.HiddenDirection(radius="auto", exact="auto"), steps=1)
        assert train(private) == 1
        found.add(private.mechanism.radius)
    assert len(found) == 1
    assert isinstance(found.pop(), float)


def test_all_layers_exact_leave_nothing_to_look_for() -> None:
    assert radius(nn.Sequential(nn.Flatten(), nn.Linear(784, 3)), exact="auto") == dpulr.HiddenDirection().radius


def test_bad_radii() -> None:
    for bad in (0, -1.0, "wide", (0.1, 0.0)):
        with pytest.raises(InvalidArgument, match="radius"):
            dpulr.HiddenDirection(radius=bad)
    with pytest.raises(InvalidArgument, match="call settled"):
        dpulr.HiddenDirection(radius="auto").distances(1)


def test_each_layer_is_moved_by_its_own_radius() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    example = (torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64))
    fitted = fit(dpulr.HiddenDirection(radius=[0.5, 2.0], subspace=None), model, example)
    clean = fitted.forward.clean(torch.randn(5, 6), torch.zeros(5, dtype=torch.int64))[0]
    public = fitted.draw_public(0)
    for g, (radius, dim) in enumerate(((0.5, 4), (2.0, 3))):
        z = torch.nn.functional.normalize(torch.randn(1, 5, dim), dim=2)
        moved = fitted.move(clean, g, z, public).moved - clean.calls[g].output
        torch.testing.assert_close(moved.view(1, 5, dim), radius * dim**0.5 * z)
    with pytest.raises(InvalidArgument, match="radius must be a number, or 2"):
        fit(dpulr.HiddenDirection(radius=(0.1,)), model, example)
