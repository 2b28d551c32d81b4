"""Linear layers and convolutions that round their weights: to signs, to a few levels, by fake quantisation.

Such a layer computes Q(weight) x + bias, and Q is flat almost everywhere: moving its weights a little moves nothing. It is moved at
its output instead, and what a record says about Q(weight) is taken for what it says about the weight itself ("straight through", as
all training of binary networks does). A record's share is bounded as that of any linear layer is, whatever Q does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpulr.model.layers.affine import AffineRule, ConvRule, LinearRule
from dpulr.model.layers.base import Call, LayerRule

_NUDGE = 3e-4
_STILL, _FEW = 0.1, 0.1
_LEAST_LIKENESS = 0.5
_CONVOLUTIONS = {1: (F.conv1d, nn.Conv1d), 2: (F.conv2d, nn.Conv2d), 3: (F.conv3d, nn.Conv3d)}


class StraightThroughRule(AffineRule):
    """An affine rule of the rounded weight. In weight space the module is run as it is."""

    straight_through: ClassVar[bool] = True

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        """`parameters` by their names in the module: the weight, then the bias if it is trained."""
        super().__init__(module, dict(zip(("weight", "bias"), parameters.values(), strict=False)))
        self._as_it_is = LayerRule(module, parameters)

    def with_weights(self, call: Call, flat: Tensor) -> Tensor:
        return self._as_it_is.with_weights(call, flat)

    def weight_pair(self, call: Call, flat: Tensor) -> tuple[Tensor, Tensor]:
        return self._as_it_is.weight_pair(call, flat)

    def record_weight_gradients(self, call: Call, slope: Tensor) -> Tensor:
        return self._as_it_is.record_weight_gradients(call, slope)


class RoundedLinearRule(StraightThroughRule, LinearRule):
    """`x @ Q(weight).T + bias`."""


class RoundedConvRule(StraightThroughRule, ConvRule):
    """A convolution with Q(weight); `like` has its stride, padding, dilation and groups."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter], like: Any) -> None:
        super().__init__(module, parameters)
        self.module = like


def straight_through(module: nn.Module, parameters: Mapping[str, nn.Parameter], call: Call) -> StraightThroughRule | None:
    """The rule of a layer that rounds its weights; None for any other. Found by running it on synthetic inputs."""
    if len(call.args) != 1 or call.kwargs or not isinstance(call.input, Tensor) or not call.input.is_floating_point():
        return None
    weight, *rest = sorted(parameters.items(), key=lambda item: -item[1].dim())
    if weight[1].dim() < 2 or len(rest) > 1 or any(bias.shape != weight[1].shape[:1] for _, bias in rest):
        return None
    ordered = dict([weight, *rest])
    with suppress(Exception), _without_output_rounding(module):  # whatever a module does on inputs that are not its own
        if weight[1].dim() == 2:
            return RoundedLinearRule(module, ordered) if _rounds(_linear_map, module, *weight, call.input) else None
        like = _convolution(module, call.input, weight[1])
        if like is not None and _rounds(_convolved_with, module, *weight, call.input):
            return RoundedConvRule(module, ordered, like)
    return None


@contextmanager
def _without_output_rounding(module: nn.Module) -> Iterator[None]:
    """While it lasts, torch's own hooks, which round the output of a layer for quantisation, are off."""
    hooks = module._forward_hooks
    try:
        module._forward_hooks = OrderedDict(
            (key, hook) for key, hook in hooks.items() if not hook.__module__.startswith("torch.ao.quantization")
        )
        yield
    finally:
        module._forward_hooks = hooks


def _rounds(effective: Any, module: nn.Module, name: str, weight: nn.Parameter, x: Tensor) -> bool:
    """Whether the layer's matrix looks like its weight, and stays where it is when the weight moves a little."""
    first = effective(module, {}, weight.shape, x)
    if first is None:
        return False
    signs = 2 * torch.randint(0, 2, weight.shape, generator=torch.Generator().manual_seed(0)).to(weight) - 1
    nudge = _NUDGE * weight.detach() * signs
    second = effective(module, {name: weight.detach() + nudge}, weight.shape, x)
    likeness = F.cosine_similarity(first.flatten(), weight.detach().flatten(), dim=0)
    moved = (second - first).abs() > _STILL * nudge.abs().mean()
    return bool(likeness > _LEAST_LIKENESS) and bool(moved.float().mean() < _FEW)


def _linear_map(module: nn.Module, weights: dict[str, Tensor], shape: torch.Size, x: Tensor) -> Tensor | None:
    """The matrix of the layer, from what it does to unit vectors; None if it is not affine in its input."""
    outputs, inputs = shape
    if x.shape[-1] != inputs:
        return None
    lead = x.shape[1:-1]
    records = -(-(inputs + 2) // lead.numel())
    rows = x.new_zeros(records * lead.numel(), inputs)
    rows[:inputs] = torch.eye(inputs, dtype=x.dtype, device=x.device)
    rows[inputs] = torch.linspace(-1, 1, inputs, dtype=x.dtype, device=x.device)
    out = torch.func.functional_call(module, weights, (rows.view(records, *lead, inputs),))
    if out.shape != (records, *lead, outputs):
        return None
    out = out.reshape(-1, outputs)
    matrix = (out[:inputs] - out[-1]).t()
    return matrix if torch.allclose(matrix @ rows[inputs], out[inputs] - out[-1], rtol=1e-3, atol=1e-3) else None


class _Convolutions(TorchFunctionMode):
    """Notes the convolutions that a module calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(func is function for function, _ in _CONVOLUTIONS.values()):
            self.calls.append((args, kwargs or {}, out))
        return out


def _convolution(module: nn.Module, x: Tensor, weight: Tensor) -> Any:
    """A plain convolution of the same geometry, if the module's output is that of one convolution of its input; else None."""
    x = x[:1].clone()
    with _Convolutions() as seen:
        out = module(x)
    if len(seen.calls) != 1 or seen.calls[0][0][0] is not x or seen.calls[0][2] is not out:
        return None
    args, kwargs, _ = seen.calls[0]
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given["weight"].shape != weight.shape:
        return None
    how = {key: given[key] for key in ("stride", "padding", "dilation", "groups") if key in given}
    kind: Any = _CONVOLUTIONS[weight.dim() - 2][1]
    return kind(weight.shape[1] * how.get("groups", 1), weight.shape[0], tuple(weight.shape[2:]), device="meta", **how)


def _convolved_with(module: nn.Module, weights: dict[str, Tensor], shape: torch.Size, x: Tensor) -> Tensor | None:
    """The weights that the module hands to its convolution."""
    with _Convolutions() as seen:
        torch.func.functional_call(module, weights, (x[:1],))
    args, kwargs, _ = seen.calls[0]
    found: Tensor = args[1] if len(args) > 1 else kwargs["weight"]
    return found
