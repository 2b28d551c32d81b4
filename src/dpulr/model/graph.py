"""The model as a graph: what a site needs from the clean pass, and the program that lies downstream of it."""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from dpulr.model.trained_layers import Layer, is_layer, refuse_calls

_IN_PLACE = {getattr(operator, name) for name in dir(operator) if name.startswith("i") and f"__{name}__" in dir(operator)}


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
    """What lies downstream of some sites, as one program for all of them.

    The rows of all sites travel together. At a site's node its block of rows joins those of the sites before it:

        site 1:  rows moved at 1 ───────────┬── rows moved at 1 ──┬── ... ── losses
        site 2:                    join ────┴── rows moved at 2 ──┤
        a skip connection brings clean values:  clean, clean ─────┘

    Arguments of the program: how many copies of the batch a block has, one block per site, the `operands` (clean values, as
    `Operand`). The rows of its output are sorted by block; `places` says where the block of each site is.
    """

    program: fx.GraphModule
    places: list[int]
    operands: tuple[fx.Node, ...]

    @property
    def in_order(self) -> bool:
        return self.places == sorted(self.places)


def clean_program(
    model: nn.Module,
    graph: fx.Graph,
    keep: list[fx.Node],
    sites: list[fx.Node],
    change: Mapping[fx.Node, Callable[[Tensor], Tensor]] | None = None,
) -> fx.GraphModule:
    """The whole graph, with the values of `keep` and the calls of `sites` beside its output. What some nodes give is changed."""
    new = fx.Graph()
    table: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            calls = tuple((new_arg(n.args, table), new_arg(n.kwargs, table), table[n]) for n in sites)
            new.output((new_arg(node.args[0], table), tuple(table[n] for n in keep), calls))
        else:
            table[node] = new.node_copy(node, table.__getitem__)
            if change and node in change:
                table[node] = new.call_function(change[node], (table[node],))
    return fx.GraphModule(model, new)


def suffix(model: nn.Module, graph: fx.Graph, sites: Sequence[fx.Node]) -> Suffix:
    """The program from the outputs of `sites` to the output of the model."""
    building = _SuffixBuilder(sites)
    for node in graph.nodes:
        building.add(node)
    return Suffix(fx.GraphModule(model, _placeholders_first(building.graph)), building.places, tuple(building.operands))


class _SuffixBuilder:
    """Copies the nodes downstream of the sites, one after the other, into a new graph.

    blocks      the arguments that carry the sites' rows
    values      the copies of nodes so far
    carries     how many blocks the value of a downstream node has; all others have none
    operands    clean values that are needed, as arguments
    joined      how many sites' blocks travel along by now
    """

    def __init__(self, sites: Sequence[fx.Node]) -> None:
        self.sites, self.graph, self.places = list(sites), fx.Graph(), [0] * len(sites)
        self.copies = self.graph.placeholder("copies")
        self.blocks = [self.graph.placeholder(f"block_{i}") for i in range(len(sites))]
        self.values: dict[fx.Node, fx.Node] = {}
        self.carries: dict[fx.Node, int] = {}
        self.operands: dict[fx.Node, fx.Node] = {}
        self.joined = 0

    def add(self, node: fx.Node) -> None:
        parents = node.all_input_nodes
        count = max((self.carries.get(parent, 0) for parent in parents), default=0)
        if node.op == "output":
            count = len(self.sites)
        if count > 0:
            table = {parent: self.with_blocks(parent, count) for parent in parents}
            if node.op == "output":
                self.graph.output(new_arg(node.args[0], table))
            else:
                self.values[node], self.carries[node] = self.graph.node_copy(node, table.__getitem__), count
        if node in self.sites:
            self.join(node)

    def join(self, node: fx.Node) -> None:
        """At a site's node its block of rows joins those of the sites before it."""
        site = self.sites.index(node)
        self.places[site] = self.joined
        if self.joined:
            parts = [self.with_blocks(node, self.joined), self.blocks[site]]
            self.values[node] = self.graph.call_function(torch.cat, (parts,))
        else:
            self.values[node] = self.blocks[site]
        self.joined += 1
        self.carries[node] = self.joined

    def with_blocks(self, node: fx.Node, count: int) -> fx.Node:
        """The value of a node in so many blocks: the clean one in those that it does not have."""
        if node.op == "get_attr":
            if node not in self.values:
                self.values[node] = self.graph.node_copy(node)
            return self.values[node]
        has = self.carries.get(node, 0)
        if has == count:
            return self.values[node]
        if node not in self.operands:
            self.operands[node] = self.graph.placeholder(f"clean_{node.name}")
        return self.graph.call_method("extended", (self.operands[node], self.values.get(node), has, count, self.copies))


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

    def extended(self, value: Any, clean: Any, has: int, count: int) -> Any:
        """`value`, that of `has` copies of the batch, with the clean one for the rest of `count` copies."""
        if not self.grows:
            return clean if has == 0 else value
        leaves = zip(pytree.tree_leaves(clean if has == 0 else value), pytree.tree_leaves(clean), self.rules, strict=True)
        return pytree.tree_unflatten([self._extended(*leaf, has, count) for leaf in leaves], self.spec)

    @staticmethod
    def _extended(leaf: Any, clean: Any, rule: int | str | None, has: int, count: int) -> Any:
        if rule is None:
            return leaf
        if not isinstance(rule, int):
            return clean * count
        return torch.cat([leaf] * (has > 0) + [clean] * (count - has), dim=rule)


class Operand(NamedTuple):
    """A clean value, and how it grows."""

    value: Any
    tiling: Tiling

    def extended(self, value: Any, has: int, count: int, copies: int) -> Any:
        return self.tiling.extended(value, self.value, has * copies, count * copies)


def layer_nodes(graph: fx.Graph, layers: list[Layer]) -> list[fx.Node]:
    """The node of each layer's call. A layer called more often than expected, or never, is refused by name."""
    by_name: dict[str, list[fx.Node]] = {layer.name: [] for layer in layers}
    turns = Counter(layer.module for layer in layers)
    for node in graph.nodes:
        if node.op == "call_module" and node.target in by_name:
            by_name[node.target].append(node)
    for layer in layers:
        refuse_calls(layer, len(by_name[layer.name]), turns[layer.module])
    return [by_name[layer.name][layer.turn] for layer in layers]
