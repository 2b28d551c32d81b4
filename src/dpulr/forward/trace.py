"""The model as a graph: what a site needs from the clean pass, and the program that lies downstream of it."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from dpulr.forward.sites import Layer, is_layer

_IN_PLACE = {getattr(operator, name) for name in dir(operator) if name.startswith("i") and f"__{name}__" in dir(operator)}


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """torch.fx leaves constant tensors as attributes of what it traces; graph modules made of it have copies by then."""
    before = set(vars(model))
    try:
        yield
    finally:
        for name in set(vars(model)) - before:
            delattr(model, name)


class Untraceable(Exception):
    """The model can't be taken apart; it is run as a whole instead."""


class _Tracer(fx.Tracer):
    """Layers and modules without parameters are single nodes: whatever they do inside, black boxes included, stays inside."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = layers

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_layer(m) or any(m is layer for layer in self.layers) or not any(True for _ in m.parameters())


def trace(model: nn.Module, inputs: Any, layers: list[nn.Module]) -> fx.Graph:
    """The graph of `model(inputs)`; arguments that are not given keep their defaults."""
    try:
        signature = inspect.signature(model.forward)
        if isinstance(inputs, dict):
            given = signature.bind(**inputs)
        elif isinstance(inputs, tuple | list):
            given = signature.bind(*inputs)
        else:
            given = signature.bind(inputs)
        fixed = {
            name: parameter.default
            for name, parameter in signature.parameters.items()
            if name not in given.arguments and parameter.default is not parameter.empty
        }
        graph = _Tracer(layers).trace(model, concrete_args=fixed or None)
    except Exception as problem:  # whatever a user's forward may raise on symbolic values: the fallback handles it
        raise Untraceable(str(problem).split("\n", 1)[0]) from problem
    _copy_before_in_place(graph, model)
    return graph


def _copy_before_in_place(graph: fx.Graph, model: nn.Module) -> None:
    """Clean values are kept, so an operation that overwrites its argument gets a copy of it; later uses see its result."""
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        in_place = (
            (node.op == "call_module" and getattr(model.get_submodule(node.target), "inplace", False) is True)
            or (node.op == "call_method" and node.target.endswith("_") and not node.target.endswith("__"))
            or (node.op == "call_function" and (node.target in _IN_PLACE or node.kwargs.get("inplace") is True))
            or (node.op == "call_function" and getattr(node.target, "__name__", "").endswith("_"))
        )
        if in_place and node.args and isinstance(node.args[0], fx.Node):
            overwritten = node.args[0]
            overwritten.replace_all_uses_with(node, partial(_later, place, place[node]))
            with graph.inserting_before(node):
                copy = graph.call_method("clone", (overwritten,))
            place[copy] = place[node]
            node.args = (copy, *node.args[1:])


def _later(place: dict[fx.Node, int], here: int, user: fx.Node) -> bool:
    return place[user] > here


@dataclass(frozen=True)
class Suffix:
    """What lies downstream of a site: a program of the site's output and of clean values (`operands`) that join it later."""

    program: fx.GraphModule
    operands: tuple[fx.Node, ...]


def clean_program(model: nn.Module, graph: fx.Graph, keep: list[fx.Node]) -> fx.GraphModule:
    """The whole graph, with the values of `keep` beside its output."""
    new = fx.Graph()
    table: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            new.output((new_arg(node.args[0], table), tuple(table[n] for n in keep)))
        else:
            table[node] = new.node_copy(node, table.__getitem__)
    return fx.GraphModule(model, new)


def suffix(model: nn.Module, graph: fx.Graph, site: fx.Node) -> Suffix:
    """The program from the output of `site` to the output of the model."""
    downstream = {site}
    for node in graph.nodes:
        if any(parent in downstream for parent in node.all_input_nodes):
            downstream.add(node)
    new = fx.Graph()
    table = {site: new.placeholder("site_output")}
    inside = [node for node in graph.nodes if node in downstream and node is not site]
    operands: list[fx.Node] = []
    for node in inside:
        for parent in node.all_input_nodes:
            if parent not in downstream and parent not in table:
                if parent.op == "get_attr":
                    table[parent] = new.node_copy(parent)
                else:
                    operands.append(parent)
                    table[parent] = new.placeholder(f"clean_{parent.name}")
    for node in inside:
        if node.op == "output":
            new.output(new_arg(node.args[0], table))
        else:
            table[node] = new.node_copy(node, table.__getitem__)
    return Suffix(fx.GraphModule(model, _placeholders_first(new)), tuple(operands))


def _placeholders_first(graph: fx.Graph) -> fx.Graph:
    first = next(iter(graph.nodes))
    for node in list(graph.nodes):
        if node.op == "placeholder" and node is not first:
            first.append(node)
            first = node
    return graph


def new_arg(value: Any, table: dict[fx.Node, fx.Node]) -> Any:
    """`value` with the graph's nodes replaced by those of the new graph."""
    return fx.node.map_arg(value, lambda node: table[node])


class Tiling:
    """How a clean value grows when every record is repeated, learned from two batch sizes.

    A tensor is repeated along the one axis that grows with the batch, a whole number that grows with it is multiplied.
    """

    def __init__(self, small: Any, large: Any, sizes: tuple[int, int]) -> None:
        self.sizes = sizes
        leaves, self.spec = pytree.tree_flatten(small)
        self.rules = [self._rule(a, b) for a, b in zip(leaves, pytree.tree_leaves(large), strict=True)]
        self.grows = any(rule is not None for rule in self.rules)

    def _rule(self, small: Any, large: Any) -> int | str | None:
        if isinstance(small, Tensor):
            axes = [i for i, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if a != b]
            if not axes:
                return None
            if len(axes) > 1 or small.shape[axes[0]] * self.sizes[1] != large.shape[axes[0]] * self.sizes[0]:
                raise Untraceable("a value grows with the batch along several axes")
            return axes[0]
        if isinstance(small, int) and not isinstance(small, bool) and small != large:
            if small * self.sizes[1] != large * self.sizes[0]:
                raise Untraceable("a number depends on the size of the batch in an unknown way")
            return "multiply"
        return None

    def __call__(self, value: Any, repeats: int) -> Any:
        if repeats == 1 or not self.grows:
            return value
        leaves = pytree.tree_leaves(value)
        tiled = [self._tiled(leaf, rule, repeats) for leaf, rule in zip(leaves, self.rules, strict=True)]
        return pytree.tree_unflatten(tiled, self.spec)

    @staticmethod
    def _tiled(leaf: Any, rule: int | str | None, repeats: int) -> Any:
        if rule is None:
            return leaf
        if isinstance(rule, int):
            counts = [1] * leaf.dim()
            counts[rule] = repeats
            return leaf.repeat(counts)
        return leaf * repeats


def layer_nodes(graph: fx.Graph, layers: list[Layer]) -> list[fx.Node]:
    """The one node of each layer. A layer called twice, or never, is refused by name."""
    by_name: dict[str, list[fx.Node]] = {layer.name: [] for layer in layers}
    for node in graph.nodes:
        if node.op == "call_module" and node.target in by_name:
            by_name[node.target].append(node)
    for layer in layers:
        refuse_calls(layer, len(by_name[layer.name]))
    return [by_name[layer.name][0] for layer in layers]


def refuse_calls(layer: Layer, calls: int) -> None:
    if calls > 1:
        raise ValueError(
            f"{layer.label} is called {calls} times in one forward pass. A record would be bounded once and felt {calls} times. "
            "Use one module per call, or freeze it (requires_grad_(False))."
        )
    if calls == 0:
        raise ValueError(
            f"{layer.label} has trained parameters, but the forward pass never calls it. "
            "Freeze it (requires_grad_(False)) or remove it."
        )
