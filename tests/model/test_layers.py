"""Every layer kind through the harness."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from dpulr.errors import ModelRefused
from dpulr.model.layers import Call, LayerRule, register, rule_for
from dpulr.model.layers.affine import ConvRule, LinearRule
from dpulr.model.sites import make_site
from dpulr.model.trained_layers import Layer
from dpulr.norms import flat_norm
from tests.support.layer_harness import CLOSE, Case, LayerHarness, WeightSpaceHarness


class TestLinear(LayerHarness):
    def build(self, pick: random.Random) -> tuple[nn.Module, Tensor]:
        width = pick.randint(1, 6)
        leading = [pick.randint(1, 5) for _ in range(pick.randint(0, 2))]
        return nn.Linear(width, pick.randint(1, 6), bias=pick.random() < 0.7), torch.randn(pick.randint(1, 4), *leading, width)


class TestLinearOnSequences(LayerHarness):
    """Few positions of many features, where norms come from Gram matrices."""

    def build(self, pick: random.Random) -> tuple[nn.Module, Tensor]:
        return nn.Linear(12, 15, bias=pick.random() < 0.7), torch.randn(3, pick.randint(2, 5), 12)


class ConvHarness(LayerHarness):
    axes: int

    def build(self, pick: random.Random) -> tuple[nn.Module, Tensor]:
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[self.axes - 1]
        groups = pick.choice([1, 1, 2, 3])
        padding = pick.choice([0, 1, "same", tuple(pick.randint(0, 2) for _ in range(self.axes))])
        layer = kind(
            groups * pick.randint(1, 2),
            groups * pick.randint(1, 3),
            kernel_size=tuple(pick.randint(1, 3) for _ in range(self.axes)),
            stride=1 if padding == "same" else tuple(pick.randint(1, 2) for _ in range(self.axes)),
            padding=padding,
            dilation=pick.randint(1, 2),
            groups=groups,
            bias=pick.random() < 0.7,
            padding_mode=pick.choice(["zeros", "circular", "reflect", "replicate"]),
        )
        spatial = [pick.randint(5, 7 if self.axes < 3 else 5) for _ in range(self.axes)]
        return layer, torch.randn(pick.randint(1, 3), layer.in_channels, *spatial)


class TestConv1d(ConvHarness):
    axes = 1


class TestConv2d(ConvHarness):
    axes = 2


class TestConv3d(ConvHarness):
    axes = 3


class TestConvWithFewPositions(LayerHarness):
    """Many channels on two positions, where norms come from Gram matrices; a channels-last input."""

    def build(self, pick: random.Random) -> tuple[nn.Module, Tensor]:
        x = torch.randn(2, 8, 2, 3).to(memory_format=torch.channels_last)
        return nn.Conv2d(8, 2 * pick.randint(5, 9), 2, groups=pick.choice([1, 2])), x


class TestEmbedding(LayerHarness):
    def build(self, pick: random.Random) -> tuple[nn.Module, Tensor]:
        words = pick.randint(2, 5)
        self.padding = pick.choice([None, 0, words - 1])
        positions = [pick.randint(1, 6) for _ in range(pick.randint(0, 2))]
        layer = nn.Embedding(words, pick.randint(1, 4), padding_idx=self.padding)
        return layer, torch.randint(words, (pick.randint(1, 4), *positions))

    def as_perturbed(self, case: Case, expected: Tensor, x: Tensor) -> Tensor:
        """The padding row is no parameter: torch gives it no gradient, so it is not perturbed."""
        if self.padding is None:
            return expected
        return torch.where((x == self.padding).unsqueeze(-1), case.module.weight[self.padding].detach(), expected)


class TestLayerNorm(LayerHarness):
    def build(self, pick: random.Random) -> tuple[nn.Module, Tensor]:
        shape = [pick.randint(2, 5) for _ in range(pick.randint(1, 2))]
        leading = [pick.randint(1, 4) for _ in range(pick.randint(0, 2))]
        return nn.LayerNorm(shape, bias=pick.random() < 0.7), torch.randn(pick.randint(1, 4), *leading, *shape)


class TestRMSNorm(LayerHarness):
    def build(self, pick: random.Random) -> tuple[nn.Module, Tensor]:
        leading = [pick.randint(1, 4) for _ in range(pick.randint(0, 2))]
        return nn.RMSNorm(4, eps=pick.choice([None, 1e-3])), torch.randn(pick.randint(1, 4), *leading, 4)


class TestGroupNorm(LayerHarness):
    def build(self, pick: random.Random) -> tuple[nn.Module, Tensor]:
        groups = pick.randint(1, 3)
        spatial = [pick.randint(2, 4) for _ in range(pick.randint(1, 2))]
        channels = groups * pick.randint(1, 2)
        return nn.GroupNorm(groups, channels), torch.randn(pick.randint(1, 4), channels, *spatial)


class TestPReLU(WeightSpaceHarness):
    def build(self, pick: random.Random) -> tuple[nn.Module, Tensor]:
        channels = pick.randint(1, 4)
        return nn.PReLU(channels), torch.randn(pick.randint(1, 4), channels, pick.randint(1, 3))


class TestWeightNorm(WeightSpaceHarness):
    """A linear layer whose weight is made of two other parameters is not `nn.Linear` any more."""

    def build(self, pick: random.Random) -> tuple[nn.Module, Tensor]:
        width = pick.randint(1, 5)
        wrap = pick.choice([nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
        return wrap(nn.Linear(width, pick.randint(1, 5))), torch.randn(pick.randint(1, 4), width)


class TestAttention(WeightSpaceHarness):
    def build(self, pick: random.Random) -> tuple[nn.Module, Tensor]:
        heads = pick.randint(1, 2)
        width = heads * pick.randint(1, 3)
        return SelfAttention(width, heads), torch.randn(pick.randint(1, 3), pick.randint(1, 4), width)


class TestRecurrent(WeightSpaceHarness):
    """vmap can't batch the recurrent kernels: the row-by-row path."""

    def build(self, pick: random.Random) -> tuple[nn.Module, Tensor]:
        kind, width = pick.choice([nn.GRU, nn.LSTM]), pick.randint(1, 3)
        layer = LastState(kind(width, pick.randint(1, 3), batch_first=True))
        return layer, torch.randn(pick.randint(1, 3), pick.randint(1, 4), width)


class TestRawParameter(WeightSpaceHarness):
    def build(self, pick: random.Random) -> tuple[nn.Module, Tensor]:
        width = pick.randint(1, 5)
        return Scaled(width), torch.randn(pick.randint(1, 4), width)


class TestControlFlow(WeightSpaceHarness):
    """A branch on a record's values: vmap refuses it, row by row it is fine."""

    def build(self, pick: random.Random) -> tuple[nn.Module, Tensor]:
        width = pick.randint(1, 5)
        return Branching(width), torch.randn(pick.randint(2, 4), width)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class LastState(nn.Module):
    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0][:, -1]


class Scaled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * self.scale


class Branching(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if x.sum() > 0 else x - self.scale


def test_bilinear_takes_two_arguments() -> None:
    layer = nn.Bilinear(3, 2, 4).double()
    first, second = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    rule = rule_for(layer, dict(layer.named_parameters()))
    call = Call((first, second), {}, layer(first, second).detach(), (True, True))
    delta = torch.randn(2, 5, rule.weight_dim).double()
    found = rule.with_weights(call, delta)
    for r in range(2):
        for i in range(5):
            moved = {n: layer.get_parameter(n).detach() + d for n, d in rule.split(delta[r, i]).items()}
            expected = torch.func.functional_call(layer, moved, (first[i : i + 1], second[i : i + 1]))[0]
            torch.testing.assert_close(found[r, i], expected, **CLOSE)


def test_a_hook_of_the_user_is_part_of_the_layer() -> None:
    """The rule of `nn.Linear` would not know of it."""
    layer = nn.Linear(3, 2)
    assert isinstance(rule_for(layer, dict(layer.named_parameters())), LinearRule)
    layer.register_forward_hook(lambda module, args, output: output * 2)
    assert type(rule_for(layer, dict(layer.named_parameters()))) is LayerRule


def test_register_adds_a_rule() -> None:
    class MyLinear(nn.Linear):
        pass

    layer = MyLinear(2, 3)
    assert type(rule_for(layer, dict(layer.named_parameters()))) is LayerRule
    register(MyLinear, LinearRule)
    assert isinstance(rule_for(layer, dict(layer.named_parameters())), LinearRule)


@pytest.mark.slow
def test_a_rule_is_registered_in_a_fresh_interpreter() -> None:
    """`dpulr.layers` is there without anything else having been imported before."""
    program = """
import dpulr
register = dpulr.layers.register
from torch import nn
from dpulr.model.layers.affine import LinearRule
class Mine(nn.Linear):
    pass
for _ in range(2):
    print(type(dpulr.layers.rule_for(Mine(2, 3), {})).__name__)
    register(Mine, LinearRule)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["LayerRule", "LinearRule"]


def test_output_space_of_an_unknown_layer_is_refused_by_name() -> None:
    layer = nn.PReLU()
    with pytest.raises(ModelRefused, match=r"'act' \(PReLU\) has no output space"):
        make_site(Layer("act", layer, dict(layer.named_parameters())), torch.Size([3]), "output")


@pytest.mark.parametrize("kind", ["linear", "linear-long", "embedding", "group-norm"])
@pytest.mark.parametrize("left", [1e-3, 1e-4, 1e-5, 1e-7])
def test_clipping_holds_where_float32_cancels(kind: str, left: float) -> None:
    """A record whose gradients nearly cancel over its positions must not pass as short: clipping would then let it through."""
    torch.manual_seed(0)
    records, positions, width = 60, 50 if kind == "linear-long" else 4, 64 if kind == "linear" else 3
    if kind == "embedding":
        layer, x = nn.Embedding(3, width), torch.zeros(records, positions, dtype=torch.int64)
    elif kind == "group-norm":
        layer, x = nn.GroupNorm(1, width), torch.randn(records, width, 1).expand(records, width, positions)
    else:
        layer, x = nn.Linear(width, width), torch.randn(records, 1, width).expand(records, positions, width)
    u = torch.randn(records, positions, width)
    u = 1e5 * (u - u.mean(1, keepdim=True) + left * torch.randn(records, 1, width))
    u = u.transpose(1, 2) if kind == "group-norm" else u
    site = make_site(Layer("layer", layer, dict(layer.named_parameters())), u.shape[1:], "output")
    call = Call((x,), {}, layer(x).detach())
    scale = (1 / site.norms(call, u.flatten(1))).clamp(max=1)
    for i in range(records):
        one = Call((x[i : i + 1],), {}, call.output[i : i + 1])
        part = torch.zeros(site.size, dtype=torch.float64)
        with torch.inference_mode():
            site.add(one, u[i : i + 1].flatten(1), scale[i : i + 1], part)
        assert part.norm() < 1.01


@pytest.mark.parametrize("kind", ["linear", "sequence", "few-positions", "conv", "layer-norm", "group-norm"])
@pytest.mark.parametrize("size", [1e-30, 4.6e-23, 1e-10, 1.0, 1e10, 1e25])
def test_bounds_hold_at_extreme_scales(kind: str, size: float) -> None:
    """Squares of small float32 numbers vanish: a record of tiny inputs and a huge signal must not pass as short."""
    torch.manual_seed(0)
    layers: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "linear": (nn.Linear(4, 3, bias=False), (8, 4)),
        "sequence": (nn.Linear(3, 2, bias=False), (8, 20, 3)),
        "few-positions": (nn.Linear(30, 20, bias=False), (8, 2, 30)),
        "conv": (nn.Conv2d(2, 3, 2, bias=False), (8, 2, 4, 4)),
        "layer-norm": (nn.LayerNorm(4, bias=False), (8, 3, 4)),
        "group-norm": (nn.GroupNorm(1, 2), (8, 2, 3)),
    }
    layer, shape = layers[kind]
    x = size * torch.randn(shape)
    call = Call((x,), {}, layer(x).detach())
    site = make_site(Layer("layer", layer, dict(layer.named_parameters())), call.output.shape[1:], "output")
    unit = torch.randn(8, site.dim)
    unit /= unit.norm(dim=1, keepdim=True)
    gains = site.gains(call)
    signals = {"gains": (unit, torch.where(gains > 0, 1 / gains, 0))}
    for loud in (1e-20, 1.0, 1e15, 1e25, 1e32):
        signals[f"norms {loud}"] = loud * unit, (1 / site.norms(call, loud * unit)).clamp(max=1)
    for name, (signal, scale) in signals.items():
        for i in range(8):
            one = Call((x[i : i + 1],), {}, call.output[i : i + 1])
            part = torch.zeros(site.size, dtype=torch.float64)
            with torch.inference_mode():
                site.add(one, signal[i : i + 1], scale[i : i + 1], part)
            assert part.double().norm() < 1.001, name


def test_norms_of_millions_of_numbers_keep_their_digits() -> None:
    """Bounds have a margin of 1e-5; float32 sums of 10^7 squares, one by one, err by 7e-5."""
    long = torch.rand(1, 10_000_000, generator=torch.Generator().manual_seed(0)) + 0.5
    assert flat_norm(long).item() == pytest.approx(long.double().square().sum().sqrt().item(), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(4, 3),
        nn.Linear(4, 3, bias=False),
        nn.Conv1d(4, 3, 1),
        nn.Conv1d(4, 2, 1, groups=2),
        nn.LayerNorm(4),
        nn.GroupNorm(2, 4),
    ],
    ids=str,
)
def test_gains_show_a_record_that_is_not_finite(layer: nn.Module, bad: float) -> None:
    """Mechanisms rely on it: a record with a finite gain is multiplied without another look."""
    x = torch.randn(3, 4, 5) if isinstance(layer, nn.Conv1d | nn.GroupNorm) else torch.randn(3, 4)
    x[1].view(-1)[-1] = bad
    with torch.no_grad():
        output = layer(x)
    gains = rule_for(layer, dict(layer.named_parameters())).gains(Call((x,), {}, output))
    assert torch.isfinite(gains).tolist() == [True, False, True]


def test_gains_of_tiny_and_huge_records_are_right() -> None:
    """Where the squares leave the range of float32."""
    layer = nn.Linear(4, 3, bias=False)
    for size in (1e-30, 1e-22, 1e-10, 1.0, 1e16, 1e30):
        x = torch.full((2, 4), size)
        gains = rule_for(layer, dict(layer.named_parameters())).gains(Call((x,), {}, torch.zeros(2, 3)))
        assert gains.tolist() == pytest.approx([2 * size] * 2, rel=1e-6)


@pytest.mark.parametrize(
    ("conv", "shape"),
    [
        (nn.Conv1d(2, 3, 5), (2, 6)),
        (nn.Conv2d(3, 4, 3, padding=1), (3, 8, 7)),
        (nn.Conv2d(4, 4, (3, 2), padding=(2, 1), dilation=(2, 1), groups=2), (4, 9, 6)),
        (nn.Conv2d(4, 4, 3, stride=2, groups=2), (4, 9, 9)),
        (nn.Conv2d(4, 4, 3, stride=(1, 2)), (4, 9, 9)),
        (nn.Conv2d(2, 3, 3, dilation=2), (2, 5, 6)),
        (nn.Conv3d(2, 3, 3, padding=1, padding_mode="circular"), (2, 4, 4, 5)),
    ],
)
def test_lines_of_an_image_do_for_its_patches(conv: nn.Module, shape: tuple[int, ...]) -> None:
    """Second moments and gradients from lines, against all patches written out."""
    torch.manual_seed(0)
    conv.double()
    rule = ConvRule(conv, dict(conv.named_parameters()))
    x = torch.randn(5, *shape, dtype=torch.float64)
    patches, signal = rule.features(x), rule.grouped(torch.randn_like(conv(x)))
    torch.testing.assert_close(rule.second_moment(x), torch.einsum("ngpf,ngph->gfh", patches, patches))
    torch.testing.assert_close(rule.weight_gradients(x, signal), torch.einsum("ngpo,ngpf->ngof", signal, patches))
