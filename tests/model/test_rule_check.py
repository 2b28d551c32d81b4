"""A layer rule from outside is tried before it is used: one that bounds too little, or is wrong, is refused with its factor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpulr
from dpulr.errors import ModelRefused
from dpulr.model import layers
from dpulr.model.layers import Call, rule_for
from dpulr.model.layers.affine import LinearRule
from dpulr.model.layers.check import check_rule
from dpulr.model.prepare import prepare
from tests.support.core import CPU, LOSS

EXAMPLE = (torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64))


class Mine(nn.Linear):
    """A layer of one's own."""


class Doubled(nn.Linear):
    """Not what the rule of `nn.Linear` knows."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    before = dict(layers._RULES)
    yield
    layers._RULES.clear()
    layers._RULES.update(before)


def prepared(layer: nn.Module, rule: type[layers.LayerRule], **settings: Any) -> Any:
    dpulr.layers.register(type(layer), rule)
    return prepare(nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3)), LOSS, EXAMPLE, CPU, **settings)


class SmallGains(LinearRule):
    def gains(self, call: Call) -> Tensor:
        return super().gains(call) / 50


class SmallNorms(LinearRule):
    def norms(self, call: Call, signal: Tensor) -> Tensor:
        return super().norms(call, signal) / 3


class SmallJointNorms(LinearRule):
    def joint_norms(self, calls: Any, signals: Any) -> Tensor:
        return super().joint_norms(calls, signals) / 3


class SmallForLarge(LinearRule):
    """Right for inputs between 0 and 1 only."""

    def gains(self, call: Call) -> Tensor:
        return super().gains(call).clamp(max=10)


class TypicalGains(LinearRule):
    """Right for signals that point anywhere; the positions of a sequence can add up."""

    def gains(self, call: Call) -> Tensor:
        return super().gains(call) / call.input.shape[1] ** 0.5


class BlindGains(LinearRule):
    def gains(self, call: Call) -> Tensor:
        return super().gains(call).nan_to_num(1e30, 1e30)


class BlindNorms(LinearRule):
    def norms(self, call: Call, signal: Tensor) -> Tensor:
        return super().norms(call, signal).nan_to_num(1e30, 1e30)


class OtherGradient(LinearRule):
    def add_gradient(self, call: Call, signal: Tensor, into: dict[str, Tensor]) -> None:
        super().add_gradient(call, signal.flip(1), into)


class OthersWeights(LinearRule):
    """Moves each record by the weights of its neighbour."""

    def with_weights(self, call: Call, flat: Tensor) -> Tensor:
        return super().with_weights(call, flat.roll(1, 1))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (SmallGains, r"rule that was registered for '0' \(Mine\) is wrong: .* is 50 times as long as its gain allows"),
        (SmallNorms, r"'0' \(Mine\) is wrong: .* is 3 times as long as its norm allows"),
        (SmallJointNorms, r"'0' \(Mine\) is wrong: .* is 3 times as long as its joint norm allows"),
        (SmallForLarge, r"'0' \(Mine\) is wrong: .* times as long as its gain allows"),
        (BlindGains, "its gains are finite for an input of nan"),
        (BlindNorms, "its norms are finite for a signal of nan"),
        (OtherGradient, "its add_gradient is not the gradient that torch finds"),
    ],
)
def test_a_wrong_rule_is_refused(rule: type[layers.LayerRule], message: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(ModelRefused, match=message):
        prepared(Mine(6, 4), rule)


def test_a_rule_of_the_package_for_another_layer_is_tried_too() -> None:
    with pytest.raises(ModelRefused, match=r"'0' \(Doubled\) is wrong: its add_gradient is not the gradient"):
        prepared(Doubled(6, 4), LinearRule)


def test_a_wrong_rule_is_refused_in_weight_space() -> None:
    with pytest.raises(ModelRefused, match="its with_weights does not give the output of the layer"):
        prepared(Mine(6, 4), OthersWeights, space="weight")


def test_a_right_rule_is_accepted() -> None:
    for space in ("output", "weight"):
        sites = prepared(Mine(6, 4), LinearRule, space=space).sites
        assert type(sites[0].rule) is LinearRule


def test_the_signal_that_is_lengthened_most_is_found() -> None:
    """A random signal in many positions would not show it."""
    torch.manual_seed(0)
    layer, x = Mine(4, 5, bias=False), torch.rand(3, 30, 4)
    rule = TypicalGains(layer, dict(layer.named_parameters()))
    with torch.inference_mode(), pytest.raises(ModelRefused, match="times as long as its gain allows"):
        check_rule(rule, Call((x,), {}, layer(x)), "'layer'", output_space=True)


class Steps(nn.Linear):
    """Nothing that autograd can take: only the bounds are checked."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(super().forward(x).detach().numpy())


def test_where_torch_finds_no_gradient_the_bound_is_still_checked() -> None:
    layer, x = Steps(6, 4), torch.rand(3, 6)
    rule, call = SmallGains(layer, dict(layer.named_parameters())), Call((x,), {}, layer(x))
    with torch.inference_mode(), pytest.raises(ModelRefused, match="is 50 times as long as its gain allows"):
        check_rule(rule, call, "'layer'", output_space=True)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(4, 3), (4,)),
        (nn.Linear(4, 3), (5, 4)),
        (nn.Conv2d(2, 3, 3, padding=1), (2, 5, 5)),
        (nn.Conv1d(4, 4, 3, groups=2, bias=False), (4, 9)),
        (nn.LayerNorm(4), (3, 4)),
        (nn.GroupNorm(2, 4), (4, 3)),
        (nn.Embedding(5, 3), (4,)),
    ],
    ids=str,
)
def test_the_rules_of_the_package_pass(layer: nn.Module, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = isinstance(layer, nn.Embedding)
    x = torch.randint(0, 5, (3, *shape), generator=generator) if whole else torch.rand(3, *shape, generator=generator)
    rule = rule_for(layer, dict(layer.named_parameters()))
    assert not layers.is_foreign(rule)
    with torch.inference_mode():
        call = Call((x,), {}, layer(x))
        for output_space in (True, False):
            check_rule(rule, call, "'layer'", output_space=output_space)


def test_rules_of_the_package_are_told_from_those_of_others() -> None:
    dpulr.layers.register(Mine, LinearRule)
    dpulr.layers.register(nn.Linear, SmallGains)
    found = {type(module): rule_for(module, dict(module.named_parameters())) for module in (Mine(2, 2), nn.Linear(2, 2))}
    assert all(layers.is_foreign(rule) for rule in found.values())
    assert not layers.is_foreign(rule_for(nn.PReLU(), {}))
    assert {type(rule) for rule in found.values()} == {LinearRule, SmallGains}
