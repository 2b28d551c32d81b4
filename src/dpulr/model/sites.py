"""Where noise goes in: one site per layer with trained parameters. What can't be handled is named here, up front."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from dpulr.model.layers import LayerRule, has_rule, rule_for
from dpulr.model.layers.base import Call, flat_norm, numel

Space = Literal["auto", "output", "weight"]


@dataclass(frozen=True)
class Layer:
    """A module that owns trained parameters, itself or in the modules below it."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]

    @property
    def label(self) -> str:
        return f"'{self.name}' ({type(self.module).__name__})" if self.name else f"the model ({type(self.module).__name__})"


def is_layer(module: nn.Module) -> bool:
    """A known layer, or any module with parameters of its own: it is run as a whole."""
    return has_rule(module) or any(True for _ in module.parameters(recurse=False))


def find_layers(model: nn.Module) -> list[Layer]:
    """All layers with trained parameters, in the order of registration. Raises ValueError by name."""
    layers = [
        Layer(name, module, {n: p for n, p in module.named_parameters() if p.requires_grad}) for name, module in _walk("", model)
    ]
    owner: dict[nn.Parameter, Layer] = {}
    for layer in layers:
        for name, parameter in layer.module.named_parameters(remove_duplicate=False):
            _check_parameter(layer, name, parameter)
            if parameter in owner and (owner[parameter] is not layer or parameter.requires_grad):
                raise ValueError(
                    f"parameter '{name}' of {layer.label} is tied to {owner[parameter].label}. A record's influence would be "
                    "counted once and felt twice. Untie the two, or freeze the parameter (requires_grad_(False))."
                )
            owner[parameter] = layer
        if getattr(layer.module, "sparse", False) is True:
            raise ValueError(f"{layer.label} asks for sparse gradients. Noise is dense: use sparse=False.")
        if getattr(layer.module, "max_norm", None) is not None:
            raise ValueError(f"{layer.label} has max_norm, which rewrites its weights in the forward pass. Use max_norm=None.")
    layers = [layer for layer in layers if layer.parameters]
    if not layers:
        raise ValueError(
            f"the model ({type(model).__name__}) has no parameter to train: none exists, or all are frozen (requires_grad=False)."
        )
    return layers


def whole(model: nn.Module) -> list[Layer]:
    """The model as its only layer."""
    return [Layer("", model, {n: p for n, p in model.named_parameters() if p.requires_grad})]


def enclosing(model: nn.Module, layers: list[Layer], layer: Layer) -> list[Layer]:
    """The layers with the module around `layer` in the place of all that lies in it."""
    name = layer.name.rpartition(".")[0]
    module = model.get_submodule(name)
    inside = f"{name}." if name else ""
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    around = Layer(name, module, parameters)
    first = next(i for i, other in enumerate(layers) if other.name.startswith(inside))
    kept = [other for other in layers if not other.name.startswith(inside)]
    return [*kept[:first], around, *kept[first:]]


def _walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if is_layer(module):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _walk(f"{name}.{child_name}" if name else child_name, child)


def _check_parameter(layer: Layer, name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(f"parameter '{name}' of {layer.label} has no shape yet. Run the model once before.")
    if parameter.layout != torch.strided:
        raise ValueError(f"parameter '{name}' of {layer.label} is sparse. Noise is dense: use a dense parameter.")
    if parameter.requires_grad and not parameter.is_floating_point():
        raise ValueError(f"parameter '{name}' of {layer.label} is of type {parameter.dtype}; only real numbers can be trained.")
    if not bool(torch.isfinite(parameter.detach()).all()):
        raise ValueError(f"parameter '{name}' of {layer.label} holds NaN or infinity before the first step.")


class Site:
    """A layer and the space its noise lives in: its output or its weights.

    `dim` is the size of that space. A signal is (records, dim), a perturbation (repeats, records, dim).
    """

    def __init__(self, layer: Layer, output_shape: torch.Size, space: Space = "auto") -> None:
        if space not in get_args(Space):
            raise ValueError(f"space is {space!r}; it must be 'auto', 'output' or 'weight'.")
        self.layer = layer
        self.name = layer.name
        self.rule: LayerRule = rule_for(layer.module, layer.parameters)
        self.output_shape = output_shape
        output_dim, weight_dim = numel(output_shape), self.rule.weight_dim
        if space == "auto":
            space = "output" if self.rule.has_output_space and output_dim <= weight_dim else "weight"
        if space == "output" and not self.rule.has_output_space:
            raise ValueError(
                f"{layer.label} has no output space: its Jacobian is not known. Use space='weight' or 'auto', or register a rule."
            )
        self.space = space
        self.dim = output_dim if space == "output" else weight_dim
        self.fan_in = max((numel(p.shape[1:]) for p in layer.parameters.values() if p.dim() > 1), default=1)
        self.scale = 1.0 if space == "output" else 1 / math.sqrt(self.fan_in)
        """Weights are perturbed by so much less that the output moves about as far as it does in output space."""
        self.replay_bytes = 0
        """What a pass from here to the loss allocates for one record."""

    def __repr__(self) -> str:
        return f"Site({self.name!r}, {self.space}, dim={self.dim})"

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return self.rule.parameters

    def perturbed(self, call: Call, delta: Tensor) -> Tensor:
        """Outputs (repeats, records, *out) under the perturbation."""
        if self.space == "output":
            return call.output + delta.view(*delta.shape[:2], *self.output_shape)
        return self.rule.with_weights(call, delta)

    def perturbed_pair(self, call: Call, delta: Tensor) -> Tensor:
        """Outputs (2 * repeats, records, *out) at plus and at minus the perturbation."""
        if self.space == "output":
            delta = delta.view(*delta.shape[:2], *self.output_shape)
            pair = delta.new_empty(2, *delta.shape)
            torch.add(call.output, delta, out=pair[0])
            torch.sub(call.output, delta, out=pair[1])
            return pair.flatten(0, 1)
        return torch.cat(self.rule.weight_pair(call, delta))

    def norms(self, call: Call, signal: Tensor) -> Tensor:
        """Norm of each record's gradient."""
        if self.space == "weight":
            return flat_norm(signal)
        return self.rule.norms(call, self._shaped(signal))

    def gains(self, call: Call) -> Tensor:
        """For each record a bound on how much longer than its signal its gradient can be."""
        if self.space == "weight":
            return call.output.new_ones(call.records)
        return self.rule.gains(call)

    def add_gradient(self, call: Call, signal: Tensor, scale: Tensor, into: dict[str, Tensor], *, finite: bool = False) -> None:
        """Output space: add sum_i scale_i * gradient_i. A record whose scale, signal or input is not finite adds nothing.

        `finite` says that there is none: that saves reading the input once more.
        """
        scaled = signal * scale.unsqueeze(1)
        if not finite:
            factor = self.rule.factor(call)
            if not math.isfinite((scaled.sum() + factor.sum()).item()):
                good = torch.isfinite(factor.reshape(len(factor), numel(factor.shape[1:]))).all(1)
                bad = ~(good & torch.isfinite(scaled).all(1))
                call, scaled = call.without(bad), scaled.masked_fill(bad.unsqueeze(1), 0)
        self.rule.add_gradient(call, self._shaped(scaled), into)

    def add_weight_signal(self, signal: Tensor, scale: Tensor, into: Tensor) -> None:
        """Weight space: add sum_i scale_i * signal_i, with the same rule for what is not finite."""
        scaled = signal * scale.unsqueeze(1)
        into += scaled.masked_fill(~torch.isfinite(scaled).all(1, keepdim=True), 0).sum(0)

    def _shaped(self, signal: Tensor) -> Tensor:
        """A flat signal in the shape of the output, of which the last axis may be smaller (a subspace)."""
        lead = self.output_shape[:-1]
        return signal.view(-1, *lead, signal.shape[1] // numel(lead))
