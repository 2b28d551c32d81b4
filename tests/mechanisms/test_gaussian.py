"""The `gaussian` mechanism against a slow, literal version of it, and its estimators against the smoothed gradient.

Statistical tests have fixed seeds; their false-alarm rates are stated.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm as normal
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

import dpulr
from dpulr.errors import InvalidArgument
from dpulr.mechanisms.base import WITH_MARGIN
from dpulr.mechanisms.gaussian import FittedGaussian
from dpulr.randomness import RandomSource, normal_float32
from tests.support.core import LOSS, directions, engine, fit, normed_mlp, points, rounded, total, train

ESTIMATORS = ("likelihood-ratio", "baseline", "antithetic")


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 2), nn.GroupNorm(1, 2), nn.PReLU(2), nn.Flatten(), nn.Linear(8, 3, bias=False)
    )


# --- one step, literally --------------------------------------------------------------------------------------------------
def literal_gradient(
    model: nn.Module, data: TensorDataset, settings: dpulr.Gaussian, rate: float, noise: float, seed: int, drawn: Any
) -> dict:
    """A step as the documentation says it, record by record and draw by draw, with autograd for the layers' Jacobians.

    `drawn` says for how many rows directions are drawn: passes are filled up.
    """
    source = RandomSource(seed)
    coins, draws = source.numpy("batches"), source.numpy("directions")
    rows = coins.choice(len(data), coins.binomial(len(data), rate), replace=False)
    layers = {n: m for n, m in model.named_modules() if any(p.requires_grad for p in m.parameters(recurse=False))}
    estimates: list[dict[str, Tensor]] = [{} for _ in rows]
    for name, layer in layers.items():
        shape = output_of(model, layer, data[0][0]).shape[1:]
        count = sum(p.numel() for p in layer.parameters())
        outputs = settings.space == "output" or (
            settings.space == "auto" and not isinstance(layer, nn.PReLU) and shape.numel() <= count
        )
        dim = shape.numel() if outputs else count
        shape = (settings.repeats, drawn(len(rows)), dim)
        z = torch.from_numpy(normal_float32(draws, math.prod(shape))).view(shape)
        for i, row in enumerate(rows):
            x, y = data[row]
            signal = torch.zeros(z.shape[2])
            for k in range(settings.repeats):
                plus = loss_at(model, layer, x, y, settings.sigma * z[k, i], outputs=outputs)
                if settings.estimator == "antithetic":
                    minus = loss_at(model, layer, x, y, -settings.sigma * z[k, i], outputs=outputs)
                    signal += z[k, i] * (plus - minus) / (2 * settings.sigma * settings.repeats)
                else:
                    clean = loss_at(model, layer, x, y, 0 * z[k, i], outputs=outputs) if settings.estimator == "baseline" else 0
                    signal += z[k, i] * (plus - clean) / (settings.sigma * settings.repeats)
            estimates[i] |= gradients(model, name, layer, x, signal, outputs=outputs)
    total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for estimate in estimates:
        groups = (
            [list(estimate)] if settings.clipping == "joint" else [[n for n in estimate if n.startswith(f"{k}.")] for k in layers]
        )
        bound = settings.max_grad_norm / math.sqrt(len(groups))
        for names in groups:
            size = math.sqrt(sum(float(estimate[n].square().sum()) for n in names))
            for n in names:
                total[n] += estimate[n] * min(1, WITH_MARGIN * bound / size)
    flat = torch.cat([part.flatten() for part in total.values()]).double()
    flat += noise * settings.max_grad_norm * torch.from_numpy(source.numpy("noise").standard_normal(len(flat)))
    flat = rounded(flat, noise * settings.max_grad_norm)
    parts = torch.split(flat / (rate * len(data)), [p.numel() for p in total.values()])
    return {n: part.view_as(total[n]).float() for n, part in zip(total, parts, strict=True)}


def output_of(model: nn.Module, layer: nn.Module, x: Tensor) -> Tensor:
    seen = []
    hook = layer.register_forward_hook(lambda m, a, out: seen.append(out))
    model(x.unsqueeze(0))
    hook.remove()
    return seen[0]


def loss_at(model: nn.Module, layer: nn.Module, x: Tensor, y: Tensor, delta: Tensor, *, outputs: bool) -> Tensor:
    with torch.no_grad():
        if outputs:
            hook = layer.register_forward_hook(lambda m, a, out: out + delta.view_as(out))
            loss = LOSS(model(x.unsqueeze(0)), y.unsqueeze(0))[0]
            hook.remove()
            return loss
        parts = torch.split(delta, [p.numel() for p in layer.parameters()])
        moved = {n: p + d.view_as(p) for (n, p), d in zip(layer.named_parameters(), parts, strict=True)}
        hook = layer.register_forward_hook(lambda m, a, out: type(m).forward(_With(m, moved), *a))
        loss = LOSS(model(x.unsqueeze(0)), y.unsqueeze(0))[0]
        hook.remove()
        return loss


class _With:
    """A module with some attributes replaced."""

    def __init__(self, module: nn.Module, attributes: dict[str, Tensor]) -> None:
        self._module, self._attributes = module, attributes

    def __getattr__(self, name: str) -> Any:
        if name in self._attributes:
            return self._attributes[name]
        value = getattr(self._module, name)
        return value if not callable(value) or not hasattr(value, "__func__") else value.__func__.__get__(self)


def gradients(model: nn.Module, name: str, layer: nn.Module, x: Tensor, signal: Tensor, *, outputs: bool) -> dict[str, Tensor]:
    parameters = dict(layer.named_parameters())
    if outputs:
        out = output_of(model, layer, x)
        parts = torch.autograd.grad(out, list(parameters.values()), signal.view_as(out))
    else:
        parts = torch.split(signal, [p.numel() for p in parameters.values()])
    return {f"{name}.{n}": part.view_as(p).detach() for (n, p), part in zip(parameters.items(), parts, strict=True)}


@pytest.mark.parametrize("make", [normed_mlp, convolutions])
@pytest.mark.parametrize(
    "settings",
    [
        *[dpulr.Gaussian(repeats=3, estimator=e, max_grad_norm=0.8) for e in ESTIMATORS],
        dpulr.Gaussian(repeats=2, clipping="per-layer", max_grad_norm=0.5),
        dpulr.Gaussian(repeats=2, space="weight", sigma=0.3),
        dpulr.Gaussian(repeats=2, max_grad_norm=1e4),
    ],
    ids=lambda s: f"{s.estimator} {s.clipping} {s.space} {s.max_grad_norm}",
)
def test_a_step_is_what_the_documentation_says(make: Any, settings: dpulr.Gaussian) -> None:
    torch.manual_seed(0)
    model, data = make(), points(30, 5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    private = engine(
        model,
        data,
        learning_rate=1.0,
        mechanism=settings,
        batch_size=15,
        steps=1,
        noise_multiplier=0.7,
        insecure_noise_seed=12,
    )
    expected = literal_gradient(model, data, settings, rate=0.5, noise=0.7, seed=12, drawn=private.fitted.rows.of)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(private)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-4 * min(settings.max_grad_norm, 10))
        torch.testing.assert_close(parameter.detach(), before[name] - parameter.grad)


# --- estimators -----------------------------------------------------------------------------------------------------------
SIGMA = 0.8


def tiny() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 2)).double()


def estimates(estimator: Any, space: Any, site: int, copies: int, sigma: float = SIGMA) -> tuple[FittedGaussian, Tensor]:
    """Many independent estimates of one record's gradient: as many copies of the record in one batch."""
    model = tiny()
    with torch.no_grad():
        model[2].weight *= 4
    x, y = torch.full((1, 1), 0.7).double(), torch.zeros(1, dtype=torch.int64)
    fitted = fit(dpulr.Gaussian(repeats=1, estimator=estimator, sigma=sigma, space=space), model, (x, y), memory_limit=2**30)
    with torch.inference_mode():
        clean = fitted.forward.passes.clean(x.repeat(copies, 1), y.repeat(copies))
        return fitted, fitted.estimate(clean, site, None, directions(5, torch.float64))


def smoothed(fitted: FittedGaussian, index: int) -> tuple[Tensor, Tensor]:
    """Gradient of E_z loss(site + sigma z), by autograd under a product of Gauss-Hermite rules; and the plain gradient."""
    site, model = fitted.forward.sites[index], fitted.forward.model
    nodes, weights = np.polynomial.hermite_e.hermegauss(14 if site.dim <= 2 else 7)
    grid = torch.cartesian_prod(*[torch.tensor(nodes)] * site.dim)
    weight = torch.cartesian_prod(*[torch.tensor(weights / weights.sum())] * site.dim).prod(1)
    x, y = torch.full((1, 1), 0.7).double(), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        call = fitted.forward.passes.clean(x, y).calls[index]

    def loss(delta: Tensor) -> Tensor:
        if site.space == "output":
            tail = model[2 * index + 1 :] if index == 0 else nn.Identity()
            return LOSS(tail(call.output + delta.unsqueeze(0)), y)[0]
        moved = {n: p.detach() + d for (n, p), d in zip(site.parameters.items(), site.rule.split(delta).values(), strict=True)}
        names = {f"{site.name}.{n}": value for n, value in moved.items()}
        return LOSS(functional_call(model, names, (x,)), y)[0]

    gradient = torch.func.vmap(torch.func.grad(loss))
    return (weight.unsqueeze(1) * gradient(SIGMA * grid)).sum(0), gradient(torch.zeros(1, site.dim).double())[0]


@pytest.mark.parametrize("site", [0, 1])
@pytest.mark.parametrize("space", ["output", "weight"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_mean_is_the_gradient_of_the_smoothed_loss(estimator: str, space: str, site: int) -> None:
    """z-scores of 60,000 estimates; false-alarm rate 1e-6 over all coordinates. Far from the gradient without smoothing."""
    fitted, found = estimates(estimator, space, site, 60_000)
    error = found.std(0) / len(found) ** 0.5
    expected, plain = smoothed(fitted, site)
    assert ((found.mean(0) - expected) / error).abs().max() < normal.isf(5e-7 / len(expected))
    if estimator == "antithetic" and site == 0:  # where the loss is far from a plane
        assert ((found.mean(0) - plain) / error).abs().max() > 10


@pytest.mark.parametrize("space", ["output", "weight"])
def test_variances_rank_as_theory_says(space: str) -> None:
    """Taking off the clean loss helps, both signs help more (what is even in z drops out)."""
    paper, baseline, antithetic = (estimates(e, space, 0, 100_000)[1].var(0).sum() for e in ESTIMATORS)
    assert paper > 1.05 * baseline
    assert baseline > 1.05 * antithetic
    small = [estimates(e, space, 0, 20_000, sigma=0.05)[1].var(0).sum() for e in ESTIMATORS]
    assert small[0] > 50 * small[1]  # the paper's grows like 1 / sigma^2


def test_chunks_of_repeats_and_records_change_nothing() -> None:
    """The same draws, whatever the memory limit splits."""
    found = []
    for limit in (2**30, 40_000):
        model = tiny().float()
        x, y = torch.linspace(0, 1, 30).unsqueeze(1), torch.arange(30) % 2
        fitted = fit(dpulr.Gaussian(repeats=40), model, (x[:1], y[:1]), memory_limit=limit)
        with torch.inference_mode():
            found.append(fitted.estimate(fitted.forward.passes.clean(x, y), 0, None, directions(5)))
    assert len(list(fitted.chunks.repeats(2 * fitted.chunks.row_bytes[0], 30, 40))) > 3
    torch.testing.assert_close(*found)


# --- clipping -------------------------------------------------------------------------------------------------------------
def totals(loss_scale: float, settings: dpulr.Gaussian, rows: Tensor | None = None) -> tuple[FittedGaussian, list[Tensor]]:
    """The contribution of each of some records on its own, as one list of the sites' parts."""
    torch.manual_seed(0)
    model, x = convolutions(), torch.randn(20, 5) * 3 if rows is None else rows
    y = torch.arange(len(x)) % 3
    fitted = fit(settings, model, (x[:1], y[:1]), loss_fn=lambda output, target: LOSS(output, target) * loss_scale)
    return fitted, [total(fitted, x[i : i + 1], y[i : i + 1], seed=5 + i) for i in range(len(x))]


@pytest.mark.parametrize("clipping", ["joint", "per-layer"])
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e30])
def test_no_record_exceeds_the_bound(clipping: Any, scale: float) -> None:
    fitted, parts = totals(scale, dpulr.Gaussian(repeats=2, clipping=clipping, max_grad_norm=0.5))
    assert all(part.double().norm() <= 0.5 for part in parts)
    if scale == 1e3:
        assert all(part.double().norm() > 0.4998 * WITH_MARGIN for part in parts)  # what is too long is scaled, not dropped
    if clipping == "per-layer":
        torch.testing.assert_close(fitted.bounds.square().sum(), torch.tensor(0.25))
        for part in parts:
            assert all(p.norm() <= b for p, b in zip(fitted.parts(part), fitted.bounds, strict=True))


def test_short_records_are_left_alone() -> None:
    (_, loose), (_, tight) = (totals(1.0, dpulr.Gaussian(repeats=2, max_grad_norm=c)) for c in (1e4, 1e6))
    for a, b in zip(loose, tight, strict=True):
        torch.testing.assert_close(a, b)


def test_layer_weights_share_the_bound() -> None:
    fitted, parts = totals(1e6, dpulr.Gaussian(clipping="per-layer", layer_weights=(3.0, 1.0, 1.0, 5.0), max_grad_norm=6.0))
    assert fitted.bounds.tolist() == pytest.approx([3, 1, 1, 5])
    for part in parts:
        assert [p.norm().item() / WITH_MARGIN for p in fitted.parts(part)] == pytest.approx([3, 1, 1, 5], rel=4e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e38])
def test_a_record_that_is_not_finite_adds_nothing(bad: float) -> None:
    torch.manual_seed(1)
    rows = torch.randn(3, 5)
    rows[1, 2] = bad
    fitted, parts = totals(1.0, dpulr.Gaussian(repeats=2), rows)
    assert parts[0].any()
    assert all(part.isfinite().all() and part.norm() <= 1 for part in parts)
    if not math.isfinite(bad):
        assert not parts[1].any()
    together = total(fitted, rows, torch.arange(3))
    assert together.isfinite().all()
    assert together.norm() <= 2 + 1e-4


# --- settings -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {"repeats": 0},
        {"estimator": "guess"},
        {"sigma": 0.0},
        {"max_grad_norm": math.nan},
        {"clipping": "none"},
        {"layer_weights": (1.0,)},
        {"subspace": 0},
        {"subspace": True},
        {"space": "weights"},  # taken for a space of its own it would be bounded by one rule and released by another
    ],
    ids=str,
)
def test_bad_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        dpulr.Gaussian(**options)


def test_layer_weights_must_fit_the_model() -> None:
    with pytest.raises(InvalidArgument, match="layer_weights must be 2 positive numbers"):
        engine(mechanism=dpulr.Gaussian(clipping="per-layer", layer_weights=(1.0, 2.0, 3.0)))
