"""Lengths are those of each record alone, and never too short: what a record adds stays within its bound, and moves no other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpulr.model.layers import Call
from dpulr.model.sites import Site, gains_of, make_site, norms_of
from dpulr.model.trained_layers import Layer
from dpulr.norms import row_norm, safe_row_norm

WIDTH = 65_536


def summed(x: Tensor, signal: Tensor) -> Tensor:
    """The sum of what records add, each scaled to a bound of 1 by its gain, in float64."""
    site, call = linear(x)
    with torch.inference_mode():
        part = torch.zeros(site.size, dtype=torch.float64)
        site.add(call, signal, (1 / site.gains(call)).nan_to_num(0, 0, 0), part)
    return part


def linear(x: Tensor, outputs: int = 1) -> tuple[Site, Call]:
    layer = nn.Linear(x.shape[1], outputs, bias=False)
    site = make_site(Layer("layer", layer, dict(layer.named_parameters())), torch.Size([outputs]), "output")
    return site, Call((x,), {}, torch.zeros(len(x), outputs))


@pytest.mark.parametrize("odd", [0.0, 1e20, float("nan")])
def test_an_odd_record_does_not_change_the_lengths_of_others(odd: float) -> None:
    """One large feature and many small ones: their lengths in float32 and in float64 differ most."""
    others = torch.full((600, WIDTH), 3e-4)
    others[:, 0] = 1.0
    signal = torch.ones(601, 1)
    alone = summed(others, signal[:600])
    beside = summed(torch.cat([others, torch.full((1, WIDTH), odd)]), signal)
    own = summed(torch.full((1, WIDTH), odd), signal[:1])
    assert (beside - alone - own).norm() < 1e-6


@pytest.mark.parametrize("small", [1e-4, 3e-4, 1e-3])
def test_one_large_and_many_small_features_are_not_too_short(small: float) -> None:
    """Added one by one in float32, the small squares would vanish beside the large one."""
    for width in (2_048, WIDTH, 1_000_003):
        x = torch.full((1, width), small)
        x[0, 0] = 1.0
        exact = torch.linalg.vector_norm(x.double()).item()
        assert row_norm(x).item() == pytest.approx(exact, rel=1e-6)
        assert safe_row_norm(x.view(1, 1, -1)).item() == pytest.approx(exact, rel=1e-6)
        assert summed(x, torch.ones(1, 1)).norm().item() <= 1 + 1e-6


def test_a_clipped_signal_of_such_a_record_is_within_the_bound() -> None:
    x = torch.full((1, WIDTH), 3e-4)
    x[0, 0] = 1.0
    site, call = linear(x, outputs=4)
    signal = torch.tensor([[1.0, -2.0, 3.0, 0.5]])
    with torch.inference_mode():
        part = torch.zeros(site.size, dtype=torch.float64)
        site.add(call, signal, 1 / site.norms(call, signal), part)
    assert part.norm().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("odd", [1.0, 0.0, 1e-30, 1e25, float("inf"), float("nan")])
@pytest.mark.parametrize("others", ["linear", "convolution"])
def test_lengths_of_several_layers_together_are_those_of_each(odd: float, others: str) -> None:
    """To the last bit, and whatever one record is. A convolution has no rows of gain: then each layer is asked."""
    torch.manual_seed(0)
    x, u = torch.randn(6, 200), torch.randn(6, 10)
    x[2] *= odd
    u[3] *= odd
    layers: list[tuple[nn.Module, Tensor, Tensor]] = [(nn.Linear(200, 10), x, u), (nn.Linear(200, 10, bias=False), 3 * x, -u)]
    if others == "convolution":
        layers.append((nn.Conv1d(2, 2, 5), x.view(6, 2, 100), torch.randn(6, 192)))
    sites, calls = [], []
    for module, inputs, _ in layers:
        output = module(inputs).detach()
        sites.append(make_site(Layer("layer", module, dict(module.named_parameters())), output.shape[1:], "output"))
        calls.append(Call((inputs,), {}, output))
    signals = [signal for _, _, signal in layers]
    with torch.inference_mode():
        gains, norms = gains_of(sites, calls), norms_of(sites, calls, signals)
        for i, (site, call, signal) in enumerate(zip(sites, calls, signals, strict=True)):
            torch.testing.assert_close(gains[i], site.gains(call), rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(norms[i], site.norms(call, signal), rtol=0, atol=0, equal_nan=True)
