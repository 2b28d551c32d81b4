"""The layers of a model that have trained parameters. What can't be trained is named here, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from dpulr.errors import InvalidArgument, ModelRefused
from dpulr.model.layers import has_rule
from dpulr.model.moved_weights import blocks_of
from dpulr.model.opaque import is_program


@dataclass(frozen=True)
class Layer:
    """A module that owns trained parameters, itself or in the modules below it. `turn`: which of its calls in a pass is meant."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    turn: int = 0

    @property
    def label(self) -> str:
        return f"'{self.name}' ({type(self.module).__name__})" if self.name else f"the model ({type(self.module).__name__})"


def is_layer(module: nn.Module) -> bool:
    """A known layer, a program, or any module with parameters of its own, even behind a parametrization: it is run as a whole."""
    own = any(True for _ in module.parameters(recurse=False))
    return own or has_rule(module) or is_parametrized(module) or is_program(module)


def find_layers(model: nn.Module, *, shared: bool = False) -> list[Layer]:
    """All layers with trained parameters, in the order of registration. Raises ModelRefused by name.

    `shared`: layers may share parameters, because a record's influence is bounded over all of their calls.
    """
    modules = {module: name for name, module in reversed(list(_walk("", model)))} if shared else {}
    layers = [
        Layer(name, module, trained_parameters(module)) for name, module in _walk("", model) if modules.get(module, name) == name
    ]
    owner: dict[nn.Parameter, Layer] = {}
    for layer in layers:
        for name, parameter in layer.module.named_parameters(remove_duplicate=False):
            _check_parameter(layer, name, parameter)
            if parameter in owner and not shared and parameter.requires_grad:
                raise ModelRefused(
                    f"parameter '{name}' of {layer.label} is tied to {owner[parameter].label}. A record's influence would be "
                    "counted once and felt twice. Untie the two, or freeze the parameter (requires_grad_(False))."
                )
            owner[parameter] = layer
        if getattr(layer.module, "sparse", False) is True:
            raise ModelRefused(f"{layer.label} asks for sparse gradients. Noise is dense: use sparse=False.")
        if getattr(layer.module, "max_norm", None) is not None:
            raise ModelRefused(f"{layer.label} has max_norm, which rewrites its weights in the forward pass. Use max_norm=None.")
    layers = [layer for layer in layers if layer.parameters]
    if not layers:
        raise ModelRefused(
            f"the model ({type(model).__name__}) has no parameter to train: none exists, or all are frozen (requires_grad=False)."
        )
    return layers


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def model_as_one_layer(model: nn.Module) -> list[Layer]:
    """The model as its only layer."""
    return [Layer("", model, trained_parameters(model))]


def with_enclosing_module(model: nn.Module, layers: list[Layer], layer: Layer) -> list[Layer]:
    """The layers with the module around `layer` in the place of all that lies in it."""
    name = layer.name.rpartition(".")[0]
    module = model.get_submodule(name)
    inside = f"{name}." if name else ""
    around = Layer(name, module, trained_parameters(module))
    first = next(i for i, other in enumerate(layers) if other.name.startswith(inside))
    kept = [other for other in layers if not other.name.startswith(inside)]
    return [*kept[:first], around, *kept[first:]]


def sharing(layers: list[Layer]) -> list[list[int]]:
    """The numbers of the layers, those that share a trained parameter together."""
    groups: list[tuple[set[nn.Parameter], list[int]]] = []
    for i, layer in enumerate(layers):
        own = set(layer.parameters.values())
        joined = [group for group in groups if group[0] & own]
        groups = [group for group in groups if not group[0] & own]
        members = sorted([i, *(member for group in joined for member in group[1])])
        groups.append((own.union(*(group[0] for group in joined)), members))
    return sorted(members for _, members in groups)


def by_turns(layers: list[Layer], calls: Mapping[nn.Module, int]) -> list[Layer]:
    """The layers, each as often as a pass calls it."""
    for layer in layers:
        if calls[layer.module] == 0:
            refuse_calls(layer, 0)
    return [replace(layer, turn=turn) for layer in layers if layer.turn == 0 for turn in range(calls[layer.module])]


def refuse_calls(layer: Layer, calls: int, expected: int = 1) -> None:
    """A layer must be called once per pass, or always as often."""
    if calls > 1 and expected > 1 and calls != expected:
        raise ModelRefused(f"{layer.label} is called {calls} times for some records, and {expected} times for others.")
    if calls > 1 and expected == 1:
        raise ModelRefused(
            f"{layer.label} is called {calls} times in one forward pass. A record would be bounded once and felt {calls} times. "
            "Use one module per call, or freeze it (requires_grad_(False))."
        )
    if calls == 0:
        raise ModelRefused(
            f"{layer.label} has trained parameters, but the forward pass never calls it. "
            "Freeze it (requires_grad_(False)) or remove it."
        )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.device:
    """The optimizer must hold just what is trained; all of it in one place and of one type. Returns that place."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"the optimizer must be a torch optimizer, not {type(optimizer).__name__}.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgument(
            "LBFGS evaluates the loss several times per step, which nothing accounts for. Use SGD, Adam or the like."
        )
    names = {parameter: name for name, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in held:
        if parameter not in names:
            raise InvalidArgument(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's. Build it from "
                "model.parameters() of this very model."
            )
    trained = [parameter for parameter in names if parameter.requires_grad]
    left_out = [names[parameter] for parameter in trained if not any(parameter is other for other in held)]
    if left_out:
        raise InvalidArgument(
            f"the optimizer does not hold {', '.join(map(repr, left_out[:3]))}, which would cost privacy and never move. Add it, "
            "or freeze it (requires_grad_(False))."
        )
    for parameter in trained:
        if parameter.is_floating_point() and parameter.dtype not in (torch.float32, torch.float64):
            raise ModelRefused(
                f"parameter '{names[parameter]}' is of type {parameter.dtype}: its rounding is coarser than the bound on a record. "
                "Train in float32 or float64."
            )
    kinds = {(parameter.device, parameter.dtype) for parameter in trained}
    if len(kinds) > 1:
        raise ModelRefused(f"all trained parameters must share one device and type; found {', '.join(sorted(map(str, kinds)))}.")
    return trained[0].device if trained else torch.device("cpu")


def _walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if is_layer(module):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _walk(f"{name}.{child_name}" if name else child_name, child)


_NO_PLACE = {
    "meta": "where parameters have no values. Give them some (model.to_empty) on another device",
    "mps": "which has no float64, in which records are summed and noise is added. Move it to the CPU or to CUDA",
}


def _check_parameter(layer: Layer, name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ModelRefused(f"parameter '{name}' of {layer.label} has no shape yet. Run the model once before.")
    if parameter.device.type in _NO_PLACE:
        raise ModelRefused(
            f"parameter '{name}' of {layer.label} is on the device '{parameter.device}', {_NO_PLACE[parameter.device.type]}."
        )
    if parameter.layout != torch.strided:
        raise ModelRefused(f"parameter '{name}' of {layer.label} is sparse. Noise is dense: use a dense parameter.")
    if parameter.requires_grad and not parameter.is_floating_point():
        raise ModelRefused(f"parameter '{name}' of {layer.label} is of type {parameter.dtype}; only real numbers can be trained.")
    if not all(bool(torch.isfinite(block).all()) for block in blocks_of(parameter)):
        raise ModelRefused(f"parameter '{name}' of {layer.label} holds NaN or infinity before the first step.")
