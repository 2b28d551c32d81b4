"""The `hidden-direction` mechanism: a literal step, the bit that a record keeps, its directions, and that it learns.

Statistical tests have fixed seeds; their false-alarm rates are stated.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr.accounting.small_signal import mean_overlap
from dpulr.errors import InvalidArgument, ModelRefused
from dpulr.mechanisms.base import WITH_MARGIN
from dpulr.randomness import Ahead, Directions, RandomSource, normal_float32
from tests.support.core import LOSS, all_kinds, directions, engine, fit, mlp, points, rounded, total, train


# --- one step, literally --------------------------------------------------------------------------------------------------
def literal_step(
    model: nn.Module,
    dataset: TensorDataset,
    repeats: int,
    radius: float,
    noise: float,
    rate: float,
    seed: int,
    antithetic: bool,
    drawn: Any,
    kappa: float | None = None,
) -> dict:
    """The formula of docs/theory.md, record by record: linear layers perturb outputs, A is the normalised input.

    `drawn` says for how many rows directions are drawn: passes are filled up.
    """
    source = RandomSource(seed)
    coins, draws = source.numpy("batches"), source.numpy("directions")
    rows = coins.choice(len(dataset), coins.binomial(len(dataset), rate), replace=False)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    sizes = [repeats * drawn(len(rows)) * layer.out_features for layer in layers.values()]
    numbers = torch.from_numpy(normal_float32(draws, sum(sizes))).split(sizes)
    for (name, layer), own in zip(layers.items(), numbers, strict=True):
        d = layer.out_features
        z = own.view(repeats, drawn(len(rows)), d)
        z = z / z.norm(dim=2, keepdim=True)
        for i, row in enumerate(rows):
            x, y = dataset[row]
            seen: list[Tensor] = []
            handle = layer.register_forward_hook(lambda m, a, o, seen=seen: seen.append(a[0][0].detach()))
            model(x.unsqueeze(0))
            handle.remove()
            xh = torch.cat([seen[0], torch.ones(1)])
            length = xh.norm()
            xh = xh / length
            u = torch.zeros(d)
            for k in range(repeats):
                difference = loss_moved(model, layer, x, y, radius * math.sqrt(d) * z[k, i])
                other = -radius * math.sqrt(d) * z[k, i] if antithetic else torch.zeros(d)
                difference -= loss_moved(model, layer, x, y, other)
                slope = length * difference / (radius * (2 if antithetic else 1))
                u += (torch.sign(difference) if kappa is None else (slope / kappa).clamp(-1, 1)) * z[k, i] / repeats
            gradient = WITH_MARGIN * torch.outer(u, xh)
            total[f"{name}.weight"] += gradient[:, :-1]
            total[f"{name}.bias"] += gradient[:, -1]
    names = [f"{name}.{part}" for name in layers for part in ("weight", "bias")]
    flat = torch.cat([total[name].flatten() for name in names]).double()
    flat += noise * torch.from_numpy(source.numpy("noise").standard_normal(len(flat)))
    flat = rounded(flat, noise) / (rate * len(dataset))
    parts = torch.split(flat.float(), [total[name].numel() for name in names])
    return {
        name: part.view_as(total[name]) / mean_overlap(layers[name.split(".")[0]].out_features)
        for name, part in zip(names, parts, strict=True)
    }


def loss_moved(model: nn.Module, layer: nn.Module, x: Tensor, y: Tensor, delta: Tensor) -> Tensor:
    handle = layer.register_forward_hook(lambda m, a, o: o + delta)
    with torch.no_grad():
        value = LOSS(model(x.unsqueeze(0)), y.unsqueeze(0))[0]
    handle.remove()
    return value


@pytest.mark.parametrize("kappa", [None, 0.7])
@pytest.mark.parametrize("antithetic", [True, False])
@pytest.mark.parametrize("repeats", [1, 3])
def test_a_step_is_the_literal_step(repeats: int, antithetic: bool, kappa: float | None) -> None:
    model, dataset = mlp(), points()
    settings = dpulr.HiddenDirection(
        repeats=repeats, subspace=None, layer_weights=(1.0, 1.0), radius=0.2, antithetic=antithetic, kappa=kappa
    )
    options: dict[str, Any] = {"batch_size": 20, "steps": 1, "noise_multiplier": 0.7, "insecure_noise_seed": 5}
    private = engine(model, dataset, mechanism=settings, **options)
    drawn = private.fitted.rows.of
    wanted = literal_step(model, dataset, repeats, 0.2, 0.7, 0.5, seed=5, antithetic=antithetic, kappa=kappa, drawn=drawn)
    train(private)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, wanted[name], atol=5e-5), name


# --- the bit --------------------------------------------------------------------------------------------------------------
def test_bits() -> None:
    difference = torch.tensor([[-3.0, 0.0, 1e-9, 2.0, math.nan, math.inf, -math.inf]])
    assert fit(dpulr.HiddenDirection(), mlp()).bit(difference.clone(), None).tolist() == [[-1, 0, 1, 1, 0, 0, 0]]
    clipped = fit(dpulr.HiddenDirection(kappa=4.0), mlp()).bit(difference, torch.tensor(0.25))
    assert clipped[0, [0, 3, 4, 5]].tolist() == [-0.75, 0.5, 0, 0]


@pytest.mark.parametrize("antithetic", [True, False])
def test_a_record_s_signal_depends_on_that_record_alone(antithetic: bool) -> None:
    fitted = fit(dpulr.HiddenDirection(repeats=3, antithetic=antithetic), all_kinds())
    x, y = points(5).tensors
    other = x.clone()
    other[1:] = 10 * other[1:].flip(0)
    signals = []
    with torch.inference_mode():
        public = fitted.draw_public(0)
        for batch in (x, other):
            clean = fitted.forward.passes.clean(batch, y)
            signals.append([signal[0] for signal in fitted.estimates(clean, public, directions(4))])
    for a, b in zip(*signals, strict=True):
        assert torch.equal(a, b)


class Fixed(Directions):
    """Directions given beforehand."""

    def __init__(self, z: Tensor) -> None:
        self.z = z

    def spheres(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        return [self.z.clone().view(shape) if i == 0 else torch.ones(shape) for i, shape in enumerate(shapes)]


def test_each_draw_keeps_its_own_bit() -> None:
    """With K draws the signal is the mean of K signals of one draw: nothing is ranked or normalised across them."""
    x, y = points(7).tensors
    many, one = fit(dpulr.HiddenDirection(repeats=4), mlp()), fit(dpulr.HiddenDirection(repeats=1), mlp())
    z = directions(6).sphere(4, 7, many.sites[0].dim)
    with torch.inference_mode():
        clean = many.forward.passes.clean(x, y)
        together = next(many.estimates(clean, [None, None], Fixed(z)))
        single = [next(one.estimates(clean, [None, None], Fixed(z[k : k + 1]))) for k in range(4)]
    assert torch.allclose(together, torch.stack(single).mean(0), atol=1e-6)


# --- directions -----------------------------------------------------------------------------------------------------------
def test_directions_are_uniform_on_the_sphere_and_fresh() -> None:
    """Squared first coordinates are Beta(1/2, (d-1)/2); Kolmogorov-Smirnov, false alarms 1e-4 for each of 3 dimensions."""
    source = directions(7)
    for d in (2, 5, 50):
        z = source.sphere(4, 2_000, d)
        assert torch.allclose(z.norm(dim=2), torch.ones(4, 2_000), atol=1e-5)
        assert stats.kstest(z[..., 0].square().flatten().numpy(), stats.beta(0.5, (d - 1) / 2).cdf).pvalue > 1e-4
        assert len(torch.unique(z.reshape(-1, d), dim=0)) == 8_000
        assert not torch.equal(z, source.sphere(4, 2_000, d))


@pytest.mark.slow
def test_directions_do_not_outlive_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the numbers drawn, and no view of them."""
    drawn: list[weakref.ref[Any]] = []
    original = Ahead.take

    def watched(self: Ahead, size: int) -> np.ndarray:
        numbers = original(self, size)
        drawn.append(weakref.ref(numbers if numbers.base is None else numbers.base))  # tensors made of it hold it
        return numbers

    monkeypatch.setattr(Ahead, "take", watched)
    private = engine(mlp(), points(), mechanism=dpulr.HiddenDirection(), batch_size=10, steps=2)
    for batch in private.batches():
        private.step(*batch)
        gc.collect()
        assert drawn
        assert all(ref() is None for ref in drawn)
    assert set(private.state_dict()) == {"model", "optimizer", "ledger", "mechanism", "run", "reasons"}


# --- subspaces ------------------------------------------------------------------------------------------------------------
def test_subspaces_are_orthonormal_public_and_fresh() -> None:
    one, other = (fit(dpulr.HiddenDirection(subspace=2), all_kinds(), seed=4) for _ in range(2))
    x, y = points(3).tensors
    bases = []
    for step in range(2):
        drawn = [fitted.draw_public(step) for fitted in (one, other)]
        total(one, x, y, seed=1, public=drawn[0])
        total(other, 2 * x, y, seed=2, public=drawn[1])
        for a, b in zip(*drawn, strict=True):
            assert torch.equal(a, b)  # the same whatever the data and the secret seed
            assert torch.allclose(a.t() @ a, torch.eye(2), atol=1e-5)
        bases.append(drawn[0][0])
    assert not torch.allclose(*bases)


def test_subspace_release_lifts_to_the_gradient_of_the_full_space() -> None:
    """Lifting what was added in the subspace equals adding the lifted signal in the whole space."""
    fitted, whole = (fit(dpulr.HiddenDirection(subspace=m), all_kinds()) for m in (2, None))
    x, y = points(4).tensors
    with torch.inference_mode():
        clean = fitted.forward.passes.clean(x, y)
        for small, full, call, basis in zip(fitted.sites, whole.sites, clean.calls, fitted.draw_public(0), strict=True):
            signal, scale = torch.randn(4, small.dim), torch.rand(4)
            part, other = torch.zeros(small.size), torch.zeros(full.size)
            small.add(call, signal, scale, part)
            full.add(call, small.perturbation(signal.unsqueeze(0), 1.0, basis)[0], scale, other)
            lifted, wanted = ({n: torch.zeros_like(p) for n, p in small.parameters.items()} for _ in range(2))
            small.lift(part, basis, lifted)
            full.lift(other, None, wanted)
            assert small.size < full.size
            for name, gradient in wanted.items():
                assert torch.allclose(lifted[name], gradient, atol=1e-5)


# --- learning -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("antithetic", [True, False])
def test_mean_signal_points_along_the_gradient(antithetic: bool) -> None:
    """The mean of z b is mean_overlap * gradient / |gradient|; 40,000 draws, within 5 standard errors (false alarms 3e-6)."""
    model = mlp()
    draws = 40_000
    fitted = fit(dpulr.HiddenDirection(subspace=None, radius=1e-3, antithetic=antithetic), model)
    x, y = (tensor[:1].repeat(draws, *[1] * (tensor.dim() - 1)) for tensor in points().tensors)
    with torch.inference_mode():
        signal = next(fitted.estimates(fitted.forward.passes.clean(x, y), [None, None], directions(9)))
    hidden = model[0](x[:1]).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(LOSS(model[1:](hidden), y[:1]).sum(), hidden)
    wanted = mean_overlap(5) * gradient[0] / gradient.norm()
    assert float(((signal.mean(0) - wanted) / (signal.std(0) / math.sqrt(draws))).abs().max()) < 5


# --- settings -------------------------------------------------------------------------------------------------------------
def test_one_sided_is_the_default() -> None:
    assert not dpulr.HiddenDirection().antithetic
    assert dpulr.HiddenDirection() == dpulr.mechanisms.by_name("hidden-direction")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 0}, "groups is 0; it must be a whole number of at least 1"),
        ({"antithetic": 1}, "antithetic is 1; it must be True or False"),
        ({"repeats": 0}, "repeats is 0"),
        ({"repeats": 2.5}, "repeats is 2.5"),
        ({"radius": 0.0}, "radius is 0.0"),
        ({"kappa": -1.0}, "kappa is -1.0"),
        ({"last_layer": "none"}, "last_layer is 'none'; it must be 'hidden' or 'exact'"),
        ({"space": "input"}, "space is 'input'"),
        ({"subspace": 0}, "subspace is 0"),
        ({"layer_weights": "equal"}, "layer_weights is 'equal'; it must be 'auto' or a number for each layer"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        dpulr.HiddenDirection(**options)


def test_settings_that_do_not_fit_the_model() -> None:
    with pytest.raises(InvalidArgument, match=r"one each for '0' \(Linear\), '2' \(Linear\)"):
        fit(dpulr.HiddenDirection(layer_weights=(1.0,)), mlp())
    with pytest.raises(InvalidArgument, match="positive"):
        fit(dpulr.HiddenDirection(layer_weights=(1.0, -1.0)), mlp())
    with pytest.raises(ModelRefused, match=r"'3' \(PReLU\) has no output space"):
        fit(dpulr.HiddenDirection(space="output"), all_kinds())
    with pytest.raises(ModelRefused, match=r"'bn' \(BatchNorm1d\) mixes records"):
        fit(dpulr.HiddenDirection(), nn.Sequential(OrderedDict(linear=nn.Linear(6, 3), bn=nn.BatchNorm1d(3))))
