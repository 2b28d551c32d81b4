"""Layers as single operations of an export (torch.export): how a pass calls each, and what stands for it meanwhile.

A layer that returns several tensors, or records along another axis, is packed into rows. What a layer puts out for all records at
once becomes a module that gives it to each record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpulr.model.batches import call_on_copy
from dpulr.model.graph import Untraceable
from dpulr.model.layers import has_rule, register
from dpulr.model.layers.base import LayerRule
from dpulr.model.opaque import is_program
from dpulr.model.passes import hooks


@dataclass(frozen=True)
class Spec:
    """One layer's call, from two sizes of batches: its arguments, and where in each part of its output records are counted.

    axes is None for a part that has no records; `filled` tells tensors from None. A layer that returns one tensor with records
    first is called as it is.
    """

    arguments: list[Any]
    layout: Any
    shapes: list[tuple[int, ...]]
    axes: list[int | None]
    outputs: Any
    filled: list[bool]
    dtype: torch.dtype

    @property
    def plain(self) -> bool:
        return len(self.shapes) == 1 and self.axes == [0] and self.outputs == pytree.tree_structure(torch.empty(0))

    @property
    def whole(self) -> bool:
        """Nothing it puts out counts records."""
        return all(axis is None for axis in self.axes)

    def rest(self, part: int) -> list[int]:
        """The part's shape without records."""
        return [n for i, n in enumerate(self.shapes[part]) if i != self.axes[part]]

    def unpacked(self, packed: Tensor) -> Any:
        """What the layer returned, from (records, all its numbers)."""
        sizes = [math.prod(self.rest(i)) for i in range(len(self.shapes))]
        parts = iter(
            part.reshape(part.shape[0], *self.rest(i)).movedim(0, axis)
            for i, (part, axis) in enumerate(zip(packed.split_with_sizes(sizes, dim=1), self.axes, strict=True))
            if axis is not None
        )
        return pytree.tree_unflatten([next(parts) if filled else None for filled in self.filled], self.outputs)


class Packed(nn.Module):
    """A layer that returns several tensors, or records along another axis: all its numbers, a row per record."""

    def __init__(self, layer: nn.Module, axes: list[int | None]) -> None:
        super().__init__()
        self.layer, self.axes = layer, tuple(axes)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        leaves = [leaf for leaf in pytree.tree_leaves(self.layer(*args, **kwargs)) if isinstance(leaf, Tensor)]
        return torch.cat([leaf.movedim(axis or 0, 0).flatten(1) for leaf, axis in zip(leaves, self.axes, strict=True)], dim=1)


class Each(nn.Module):
    """What is the same for all records, given to each: a row for every row of `like`."""

    def __init__(self, chain: nn.Module) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, like: Tensor, *args: Any) -> Tensor:
        found: Tensor = self.chain(*args)
        return found.expand(like.shape[0], *found.shape[1:])


register(Packed, LayerRule)
register(Each, LayerRule)


def is_worth_it(model: nn.Module) -> bool:
    """Whether the model has parameters beside its layers, or layers that return several tensors: fx makes one site of them."""
    leaves = set(layers_in(model).values())
    inside = {id(parameter) for leaf in leaves for parameter in leaf.parameters()}
    beside = any(parameter.requires_grad and id(parameter) not in inside for parameter in model.parameters())
    return bool(leaves) and (beside or any(isinstance(leaf, nn.MultiheadAttention | nn.RNNBase) for leaf in leaves))


def layers_in(model: nn.Module) -> dict[str, nn.Module]:
    """The trained layers that stay modules: known kinds, and whatever holds parameters and has no layer inside."""
    found: dict[str, nn.Module] = {}

    def walk(name: str, module: nn.Module) -> None:
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return
        own = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        inner = any(True for child in module.children() for _ in child.parameters())
        known = isinstance(module, nn.MultiheadAttention | nn.RNNBase) or has_rule(module) or is_program(module)
        if name and (known or (own and not inner)):
            found[name] = module
            return
        for child_name, child in module.named_children():
            walk(f"{name}.{child_name}" if name else child_name, child)

    walk("", model)
    return found


def layer_calls(model: nn.Module, leaves: dict[str, nn.Module], probes: list[tuple[Any, Any]]) -> tuple[list[LayerCall], type[Any]]:
    """The calls of all layers, in order, layer by layer; and the class of the model's output."""
    seen: dict[nn.Module, list[tuple[Any, Any]]] = {module: [] for module in leaves.values()}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen[module].append(((args, kwargs), output))

    with torch.inference_mode(), torch.random.fork_rng(), hooks([(module, note) for module in seen]):
        for inputs, _ in probes:
            output = call_on_copy(model, inputs)
    names = {module: name for name, module in reversed(leaves.items())}
    calls = []
    for module, found in seen.items():
        turns = len(found) // 2
        calls += [LayerCall(names[module], module, _spec(*pair)) for pair in zip(found[:turns], found[turns:], strict=True)]
    return calls, type(output)


def _spec(small: tuple[Any, Any], large: tuple[Any, Any]) -> Spec:
    arguments, layout = pytree.tree_flatten(small[0])
    if any(a != b for a, b in zip(arguments, pytree.tree_leaves(large[0]), strict=True) if not isinstance(a, Tensor)):
        raise Untraceable("a layer is given the size of the batch as a number")
    parts, outputs = pytree.tree_flatten(small[1])
    others = pytree.tree_leaves(large[1])
    if (
        any(not isinstance(part, Tensor) for part in parts if part is not None)
        or len({p.dtype for p in parts if p is not None}) != 1
    ):
        raise Untraceable("a layer returns something else than tensors of one type")
    filled = [part is not None for part in parts]
    tensors = [(a, b) for a, b in zip(parts, others, strict=True) if a is not None]
    axes = [next((i for i, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if n != m), None) for a, b in tensors]
    if any(axis is None for axis in axes) and any(axis is not None for axis in axes):
        raise Untraceable("a layer returns something that has no records beside something that has")
    return Spec(arguments, layout, [tuple(a.shape) for a, _ in tensors], axes, outputs, filled, tensors[0][0].dtype)


class LayerCall(NamedTuple):
    """A call of a layer in a pass. Its place in the list of all calls is the number that stands for it in the export."""

    name: str
    module: nn.Module
    spec: Spec


_EXPORTING: list[LayerCall] = []


@torch.library.custom_op("dpulr::layer", mutates_args=())
def _layer(number: int, inputs: list[Tensor]) -> Tensor:
    raise RuntimeError("it stands for a layer while a model is exported")


@_layer.register_fake
def _(number: int, inputs: list[Tensor]) -> Tensor:
    spec = _EXPORTING[number].spec
    if spec.whole:
        return inputs[0].new_empty(spec.shapes[0], dtype=spec.dtype)
    records = next(x.shape[0] for x in inputs)
    if spec.plain:
        return inputs[0].new_empty((records, *spec.rest(0)), dtype=spec.dtype)
    return inputs[0].new_empty((records, sum(math.prod(spec.rest(i)) for i in range(len(spec.shapes)))), dtype=spec.dtype)


@contextmanager
def no_fused_layers() -> Iterator[None]:
    """While it lasts, torch's encoder layers call the layers in them."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def standing_for(calls: list[LayerCall]) -> Iterator[None]:
    """While it lasts, the layers are single operations."""
    turns: dict[nn.Module, Iterator[int]] = {}
    for call in calls:
        turns.setdefault(call.module, iter([i for i, other in enumerate(calls) if other.module is call.module]))

    def stand_in(module: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            number = next(turns[module])
            inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            out, spec = torch.ops.dpulr.layer(number, inputs), calls[number].spec
            return out if spec.plain or spec.whole else spec.unpacked(out)

        return forward

    own = {module: vars(module).get("forward") for module in turns}
    try:
        _EXPORTING[:] = calls
        for module in turns:
            vars(module)["forward"] = stand_in(module)
        yield
    finally:
        _EXPORTING.clear()
        for module, before in own.items():
            vars(module).pop("forward")
            if before is not None:
                vars(module)["forward"] = before
