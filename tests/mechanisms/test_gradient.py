"""`gradient`: the clipped sum is that of gradients taken record by record with torch.func, on every kind of layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

import dpulr
from dpulr.errors import InvalidArgument, ModelRefused
from dpulr.mechanisms.base import WITH_MARGIN, OnePiece
from dpulr.model.prepare import prepare
from dpulr.parts.updates import buffers_for
from dpulr.plan import Request
from dpulr.randomness import RandomSource
from tests.support.core import LOSS, engine, train

CPU = torch.device("cpu")
RECORDS = 7


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm, self.last = nn.Linear(12, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1)).tanh_()
        return self.last(self.norm(x + self.second(x)))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(9, 5, padding_idx=0), nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.table(tokens).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x.view(len(x), 3, 4))[0][:, -1])


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.GRU(4, 5, batch_first=True, bidirectional=True), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x.view(len(x), 3, 4))[0][:, -1])


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 3, 4)
        return self.last(self.attention(x, x, x)[0].mean(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, dropout=0.0, batch_first=True)
        self.encoder, self.last = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(x.view(len(x), 3, 4)).mean(1))


class OwnWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(12, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight


class Branching(nn.Module):
    """Reads values: it runs record by record."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        return self.last(2 * x.tanh() if x.sum() > 0 else x.tanh())


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 2, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 2, groups=2),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 3)),
    "residual": Residual,
    "convolutions": convolutions,
    "tokens": Tokens,
    "recurrent": Recurrent,
    "gated": Gated,
    "attention": Attentive,
    "transformer": Transformer,
    "own weights": OwnWeights,
    "branching": Branching,
}


def data(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(0, 3, (RECORDS,), generator=generator)
    if name == "tokens":
        return torch.randint(0, 9, (RECORDS, 4), generator=generator), targets
    return 2 * torch.randn(RECORDS, 3, 2, 2, generator=generator, dtype=torch.float64), targets


def fitted(name: str, settings: dpulr.Gradient, method: str = "auto") -> tuple[Any, nn.Module]:
    torch.manual_seed(1)
    model = MODELS[name]().double()
    inputs, targets = data(name)
    forward = prepare(model, LOSS, (inputs[:1], targets[:1]), CPU, space=settings.space, method=method)
    request = Request(records=100, batch_size=RECORDS, steps=1, noise_multiplier=1.0)
    return settings.fit(forward, settings.plan(request, forward.sites), memory_limit=None, seed=0), model


def literal(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Each record's own gradient, by torch.func, one record at a time."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(w: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return LOSS(functional_call(model, w, (x.unsqueeze(0),)), y.unsqueeze(0))[0]

    found: list[dict[str, Tensor]] = []
    for x, y in zip(inputs, targets, strict=True):
        if isinstance(
            model, Branching | Recurrent | Gated | Attentive | Transformer
        ):  # control flow, and kernels that torch.func does not know
            model.zero_grad()
            LOSS(model(x.unsqueeze(0)), y.unsqueeze(0))[0].backward()
            found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        else:
            found.append(grad(loss)(weights, x, y))
    return {name: torch.stack([one[name] for one in found]) for name in weights}


@pytest.mark.filterwarnings("ignore:running", "ignore:.*the whole model around it")
@pytest.mark.parametrize("bound", [0.1, 2.0, 1e6])
@pytest.mark.parametrize(("name", "method"), [*((name, "auto") for name in MODELS), ("mlp", "hook"), ("residual", "hook")])
def test_the_sum_is_that_of_gradients_clipped_one_by_one(name: str, method: str, bound: float) -> None:
    mechanism, model = fitted(name, dpulr.Gradient(max_grad_norm=bound), method)
    inputs, targets = data(name)
    own = literal(model, inputs, targets)
    norms = torch.cat([g.flatten(1) for g in own.values()], dim=1).norm(dim=1)
    scale = (WITH_MARGIN * bound / norms).clamp(max=1)
    with torch.inference_mode():
        total = mechanism.sum_of_bounded_signals((inputs, targets), mechanism.draw_public(0), RandomSource(0).directions(CPU))
        into = [{key: torch.zeros_like(p) for key, p in site.parameters.items()} for site in mechanism.sites]
        mechanism.gradients(total, mechanism.draw_public(0), into)
    for site, views in zip(mechanism.sites, into, strict=True):
        for key, view in views.items():
            wanted = own[f"{site.name}.{key}" if site.name else key]
            expected = torch.tensordot(scale, wanted, 1) / RECORDS
            torch.testing.assert_close(view, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("bound", [1.0, "adaptive"])
@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_gradients_are_the_same_in_one_piece(name: str, bound: Any) -> None:
    mechanism, _ = fitted(name, dpulr.Gradient(max_grad_norm=bound))
    values = torch.randn(mechanism.size, dtype=torch.float64)
    apart = [{key: torch.zeros_like(p) for key, p in site.parameters.items()} for site in mechanism.sites]
    together = buffers_for([site.parameters for site in mechanism.sites])
    assert isinstance(together, OnePiece)
    with torch.inference_mode():
        mechanism.gradients(values, mechanism.draw_public(0), together)
        mechanism.gradients(values, mechanism.draw_public(0), apart)
    for one, other in zip(together, apart, strict=True):
        for key, gradient in other.items():
            assert torch.equal(one[key], gradient)
    assert bool(together.flat.abs().sum() > 0)


@pytest.mark.parametrize("clipping", ["joint", "per-layer", "normalised"])
def test_no_record_exceeds_its_bound(clipping: Any) -> None:
    """Alone, with inputs of all sizes, NaN and infinity among them."""
    mechanism, _ = fitted("residual", dpulr.Gradient(max_grad_norm=0.5, clipping=clipping))
    inputs, targets = data("residual")
    lengths = []
    for factor in (0.0, 1e-30, 1e-3, 1.0, 1e3, 1e18, math.inf, math.nan):
        with torch.inference_mode():
            batch = factor * inputs[:1], targets[:1]
            total = mechanism.sum_of_bounded_signals(batch, mechanism.draw_public(0), RandomSource(0).directions(CPU))
        assert torch.isfinite(total).all()
        lengths.append(float(total.norm()))
    assert max(lengths) <= 0.5
    assert max(lengths) > (0.3 if clipping == "per-layer" else 0.45)


def test_it_learns() -> None:
    private = engine(mechanism="gradient", batch_size=50, steps=60, noise_multiplier=1.0)
    assert train(private) == 60
    spent = private.privacy_spent()
    assert (spent.guarantee, spent.mechanism) == ("certified", "gradient")


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy().copy()).sign()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        raise RuntimeError("there is no slope")


class NumpyBox(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy().copy())


@pytest.mark.filterwarnings("ignore:running")
def test_what_can_not_be_differentiated_is_refused_by_name() -> None:
    boxed = nn.Sequential(nn.Linear(4, 5), NumpyBox(), nn.Linear(5, 2))
    with pytest.raises(ModelRefused, match=r"no gradient reaches '0' \(Linear\).*hidden-direction"):
        engine(boxed, mechanism="gradient")

    class Raising(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Sign.apply(x)

    with pytest.raises(ModelRefused, match="can't be differentiated: there is no slope"):
        engine(nn.Sequential(nn.Linear(4, 5), Raising(), nn.Linear(5, 2)), mechanism="gradient")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
        ({"clipping": "none"}, "clipping is 'none'"),
        ({"layer_weights": (1.0, 2.0)}, "per-layer"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        dpulr.Gradient(**settings)
    with pytest.raises(InvalidArgument, match="2 positive numbers"):
        engine(mechanism=dpulr.Gradient(clipping="per-layer", layer_weights=(1.0,)))
