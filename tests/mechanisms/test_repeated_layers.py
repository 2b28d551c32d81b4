"""Hidden directions for layers that a pass calls several times, as spiking networks do: one record after the other, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import snntorch
import torch
from snntorch import spikegen, utils
from torch import Tensor, nn

import dpulr
from dpulr.errors import ModelRefused
from dpulr.mechanisms.base import WITH_MARGIN
from tests.support.core import LOSS, engine, points, train

STEPS, RADIUS = 4, 0.5


class Currents(nn.Module):
    """Another input in each time step; the last layer reads the spikes of each."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5, bias=bias), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        membrane, out = x.new_zeros(len(x), 5), x.new_zeros(len(x), 3)
        for step in range(STEPS):
            membrane = 0.8 * membrane + self.first(x * (step + 1) / STEPS)
            spikes = (membrane > 0.3).to(x.dtype)
            membrane = membrane * (1 - spikes)
            out = out + self.last(spikes)
        return out


class Given:
    """Directions that the test has drawn."""

    def __init__(self, drawn: list[Tensor]) -> None:
        self.drawn = drawn

    def spheres(self, shapes: list[tuple[int, ...]]) -> list[Tensor]:
        taken, self.drawn = self.drawn[: len(shapes)], self.drawn[len(shapes) :]
        assert [tuple(z.shape) for z in taken] == list(shapes)
        return [z.clone() for z in taken]


def loss_of(model: Currents, x: Tensor, y: Tensor, moves: dict[nn.Module, Tensor]) -> tuple[Tensor, dict[nn.Module, Tensor]]:
    """One record's loss with a move for each call of a layer, and what went into these calls."""
    seen: dict[nn.Module, list[Tensor]] = {model.first: [], model.last: []}

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        seen[module].append(args[0][0])
        return output + moves[module][len(seen[module]) - 1] if module in moves else output

    handles = [module.register_forward_hook(hook) for module in seen]
    value = LOSS(model(x.unsqueeze(0)), y.unsqueeze(0))[0]
    for handle in handles:
        handle.remove()
    return value, {module: torch.stack(inputs) for module, inputs in seen.items()}


@pytest.mark.parametrize("bias", [True, False])
def test_a_step_is_the_literal_one(bias: bool) -> None:
    torch.manual_seed(3)
    model, records, repeats = Currents(bias), 7, 3
    settings = dpulr.HiddenDirection(repeats=repeats, radius=RADIUS, layer_weights=(1.5, 0.5), subspace=None)
    private = engine(model, points(), mechanism=settings, batch_size=8)
    assert [(site.name, site.dim) for site in private.forward.sites] == [("first", 5), ("last", 3)]
    x, y = torch.randn(records, 6), torch.randint(0, 3, (records,))
    z = [nn.functional.normalize(torch.randn(repeats, records, dim), dim=2) for dim in (5, 3)]
    with torch.no_grad():
        (clean,) = private.forward.clean(x, y)
        total = torch.zeros(private.fitted.size, dtype=torch.float64)
        private.fitted.add(clean, [None, None], Given([d.clone() for d in z]), private.fitted.parts(total))
        wanted = {module: [torch.zeros_like(p) for p in module.parameters()] for module in (model.first, model.last)}
        for i in range(records):
            base, seen = loss_of(model, x[i], y[i], {})
            for layer, bound, drawn in ((model.first, 1.5, z[0]), (model.last, 0.5, z[1])):
                constant = layer.bias is not None
                own = torch.cat([seen[layer], torch.ones(STEPS, 1)], 1) if constant else seen[layer]
                mean = own.mean(0)
                shares = own @ mean
                shares = shares / shares.square().mean().sqrt() if shares.any() else torch.ones(STEPS)
                for r in range(repeats):
                    move = RADIUS * math.sqrt(layer.out_features) * torch.outer(shares, drawn[r, i])
                    bit = torch.sign(loss_of(model, x[i], y[i], {layer: move})[0] - base)
                    signal = WITH_MARGIN * bound / repeats * bit * drawn[r, i]
                    if not mean.any():
                        continue
                    wanted[layer][0] += torch.outer(signal, mean[:6] if layer is model.first else mean[:5]) / mean.norm()
                    if constant:
                        wanted[layer][1] += signal / mean.norm()
    expected = torch.cat([part.flatten() for parts in wanted.values() for part in parts])
    assert expected.norm() > 0.5
    torch.testing.assert_close(total.float(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4, math.inf])
def test_one_record_adds_at_most_its_bound(scale: float) -> None:
    torch.manual_seed(0)
    settings = dpulr.HiddenDirection(repeats=2, radius=RADIUS, layer_weights=(1.0, 1.0))
    private = engine(Currents(), points(), mechanism=settings, batch_size=8)
    with torch.inference_mode():
        public = private.fitted.draw_public(0)
        record = scale * torch.randn(1, 6), torch.tensor([1])
        added = private.fitted.sum_of_bounded_signals(record, public, private._directions)
    assert all(part.norm().item() <= 1 for part in private.fitted.parts(added))
    assert math.isfinite(added.sum().item())


def test_exact_gradients_behind_the_spikes_are_those_of_all_calls() -> None:
    private = engine(Currents(), points(600), mechanism=dpulr.HiddenDirection(exact="auto", radius=RADIUS), steps=2)
    assert private.mechanism.exact == ("last",)
    assert train(private) == 2
    assert private.guarantee == "certified"


# --- snnTorch, as its tutorials write it ----------------------------------------------------------------------------------
class Tutorial(nn.Module):
    """Membranes in the loop; spikes and membranes come out with time first."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.lif1 = nn.Linear(6, 12), snntorch.Leaky(beta=0.9)
        self.fc2, self.lif2 = nn.Linear(12, 3), snntorch.Leaky(beta=0.9)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.lif1.init_leaky(), self.lif2.init_leaky()
        spikes, membranes = [], []
        for _ in range(STEPS):
            spike, first = self.lif1(self.fc1(x), first)
            spike, second = self.lif2(self.fc2(spike), second)
            spikes.append(spike)
            membranes.append(second)
        return torch.stack(spikes), torch.stack(membranes)


class Looped(nn.Module):
    """Membranes in the neurons, over a Sequential."""

    def __init__(self, reset: bool = True) -> None:
        super().__init__()
        self.reset = reset
        self.net = nn.Sequential(
            nn.Linear(6, 12),
            snntorch.Leaky(beta=0.9, init_hidden=True),
            nn.Linear(12, 3),
            snntorch.Leaky(beta=0.9, init_hidden=True, output=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.reset:
            utils.reset(self.net)
        return torch.stack([self.net(x)[0] for _ in range(STEPS)]).sum(0)


class Recurrent(nn.Module):
    """Spikes that come back, by a layer of the neuron's own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 12), nn.Linear(12, 3)
        self.lif = snntorch.RLeaky(beta=0.9, linear_features=12)

    def forward(self, x: Tensor) -> Tensor:
        spike, membrane = self.lif.init_rleaky()
        out = x.new_zeros(len(x), 3)
        for _ in range(STEPS):
            spike, membrane = self.lif(self.fc1(x), spike, membrane)
            out = out + self.fc2(spike)
        return out


class RateCoded(Recurrent):
    """Random spikes, with time first."""

    def forward(self, x: Tensor) -> Tensor:
        spike, membrane = self.lif.init_rleaky()
        out = x.new_zeros(len(x), 3)
        for now in spikegen.rate(x.sigmoid(), num_steps=STEPS):
            spike, membrane = self.lif(self.fc1(now), spike, membrane)
            out = out + self.fc2(spike)
        return out


def over_time(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return torch.stack([LOSS(membrane, targets) for membrane in output[1]]).sum(0)


@pytest.mark.parametrize(
    ("make", "loss_fn"),
    [(Tutorial, over_time), (Looped, LOSS), (Recurrent, LOSS), pytest.param(RateCoded, LOSS, marks=pytest.mark.slow)],
    ids=["membranes in the loop", "membranes in the neurons", "recurrent", "rate-coded"],
)
def test_networks_of_snntorch_are_trained_as_they_are(make: Any, loss_fn: Any) -> None:
    torch.manual_seed(0)
    model = make()
    before = [parameter.clone() for parameter in model.parameters()]
    private = engine(model, points(600), mechanism=dpulr.HiddenDirection(radius=1.0), loss_fn=loss_fn, steps=2)
    assert not private.forward.recordwise
    assert {site.space for site in private.forward.sites} == {"output"}
    assert train(private) == 2
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_membranes_that_survive_a_pass_are_refused() -> None:
    """Also where no neuron spikes at first, so that nothing shows by itself."""
    for seed in range(3):
        torch.manual_seed(seed)
        with pytest.raises(ModelRefused, match=r"'net.1' \(Leaky\) keeps state .* resets its membranes first"):
            engine(Looped(reset=False), points())
