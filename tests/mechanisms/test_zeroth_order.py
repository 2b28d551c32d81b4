"""The `zeroth-order` mechanism against a slow, literal version of it; its bound; where its randomness comes from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr.mechanisms.base import ROUNDING
from dpulr.mechanisms.zeroth_order import BoundZerothOrder
from dpulr.model.prepare import prepare
from dpulr.randomness import RandomSource

LOSS = nn.CrossEntropyLoss(reduction="none")
CPU = torch.device("cpu")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3))


class Branching(nn.Module):
    """Reads values, so that it has to run on one record at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x.relu() if x.sum().item() > 0 else x.tanh())


class Moody(nn.Module):
    """A black box that raises on some records."""

    def forward(self, x: Tensor) -> Tensor:
        if np.abs(x.numpy()).max() > 50:
            raise RuntimeError("out of range")
        return x


def data(records: int = 10) -> TensorDataset:
    torch.manual_seed(3)
    return TensorDataset(torch.randn(records, 5), torch.arange(records) % 3)


def engine_for(model: nn.Module, records: TensorDataset, settings: dpulr.ZerothOrder, **more: Any) -> dpulr.PrivacyEngine:
    options = {"batch_size": 5, "steps": 1, "noise_multiplier": 0.7, "seed": 4} | more
    return dpulr.PrivacyEngine(model, torch.optim.SGD(model.parameters(), lr=1.0), records, LOSS, mechanism=settings, **options)


def literal_gradient(model: nn.Module, records: TensorDataset, settings: dpulr.ZerothOrder, *, rate: float, seed: int) -> Tensor:
    """The step as section 4 of the theory says it, record by record: the flat gradient, with noise 0.7 c."""
    source = RandomSource(seed)
    coins = source.numpy("batches")
    rows = coins.choice(len(records), coins.binomial(len(records), rate), replace=False, shuffle=False)
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    public = torch.Generator().manual_seed(4)
    seeds = torch.randint(2**63 - 1, (settings.repeats,), generator=public).tolist()
    directions = [torch.randn(sum(sizes), generator=torch.Generator().manual_seed(s)) for s in seeds]
    if settings.directions == "sphere":
        directions = [z / z.norm() * math.sqrt(len(z)) for z in directions]

    def loss(row: int, z: Tensor) -> float:
        x, y = records[row]
        with torch.no_grad():
            for p, part in zip(parameters, torch.split(z, sizes), strict=True):
                p += part.view_as(p)
            value = LOSS(model(x.unsqueeze(0)), y.unsqueeze(0)).item()
            for p, part in zip(parameters, torch.split(z, sizes), strict=True):
                p -= part.view_as(p)
        return value

    total = np.zeros(settings.repeats)
    for row in rows:
        r = settings.radius
        slopes = np.array([(loss(row, r * z) - loss(row, -r * z)) / (2 * r) for z in directions])
        total += slopes * min(1, ROUNDING * settings.max_grad_norm / np.linalg.norm(slopes))
    total += 0.7 * settings.max_grad_norm * source.numpy("noise").standard_normal(settings.repeats)
    total /= rate * len(records)
    return sum(s * z for s, z in zip(total, directions, strict=True)) / math.sqrt(settings.repeats * sum(sizes))


@pytest.mark.parametrize("make", [mlp, Branching])
@pytest.mark.parametrize(
    "settings",
    [
        dpulr.ZerothOrder(repeats=3, radius=0.1, max_grad_norm=0.6),
        dpulr.ZerothOrder(repeats=1, radius=0.05, max_grad_norm=100.0, directions="sphere"),
    ],
    ids=["clipped", "sphere"],
)
@pytest.mark.filterwarnings("ignore:running records one by one")
def test_a_step_is_what_the_theory_says(make: Any, settings: dpulr.ZerothOrder) -> None:
    torch.manual_seed(0)
    model, records = make(), data()
    expected = literal_gradient(model, records, settings, rate=0.5, seed=12)
    engine = engine_for(model, records, settings, insecure_noise_seed=12)
    for batch in engine.batches():
        engine.step(*batch)
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)


def bound_for(
    loss_scale: float = 1.0, settings: dpulr.ZerothOrder | None = None, model: nn.Module | None = None
) -> BoundZerothOrder:
    torch.manual_seed(0)
    x, y = data().tensors
    forward = prepare(model or mlp(), lambda output, target: LOSS(output, target) * loss_scale, (x[:1], y[:1]), CPU)
    return (settings or dpulr.ZerothOrder(repeats=4)).bind(forward, memory_limit=None, seed=0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4, 1e30])
def test_no_record_exceeds_the_bound(scale: float) -> None:
    bound = bound_for(scale, dpulr.ZerothOrder(repeats=4, max_grad_norm=0.3))
    x, y = data().tensors
    with torch.inference_mode():
        norms = [bound.total(x[i : i + 1], y[i : i + 1], RandomSource(1).directions(CPU)).norm().item() for i in range(len(x))]
    assert max(norms) <= 0.3
    assert scale != 1e4 or min(norms) > 0.2999  # what is too long is scaled, not dropped
    assert scale != 1e-3 or max(norms) < 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_adds_nothing(bad: float) -> None:
    x, y = data(3).tensors
    x[1, 2] = bad
    with torch.inference_mode():
        totals = [bound_for().total(x[rows], y[rows], RandomSource(1).directions(CPU)) for rows in ([0, 1, 2], [0, 2], [1])]
    if math.isnan(bad):
        torch.testing.assert_close(totals[0], totals[1])
        assert not totals[2].any()
    else:  # tanh makes something finite of it, which is clipped like anything else
        assert (totals[0] - totals[1]).norm() <= 1
        assert totals[2].norm() <= 1


def test_a_record_that_raises_adds_nothing_and_is_not_named() -> None:
    model = nn.Sequential(nn.Linear(5, 4), Moody(), nn.Linear(4, 3))
    x, y = data(3).tensors
    x[1] *= 1e4
    with torch.inference_mode():
        totals = [bound_for(model=model).total(x[rows], y[rows], RandomSource(1).directions(CPU)) for rows in ([0, 1, 2], [0, 2])]
    torch.testing.assert_close(*totals, rtol=1e-3, atol=1e-4)  # differences of losses amplify rounding
    assert totals[0].any()


def test_epsilon_is_that_of_the_gaussian_mechanism_whatever_the_repeats() -> None:
    for repeats in (1, 50):
        engine = engine_for(mlp(), data(), dpulr.ZerothOrder(repeats=repeats), noise_multiplier=3.0, steps=4)
        for batch in engine.batches():
            engine.step(*batch)
        spent = engine.privacy_spent()
        assert spent.guarantee == "certified"
        expected = dpulr.accounting.gaussian_epsilon(noise_multiplier=3.0, sample_rate=0.5, steps=4, delta=1e-5)
        assert spent.epsilon == expected


def test_noise_does_not_come_from_the_public_seed() -> None:
    """Two engines with the same seed share directions and start; only the secret noise makes their first steps differ."""
    grads = []
    for _ in range(2):
        torch.manual_seed(0)
        model = mlp()
        engine = engine_for(model, data(), dpulr.ZerothOrder(repeats=2), expected_batch_size=1.0, sample_rate=1.0, batch_size=None)
        for batch in engine.batches():
            engine.step(*batch)
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    z = torch.stack([torch.cat([part.flatten() for part in engine.bound.direction(s).values()]) for s in engine.bound._seeds])
    difference = grads[0] - grads[1]
    assert difference.norm() > 1e-3
    inside = torch.linalg.lstsq(z.t(), difference.unsqueeze(1)).solution
    torch.testing.assert_close(z.t() @ inside, difference.unsqueeze(1), rtol=1e-4, atol=1e-5)  # same public directions


def test_the_model_keeps_its_weights_while_a_step_looks_around() -> None:
    bound = bound_for()
    before = [p.detach().clone() for p in bound.forward.model.parameters()]
    x, y = data().tensors
    with torch.inference_mode():
        bound.total(x, y, RandomSource(1).directions(CPU))
    assert all(torch.equal(a, b) for a, b in zip(before, bound.forward.model.parameters(), strict=True))


def test_it_learns() -> None:
    """Three well separated classes; the seed is fixed, and 0.9 lies far below what a run reaches."""
    torch.manual_seed(1)
    y = torch.arange(600) % 3
    records = TensorDataset(torch.randn(600, 5) * 0.3 + 2 * torch.eye(3, 5)[y], y)
    model = nn.Sequential(nn.Linear(5, 3))
    engine = dpulr.PrivacyEngine(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        records,
        LOSS,
        mechanism="zeroth-order",
        batch_size=200,
        steps=80,
        noise_multiplier=1.0,
        insecure_noise_seed=3,
    )
    for batch in engine.batches():
        engine.step(*batch)
    assert dpulr.evaluate(model, records) > 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats is 0; it must be a whole number"),
        ({"radius": -1.0}, "radius is -1.0; it must be a positive number"),
        ({"max_grad_norm": math.nan}, "max_grad_norm is nan"),
        ({"directions": "cube"}, "directions is 'cube'; it must be 'normal' or 'sphere'"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dpulr.ZerothOrder(**options)
