"""The `zeroth-order` mechanism against a slow, literal version of it; its bound; its cost; where its randomness comes from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr import accounting
from dpulr.errors import InvalidArgument
from dpulr.mechanisms.zeroth_order import _WITH_MARGIN as WITH_MARGIN
from dpulr.mechanisms.zeroth_order import FittedZerothOrder
from dpulr.randomness import RandomSource
from tests.support.core import LOSS, accuracy, engine, fit, gradient, normed_mlp, points, rounded, total, train


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


def engine_for(model: nn.Module, records: TensorDataset, settings: dpulr.ZerothOrder, **more: Any) -> dpulr.PrivacyEngine:
    options = {"batch_size": 5, "steps": 1, "noise_multiplier": 0.7, "seed": 4} | more
    return engine(model, records, learning_rate=1.0, mechanism=settings, **options)


def fitted_to(
    model: nn.Module | None = None, settings: dpulr.ZerothOrder | None = None, loss_scale: float = 1.0
) -> FittedZerothOrder:
    example = (torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64))
    model = normed_mlp() if model is None else model
    return fit(settings or dpulr.ZerothOrder(repeats=4), model, example, loss_fn=lambda out, y: LOSS(out, y) * loss_scale)


# --- one step, literally --------------------------------------------------------------------------------------------------
def literal_gradient(model: nn.Module, records: TensorDataset, settings: dpulr.ZerothOrder, *, rate: float, seed: int) -> Tensor:
    """The step as section 4 of the theory says it, record by record: the flat gradient, with noise 0.7 c."""
    source = RandomSource(seed)
    coins = source.numpy("batches")
    rows = coins.choice(len(records), coins.binomial(len(records), rate), replace=False)
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
        total += slopes * min(1, WITH_MARGIN * settings.max_grad_norm / np.linalg.norm(slopes))
    total += 0.7 * settings.max_grad_norm * source.numpy("noise").standard_normal(settings.repeats)
    total = rounded(total, 0.7 * settings.max_grad_norm) / (rate * len(records))
    return sum(s * z for s, z in zip(total, directions, strict=True)) / math.sqrt(settings.repeats * sum(sizes))


@pytest.mark.parametrize("make", [normed_mlp, Branching])
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
    model, records = make(), points(10, 5)
    expected = literal_gradient(model, records, settings, rate=0.5, seed=12)
    train(engine_for(model, records, settings, insecure_noise_seed=12))
    torch.testing.assert_close(gradient(model), expected.float(), rtol=1e-4, atol=1e-4)


# --- a record's bound -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4, 1e30])
def test_no_record_exceeds_the_bound(scale: float) -> None:
    fitted = fitted_to(settings=dpulr.ZerothOrder(repeats=4, max_grad_norm=0.3), loss_scale=scale)
    x, y = points(10, 5).tensors
    norms = [total(fitted, x[i : i + 1], y[i : i + 1]).norm().item() for i in range(len(x))]
    assert max(norms) <= 0.3
    assert scale != 1e4 or min(norms) > 0.2996  # what is too long is scaled, not dropped
    assert scale != 1e-3 or max(norms) < 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_adds_nothing(bad: float) -> None:
    x, y = points(3, 5).tensors
    x[1, 2] = bad
    everyone, others, alone = (total(fitted_to(), x[rows], y[rows]) for rows in ([0, 1, 2], [0, 2], [1]))
    if math.isnan(bad):
        torch.testing.assert_close(everyone, others)
        assert not alone.any()
    else:  # tanh makes something finite of it, which is clipped like anything else
        assert (everyone - others).norm() <= 1
        assert alone.norm() <= 1


def test_a_record_that_raises_adds_nothing_and_is_not_named() -> None:
    model = nn.Sequential(nn.Linear(5, 4), Moody(), nn.Linear(4, 3))
    x, y = points(3, 5).tensors
    x[1] *= 1e4
    everyone, others = (total(fitted_to(model), x[rows], y[rows]) for rows in ([0, 1, 2], [0, 2]))
    torch.testing.assert_close(everyone, others, rtol=1e-3, atol=1e-4)  # differences of losses amplify rounding
    assert everyone.any()


# --- what it costs --------------------------------------------------------------------------------------------------------
def test_epsilon_is_that_of_the_gaussian_mechanism_whatever_the_repeats() -> None:
    for repeats in (1, 50):
        settings = dpulr.ZerothOrder(repeats=repeats)
        private = engine_for(normed_mlp(), points(10, 5), settings, noise_multiplier=3.0, steps=4)
        train(private)
        spent = private.privacy_spent()
        assert spent.guarantee == "certified"
        ideal = accounting.gaussian_epsilon(noise_multiplier=3.0, sample_rate=0.5, steps=4, delta=1e-5)
        assert ideal < spent.epsilon < 1.0001 * ideal  # the rounding of so few numbers costs hardly anything


def test_the_statement_names_the_mechanism_that_ran() -> None:
    private = engine_for(normed_mlp(), points(10, 5), dpulr.ZerothOrder(repeats=2), steps=2)
    train(private)
    spent = private.privacy_spent()
    assert spent.mechanism == "zeroth-order"
    assert "after 2 steps of the zeroth-order mechanism" in str(spent)
    assert "gaussian" not in str(spent)


def test_noise_does_not_come_from_the_public_seed() -> None:
    """Two engines with the same seed share directions and start; only the secret noise makes their first steps differ."""
    grads, seeds = [], []
    for _ in range(2):
        model = normed_mlp()
        options = {"expected_batch_size": 1.0, "sample_rate": 1.0, "batch_size": None}
        private = engine_for(model, points(10, 5), dpulr.ZerothOrder(repeats=2), **options)
        private.on_release(lambda released: seeds.append(released.public))
        train(private)
        grads.append(gradient(model))
    assert seeds[0] == seeds[1]
    z = torch.stack([torch.cat([part.flatten() for part in private.fitted.direction(s).values()]) for s in seeds[0]])
    difference = grads[0] - grads[1]
    assert difference.norm() > 1e-3
    inside = torch.linalg.lstsq(z.t(), difference.unsqueeze(1)).solution
    torch.testing.assert_close(z.t() @ inside, difference.unsqueeze(1), rtol=1e-4, atol=1e-5)  # same public directions


# --- training -------------------------------------------------------------------------------------------------------------
def test_the_model_keeps_its_weights_while_a_step_looks_around() -> None:
    fitted = fitted_to()
    before = [p.detach().clone() for p in fitted.forward.model.parameters()]
    total(fitted, *points(10, 5).tensors)
    assert all(torch.equal(a, b) for a, b in zip(before, fitted.forward.model.parameters(), strict=True))


def test_it_learns() -> None:
    """Three well separated classes; the seed is fixed, and 0.9 lies far below what a run reaches."""
    torch.manual_seed(1)
    y = torch.arange(600) % 3
    records = TensorDataset(torch.randn(600, 5) * 0.3 + 2 * torch.eye(3, 5)[y], y)
    model = nn.Sequential(nn.Linear(5, 3))
    settings: dict[str, Any] = {"batch_size": 200, "steps": 80, "noise_multiplier": 1.0, "insecure_noise_seed": 3}
    train(engine(model, records, learning_rate=1.0, mechanism="zeroth-order", **settings))
    assert accuracy(model, records) > 0.9


# --- settings -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats is 0; it must be a whole number"),
        ({"radius": -1.0}, "radius is -1.0; it must be a finite number of at least 0.0005"),
        ({"max_grad_norm": math.nan}, "max_grad_norm is nan"),
        ({"directions": "cube"}, "directions is 'cube'; it must be 'normal' or 'sphere'"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        dpulr.ZerothOrder(**options)
