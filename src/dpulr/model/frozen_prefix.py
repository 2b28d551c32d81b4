"""A model cut in two before its first trained layer: what can be computed once per record, and the rest, which is trained.

The rest calls the very layers of the model, so that training it trains the model. What it needs of the frozen part are a few values
per record. Sizes that depend on the batch are computed again, and so is what is made of the inputs alone, without a layer, if it is
larger than they are: a mask for each pair of tokens, say.
"""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from dpulr.errors import ModelRefused
from dpulr.model.batches import call_on_copy
from dpulr.model.each_record import row_sums
from dpulr.model.equal_rows import EqualRows
from dpulr.model.fastest_way import exported_if_better
from dpulr.model.graph import Untraceable, trace
from dpulr.model.trained_layers import find_layers
from dpulr.model.trials import CLOSE, PROBE_SIZES, SEED, Probe, other_weights, probes_of
from dpulr.model.value_reads import observe
from dpulr.randomness import public_seed


class Cut(NamedTuple):
    """`prefix(inputs)` gives a tuple of tensors with a row per record; `rest` takes them and gives what the model gives."""

    prefix: fx.GraphModule
    rest: fx.GraphModule


def cut(model: nn.Module, example: tuple[Any, Any], device: torch.device) -> Cut:
    """Of `example`, a batch of one record, only shapes and types are used. Refuses a model that can't be cut, with the reason."""
    probes = probes_of(example, device)
    seen = observe(model, row_sums, example, device)
    with torch.inference_mode(), torch.random.fork_rng():
        output = call_on_copy(model, probes[0][0])
    if not isinstance(output, Tensor):
        raise ModelRefused(
            f"the model returns {type(output).__name__}, and must return a tensor, so that its frozen layers can be computed once: "
            "wrap it in a module that does."
        )
    root, _, found = exported_if_better(model, row_sums, example, device, seen, sites=True)
    if found.reads is not None:
        raise ModelRefused(f"its frozen layers can't be computed once, because {found.reads}.")
    try:
        if root is model:
            graph = trace(model, probes[0][0], [layer.module for layer in find_layers(model, shared=True)])
        else:
            graph = root.graph  # type: ignore[assignment]
        parts = _Cutting(root, graph, probes).parts()
        _verify(model, parts, probes[1], draws=found.draws)
    except Untraceable as problem:
        raise ModelRefused(f"its frozen layers can't be told from the others: {problem}.") from problem
    return parts


def _verify(model: nn.Module, parts: Cut, probe: Probe, *, draws: bool) -> None:
    """Both parts together must give what the model gives; with dropout in the rest, under equal masks."""

    def output(run: Any) -> Tensor:
        public_seed(SEED)
        with EqualRows(1, counted=False) if draws else nullcontext():
            found: Tensor = call_on_copy(run, probe[0])
        return found

    for keep in (1.0, 0.0):
        with other_weights(model.parameters(), keep=keep), torch.inference_mode(), torch.random.fork_rng():
            joined = output(lambda *args, **kwargs: parts.rest(*parts.prefix(*args, **kwargs)))
            if not torch.allclose(output(model), joined, **CLOSE):
                raise Untraceable("computed in two parts, it does not give the same")


class _Cutting:
    """The nodes of a graph, by where they belong.

    values     what each node gives for a batch of either probe
    behind     nodes that a trained parameter has a part in
    of_records nodes that hold tensors which a record's values have a part in
    kept       nodes whose values are kept, and what stands for each in the rest
    """

    def __init__(self, root: nn.Module, graph: fx.Graph, probes: list[Probe]) -> None:
        self.root, self.graph = root, graph
        self.values = [_Noting(fx.GraphModule(root, graph)).of(inputs) for inputs, _ in probes]
        self.behind: set[fx.Node] = set()
        self.of_records: set[fx.Node] = set()
        for node in graph.nodes:
            parents = node.all_input_nodes
            if self._is_trained(node) or any(parent in self.behind for parent in parents):
                self.behind.add(node)
            if node.op == "placeholder" or (self._has_tensors(node) and any(parent in self.of_records for parent in parents)):
                self.of_records.add(node)
        self.rest = fx.Graph()
        self.kept: dict[fx.Node, fx.Node] = {}
        self.table: dict[fx.Node, Any] = {}

    def parts(self) -> Cut:
        """Raises Untraceable."""
        needed = [node for user in self.graph.nodes if user in self.behind for node in user.all_input_nodes]
        places = {node: i for i, node in enumerate(self.graph.nodes)}
        for leaf in sorted({leaf for node in needed for leaf in self._to_keep(node)}, key=places.__getitem__):
            self._keep(leaf)
        if all(node.op == "placeholder" for node in self.kept):
            raise ModelRefused("no frozen layer lies before the first trained one: there is nothing to compute once.")
        for node in self.graph.nodes:
            if node in self.behind:
                made = fx.node.map_arg(node.args, self._there), fx.node.map_arg(node.kwargs, self._there)
                if node.op == "output":
                    self.rest.output(made[0][0])
                else:
                    self.table[node] = self.rest.create_node(node.op, node.target, *made, name=node.name)
        rest = fx.GraphModule(self.root, self.rest)
        rest.meta["layers inside"] = True  # model/opaque.py: its layers are called, though frozen parameters may lie beside them
        return Cut(self._prefix(), rest)

    def _prefix(self) -> fx.GraphModule:
        new, table = fx.Graph(), dict[fx.Node, fx.Node]()
        needed = _and_before(list(self.kept))
        for node in self.graph.nodes:
            if node in needed or node.op == "placeholder":
                table[node] = new.node_copy(node, table.__getitem__)
        new.output(tuple(table[node] for node in self.kept))
        return fx.GraphModule(self.root, new)

    # --- what is kept -----------------------------------------------------------------------------------------------------
    def _to_keep(self, node: fx.Node) -> set[fx.Node]:
        """The values that have to be kept so that `node`, which is not behind a trained layer, is known in the rest."""
        if node in self.behind or not self._has_tensors(node):
            return set()
        if node not in self.of_records or self._is_made_again(node):
            return {leaf for parent in node.all_input_nodes for leaf in self._to_keep(parent)}
        return {node}

    def _keep(self, node: fx.Node) -> None:
        small, large = (values[node] for values in self.values)
        if not isinstance(small, Tensor) or small.shape[:1] + large.shape[:1] != PROBE_SIZES or small.shape[1:] != large.shape[1:]:
            raise Untraceable(f"'{node.name}', which trained layers need, has no row for each record")
        self.kept[node] = self.table[node] = self.rest.placeholder(f"kept_{len(self.kept)}")

    def _is_made_again(self, node: fx.Node) -> bool:
        """Made of inputs alone, without a layer, and larger than they are."""
        before = _and_before([node])
        if any(one.op == "call_module" or isinstance(self._attribute(one), nn.Parameter) for one in before):
            return False
        inputs = {one for one in before if one.op == "placeholder"}
        return node not in inputs and self._bytes(node) > sum(map(self._bytes, inputs))

    def _there(self, node: fx.Node) -> Any:
        """What stands for a node in the rest."""
        if node not in self.table:
            if node.op == "get_attr" or self._has_tensors(node):
                made = fx.node.map_arg(node.args, self._there), fx.node.map_arg(node.kwargs, self._there)
                self.table[node] = self.rest.create_node(node.op, node.target, *made, name=node.name)
            else:
                leaves, spec = pytree.tree_flatten(self.values[0][node])
                numbers = [self._number(*pair) for pair in zip(leaves, pytree.tree_leaves(self.values[1][node]), strict=True)]
                self.table[node] = pytree.tree_unflatten(numbers, spec)
        return self.table[node]

    def _number(self, small: Any, large: Any) -> Any:
        """Something that is no tensor: the same for all batches, or in proportion to their size."""
        if small == large:
            return small
        times = small // PROBE_SIZES[0] if isinstance(small, int) else 0
        if (small, large) != (times * PROBE_SIZES[0], times * PROBE_SIZES[1]):
            raise Untraceable("a number depends on the size of the batch in an unknown way")
        size = self.rest.call_function(torch.ops.aten.sym_size.int, (next(iter(self.kept.values())), 0))
        return size if times == 1 else self.rest.call_function(operator.mul, (size, times))

    # --- single nodes -----------------------------------------------------------------------------------------------------
    def _is_trained(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return any(parameter.requires_grad for parameter in self.root.get_submodule(str(node.target)).parameters())
        found = self._attribute(node)
        return isinstance(found, nn.Parameter) and found.requires_grad

    def _attribute(self, node: fx.Node) -> Any:
        return operator.attrgetter(str(node.target))(self.root) if node.op == "get_attr" else None

    def _has_tensors(self, node: fx.Node) -> bool:
        return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(self.values[0].get(node)))

    def _bytes(self, node: fx.Node) -> int:
        leaves = pytree.tree_leaves(self.values[0][node])
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))


def _and_before(nodes: list[fx.Node]) -> set[fx.Node]:
    """These nodes and all that they are computed from."""
    found, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


class _Noting(fx.Interpreter):
    """Notes what every node gives."""

    def of(self, inputs: Any) -> dict[fx.Node, Any]:
        self.noted: dict[fx.Node, Any] = {}
        with torch.inference_mode(), torch.random.fork_rng():
            public_seed(SEED)
            call_on_copy(self._run, inputs)
        return self.noted

    def _run(self, *args: Any, **kwargs: Any) -> None:
        nodes = [node for node in self.graph.nodes if node.op == "placeholder"]
        defaults = {node.target: node.args[0] if node.args else None for node in nodes}
        given = dict(zip(defaults, args, strict=False)) | kwargs
        self.run(*(defaults | given).values())

    def run_node(self, n: fx.Node) -> Any:
        self.noted[n] = found = super().run_node(n)
        return found
