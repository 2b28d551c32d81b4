"""Scales of layers: soft bits in proportion to the gradient, votes, and what they cost."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpulr
from dpulr import accounting
from dpulr.accounting.events import Charge, SampledStep
from dpulr.accounting.small_signal import hidden_direction_noise
from dpulr.errors import InvalidArgument
from dpulr.mechanisms.scales import Scales, typical
from dpulr.model.prepare import prepare
from tests.support.core import CPU, LOSS, engine, fit, mlp, parts_of, points, total, train

ADAPTIVE = dpulr.HiddenDirection(kappa="adaptive", quantile=0.8, subspace=None, repeats=2)


# --- in proportion to the gradient ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("groups", [None, 1])
@pytest.mark.parametrize("space", ["output", "weight"])
def test_the_estimate_is_the_gradient_where_nothing_is_clipped(space: Any, groups: int | None) -> None:
    """C / (kappa sqrt(d)) times the sum of gradients, in length and direction; each layer's share of a joint direction included.

    d is at most 47: the error of 3,000 directions is about sqrt(47 / 3,000) = 0.13 of the gradient of a record.
    """
    model, (x, y) = mlp().double(), points(3).tensors
    kappa, radius = 1e3, 1e-4
    settings = dpulr.HiddenDirection(
        kappa=kappa, radius=radius, subspace=None, space=space, groups=groups, repeats=3_000, antithetic=True
    )
    fitted = fit(settings, model, (torch.zeros(1, 6).double(), torch.zeros(1, dtype=torch.int64)))
    parts = parts_of(fitted, x.double(), y)
    LOSS(model(x.double()), y).sum().backward()
    for site, part, group in zip(fitted.sites, parts, [0, 0] if groups else [0, 1], strict=True):
        wanted = torch.cat([parameter.grad.flatten() for parameter in site.parameters.values()])
        factor = fitted.weights[group] / (kappa * math.sqrt(fitted.layout.dims[group]))
        assert torch.linalg.vector_norm(part / factor - wanted) < 0.25 * torch.linalg.vector_norm(wanted), site.label


def test_squared_and_absolute_error_teach_differently() -> None:
    """What a sign can't tell apart."""
    model, (x, _) = nn.Linear(6, 1), points(8).tensors
    example = (torch.zeros(1, 6), torch.zeros(1, 1))
    targets = torch.linspace(1, 9, 8).unsqueeze(1)

    def sum_of(loss: Any, **settings: Any) -> Tensor:
        return total(fit(dpulr.HiddenDirection(**settings), model, example, loss_fn=loss), x, targets)

    def squares(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square()[:, 0]

    def absolutes(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).abs()[:, 0]

    assert torch.equal(sum_of(squares), sum_of(absolutes))
    assert not torch.allclose(sum_of(squares, kappa="auto"), sum_of(absolutes, kappa="auto"), rtol=0.1)


# --- scales from synthetic records ----------------------------------------------------------------------------------------
def test_automatic_scales_depend_on_nothing_private() -> None:
    """Neither on the records nor on the secret randomness: two engines on other data have the same ones."""
    engines = [engine(mlp(), points(n), mechanism=dpulr.HiddenDirection(kappa="auto"), batch_size=10) for n in (40, 400)]
    first, second = (private.fitted.state()["scales"] for private in engines)
    assert first == second
    assert len(first) == 2


def test_a_flat_loss_has_a_scale_all_the_same() -> None:
    assert typical([torch.tensor([[0.0, 0.0], [1.0, 3.0], [math.nan, 2.0]])], 0.5).tolist() == [1.0, 2.0, 2.0]


# --- votes ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "mechanism",
    [
        ADAPTIVE,
        dpulr.HiddenDirection(kappa="adaptive", groups=1),
        dpulr.HiddenDirection(kappa="adaptive", last_layer="exact"),
        dpulr.Gradient(max_grad_norm="adaptive"),
        dpulr.Gradient(max_grad_norm="adaptive", clipping="per-layer"),
    ],
)
def test_votes_are_whole_whatever_a_record_is_like(mechanism: Any) -> None:
    """Plus or minus one vote per scale, never nothing: the price is proved for these."""
    fitted = fit(mechanism, mlp())
    scales = fitted.scales
    assert scales.votes == len(scales.values) == fitted.part_sizes[-1]
    for size in (0.0, 1e-20, 1.0, 1e20):
        votes = parts_of(fitted, torch.full((1, 6), size), torch.tensor([1]))[-1]
        assert (votes.abs() / scales.vote).tolist() == pytest.approx([1] * scales.votes)
    for value, sign in ((1e29, 1), (2e-30, -1)):
        scales.load([value] * scales.votes)
        votes = parts_of(fitted, torch.ones(5, 6), torch.tensor([0, 1, 2, 0, 1]))[-1]
        assert (votes / scales.vote).tolist() == pytest.approx([5 * sign] * scales.votes)


@pytest.mark.parametrize("mechanism", [ADAPTIVE, dpulr.Gradient(max_grad_norm="adaptive", quantile=0.8)])
def test_scales_find_the_quantile(mechanism: Any) -> None:
    """Steps with little noise at a rate of 0: the model stands still, and 80 % of the records come to lie below the scales."""
    data, private = points(400), None
    private = engine(mlp(), data, mechanism=mechanism, batch_size=400, steps=120, noise_multiplier=1e-3, insecure_noise_seed=1)
    for group in private.optimizer.param_groups:
        group["lr"] = 0.0
    train(private)
    fitted = private.fitted
    shares = (parts_of(fitted, *data.tensors)[-1] / (fitted.scales.vote * 400) + 1) / 2
    assert torch.allclose(shares, torch.full_like(shares, 0.8), atol=0.06)  # a share of 400 directions has a deviation of 0.02


def test_a_run_goes_on_with_its_scales() -> None:
    private = engine(mlp(), points(), mechanism=ADAPTIVE, steps=4)
    before = private.fitted.state()
    train(private)
    state = private.state_dict()
    assert state["mechanism"]["scales"] != before["scales"]
    again = engine(mlp(), points(), mechanism=ADAPTIVE, steps=8)
    again.load_state_dict(state)
    assert again.fitted.state()["scales"] == pytest.approx(state["mechanism"]["scales"])
    with pytest.raises(InvalidArgument, match="2 positive numbers"):
        again.fitted.load_state({"scales": [1.0, -1.0]})


# --- the price ------------------------------------------------------------------------------------------------------------
def epsilon(release: Any) -> float:
    return accounting.epsilon([Charge(SampledStep(release, 0.01), 100)], 1e-5)


def test_votes_are_in_the_price() -> None:
    """A part of the product, worth 1 % of the rest; without them the price is that of signs."""
    sites = prepare(mlp(), LOSS, (torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64)), CPU).sites
    plain, fixed, moving = (dpulr.HiddenDirection(kappa=kappa).release(sites, 0.8) for kappa in (None, "auto", "adaptive"))
    assert fixed == plain
    assert moving.sites == plain.sites
    (noise,) = moving.gaussian
    assert noise == pytest.approx(10 * hidden_direction_noise(plain))
    assert moving.numbers == plain.numbers + 2
    assert epsilon(plain) < epsilon(moving) < 1.02 * epsilon(plain)
    ours, theirs = (dpulr.Gradient(max_grad_norm=norm).release(sites, 0.8) for norm in ("adaptive", 1.0))
    assert ours.noise_multiplier == pytest.approx(0.8 / math.sqrt(1.01))
    assert epsilon(theirs) < epsilon(ours) < 1.02 * epsilon(theirs)


def test_the_vote_is_what_the_price_says() -> None:
    scales = Scales(torch.ones(4), quantile=0.5, noise_std=0.8, noise_multiplier=25.0, batch=10)
    assert 0.995 < scales.vote * math.sqrt(4) / (0.8 / 25.0) < 1


def test_a_vote_that_knows_the_direction_costs_no_more() -> None:
    """The statement of docs/theory.md, section 10, by quadrature: directions on a circle, random bits, a random vote.

    With the same bits, both hockey-sticks are at most those of a vote that is always the same.
    """
    angles = np.arange(24) * 2 * np.pi / 24
    z, grid, t, s, vote = np.stack([np.cos(angles), np.sin(angles)]), np.linspace(-6, 6, 41), 0.6, 0.9, 0.8
    w = np.stack(np.meshgrid(grid, grid, indexing="ij")).reshape(2, -1)
    mass = np.exp(-(w**2).sum(0) / 2)[:, None] * np.exp(-(grid**2) / 2)[None, :]  # in units of the noise
    mass /= mass.sum()
    rng = np.random.default_rng(3)

    def sticks(bits: np.ndarray, votes: np.ndarray) -> np.ndarray:
        signals = np.exp((bits * z).T @ w / t - 0.5 / t**2)
        heard = np.exp(np.outer(votes, grid) * vote / s - 0.5 * (vote / s) ** 2)
        ratio = np.einsum("kw,kv->wv", signals, heard) / len(angles)
        ratio /= (ratio * mass).sum()
        return np.array([[(mass * stick).sum() for stick in _sticks(ratio, a)] for a in (0.5, 1.0, 2.0, 5.0)])

    def _sticks(ratio: np.ndarray, a: float) -> tuple[np.ndarray, np.ndarray]:
        return np.maximum(ratio - a, 0), np.maximum(1 - a * ratio, 0)

    for _ in range(20):
        bits, votes = rng.choice([-1.0, 1.0], 24), rng.choice([-1.0, 1.0], 24)
        assert np.all(sticks(bits, votes) <= sticks(bits, np.ones(24)) + 1e-6)


# --- what can't be ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dpulr.HiddenDirection(kappa="automatic"), "kappa is 'automatic'"),
        (lambda: dpulr.HiddenDirection(kappa="adaptive", quantile=1.0), "quantile is 1.0"),
        (lambda: dpulr.Gradient(max_grad_norm="auto"), "max_grad_norm is 'auto'"),
        (lambda: dpulr.Gradient(max_grad_norm="adaptive", clipping="normalised"), "nothing for max_grad_norm='adaptive'"),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make()


@pytest.mark.parametrize(("kappa", "last_layer"), list(product(["auto", "adaptive"], ["hidden", "exact"])))
def test_no_noise_is_no_obstacle(kappa: Any, last_layer: Any) -> None:
    private = engine(
        mlp(), points(), mechanism=dpulr.HiddenDirection(kappa=kappa, last_layer=last_layer), noise_multiplier=0.0, steps=2
    )
    assert train(private) == 2
