"""Layers that are called several times, and tied parameters, under `gradient`: a record's sum over all uses is what is clipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpulr
from dpulr.errors import ModelRefused
from dpulr.mechanisms.base import WITH_MARGIN
from dpulr.model.prepare import prepare
from dpulr.model.shared_sites import SharedSite
from dpulr.plan import Request
from tests.support.core import CPU, LOSS, engine, points, total, train

RECORDS = 6


class Twice(nn.Module):
    """A layer that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.last(x)


class TiedLinear(nn.Module):
    """Two layers with one weight, and biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Language(nn.Module):
    """The embedding is the last layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(7, 5, padding_idx=0), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.table(tokens)))).mean(1)


class Two(nn.Module):
    """One embedding for two inputs, one convolution for images of two sizes, one norm, called twice each."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.norm, self.last = nn.Embedding(7, 4), nn.Conv1d(4, 4, 2), nn.LayerNorm(4), nn.Linear(4, 3)

    def one(self, tokens: Tensor) -> Tensor:
        return self.conv(self.norm(self.table(tokens)).transpose(1, 2)).tanh().mean(2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.one(tokens) - 2 * self.one(tokens[:, :3]))


class SharedBlock(nn.Module):
    """A module of one's own, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = _Own(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.block(x)))


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Mirrored(nn.Module):
    """The same module under two names."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Linear(6, 6)
        self.left, self.right, self.last = nn.Sequential(inner), nn.Sequential(inner), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.left(x)) + self.right(x.flip(1)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "called again": Twice,
    "tied": TiedLinear,
    "language": Language,
    "two": Two,
    "own": SharedBlock,
    "mirrored": Mirrored,
}


def data(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(0, 3, (RECORDS,), generator=generator)
    if name in ("language", "two"):
        return torch.randint(0, 7, (RECORDS, 4), generator=generator), targets
    return 2 * torch.randn(RECORDS, 6, generator=generator, dtype=torch.float64), targets


def fitted(name: str, bound: float, method: str = "auto") -> tuple[Any, nn.Module]:
    torch.manual_seed(1)
    model, (inputs, targets) = MODELS[name]().double(), data(name)
    settings = dpulr.Gradient(max_grad_norm=bound)
    forward = prepare(model, LOSS, (inputs[:1], targets[:1]), CPU, space=settings.space, method=method, shared=True)
    plan = settings.plan(Request(records=100, batch_size=RECORDS, steps=1, noise_multiplier=1.0), forward.sites)
    return settings.fit(forward, plan, memory_limit=None, seed=0), model


@pytest.mark.parametrize("bound", [0.1, 1e6])
@pytest.mark.parametrize(("name", "method"), [*((name, "auto") for name in MODELS), ("called again", "hook"), ("tied", "hook")])
def test_the_sum_over_all_uses_is_clipped(name: str, method: str, bound: float) -> None:
    """Against plain backpropagation, record by record."""
    mechanism, model = fitted(name, bound, method)
    inputs, targets = data(name)
    parameters = list(model.parameters())
    expected = [torch.zeros_like(p) for p in parameters]
    for x, y in zip(inputs, targets, strict=True):
        own = torch.autograd.grad(LOSS(model(x.unsqueeze(0)), y.unsqueeze(0))[0], parameters)
        scale = min(1.0, WITH_MARGIN * bound / float(torch.cat([g.flatten() for g in own]).norm()))
        expected = [a + scale * b for a, b in zip(expected, own, strict=True)]
    found = total(mechanism, inputs, targets)
    into = [{key: torch.zeros_like(p) for key, p in site.parameters.items()} for site in mechanism.sites]
    mechanism.gradients(found, mechanism.draw_public(0), into)
    gradients = {p: views[key] for site, views in zip(mechanism.sites, into, strict=True) for key, p in site.parameters.items()}
    assert len(gradients) == len(parameters)
    assert any(isinstance(site, SharedSite) for site in mechanism.sites)
    for parameter, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(gradients[parameter] * RECORDS, wanted, rtol=1e-5, atol=1e-9)


def test_no_memory_of_batch_times_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is called again needs no single record's gradient at all; where kinds differ, few are made at a time."""
    mechanism, _ = fitted("called again", 1.0)
    monkeypatch.setattr("dpulr.model.shared_sites._gradients", None)
    total(mechanism, *data("called again"))
    monkeypatch.undo()
    monkeypatch.setattr("dpulr.model.shared_sites._NUMBERS", 80)
    mechanism, _ = fitted("language", 0.1)
    in_parts = total(mechanism, *data("language"))
    monkeypatch.undo()
    torch.testing.assert_close(in_parts, total(fitted("language", 0.1)[0], *data("language")))


class TiedByHand(nn.Module):
    """One use of the weight is no layer's call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(self.first(x))) + F.linear(x, self.first.weight))


def test_a_use_that_nobody_sees_is_refused() -> None:
    with pytest.raises(ModelRefused, match="used outside of these layers"):
        engine(TiedByHand(), points(), mechanism="gradient")


def test_others_still_refuse_shared_parameters() -> None:
    with pytest.raises(ModelRefused, match="is called 3 times"):
        engine(Twice(), points(), mechanism="zeroth-order")
    for mechanism in ("gaussian", "hidden-direction"):
        with pytest.raises(ModelRefused, match="is tied to"):
            engine(TiedLinear(), points(), mechanism=mechanism)


@pytest.mark.parametrize("name", ["called again", "tied"])
def test_an_engine_trains_it(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    before = [p.clone() for p in model.parameters()]
    private = engine(model, points(600), mechanism="gradient", steps=3)
    assert train(private) == 3
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert private.guarantee == "certified"
