"""From an export to a program of modules, in which every trained layer is a module again, and the very object of the model."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from dpulr.model.exported_layers import Each, LayerCall, Packed
from dpulr.model.graph import Untraceable

_BROADCAST = {"add", "mul", "sub", "div", "where"}
"""Operations that line up axes from the last one on."""


class Builder:
    """Copies the export's nodes into a graph whose layers are modules again.

    calls     the layers by the number that stands for them in the export
    fixed     nodes of the export that no input has a part in
    trained   those of them that a trained parameter has a part in: they are given to each record
    """

    def __init__(self, model: nn.Module, names: list[str], calls: list[LayerCall], found: torch.export.ExportedProgram) -> None:
        self.model, self.names, self.calls, self.found = model, names, calls, found
        self.graph, self.root = fx.Graph(), nn.Module()
        self.table: dict[fx.Node, fx.Node] = {}
        self.held = {spec.arg.name: spec.target for spec in found.graph_signature.input_specs if spec.target is not None}
        self.fixed: set[fx.Node] = set()
        self.trained: set[fx.Node] = set()

    def program(self) -> fx.GraphModule:
        nodes = [node for node in self.found.graph.nodes if not _is_check(node)]
        for node in nodes:
            self._classify(node)
        ways = [self._way(node) for node in nodes if node in self.trained and self._starts(node)]
        ends = {way[-1]: way[0] for way in ways}
        inside = {node for way in ways for node in way[:-1]}
        inputs = [node for node in nodes if node.op == "placeholder" and node.name not in self.held]
        for name, node in zip(self.names, inputs, strict=True):
            self.table[node] = self.graph.placeholder(name)
        like = self.table[inputs[0]]
        for node in nodes:
            if node in self.table or node in inside or (node in self.trained and not node.users):
                continue
            if node.op == "output":
                outputs = fx.node.map_arg(node.args[0], self.table.__getitem__)
                self.graph.output(outputs[0] if self.found.call_spec.out_spec.is_leaf() else outputs)
            elif node in ends:
                self.table[node] = self.graph.call_module(self._each(ends[node], node), (like,))
            else:
                self.table[node] = self._copied(node, self.graph, self.root, self.table)
        program = fx.GraphModule(self.root, self.graph)
        program.graph.eliminate_dead_code()
        program.recompile()
        program.meta["layers inside"] = True
        return program

    # --- what all records share -----------------------------------------------------------------------------------------
    def _classify(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            if node.name in self.held:
                self.fixed.add(node)
                value = self._value(node)
                if isinstance(value, nn.Parameter) and value.requires_grad:
                    self.trained.add(node)
        elif node.op != "output" and all(parent in self.fixed for parent in node.all_input_nodes):
            self.fixed.add(node)
            if self._is_layer(node) or any(parent in self.trained for parent in node.all_input_nodes):
                self.trained.add(node)

    def _starts(self, node: fx.Node) -> bool:
        """A trained parameter that operations use by itself, or a layer that no record has a part in."""
        return bool(node.users) and (node.op == "placeholder" or self._is_layer(node))

    def _way(self, node: fx.Node) -> list[fx.Node]:
        """To where what is shared is given to each record: its first value with an axis of length 1 in the place of records."""
        way = [node]
        while not self._may_be_given(way[-1]):
            users = list(way[-1].users)
            if len(users) != 1 or users[0] not in self.fixed:
                raise Untraceable(f"{self._label(node)} is used by the forward pass in a way that can't be given to each record")
            way.append(users[0])
        return way

    def _may_be_given(self, node: fx.Node) -> bool:
        shape = node.meta["val"].shape
        return (len(shape) > 0 and shape[0] == 1) or self._lead(node) is not None

    def _lead(self, node: fx.Node) -> int | None:
        """How many axes are missing before it, if all that use it line up axes from the last one on, with as many axes each."""
        ranks = {user.meta["val"].dim() if _name(user) in _BROADCAST and user not in self.fixed else -1 for user in node.users}
        (rank,) = ranks if len(ranks) == 1 else (-1,)
        missing = rank - node.meta["val"].dim()
        return missing if rank > 0 and missing > 0 else None

    def _each(self, start: fx.Node, end: fx.Node) -> str:
        """The module that computes `end` and gives it to each record; its name in the program."""
        inner, root, table = fx.Graph(), nn.Module(), dict[fx.Node, fx.Node]()
        needed: set[fx.Node] = set()
        waiting = [end]
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        for node in self.found.graph.nodes:
            if node in needed:
                table[node] = self._copied(node, inner, root, table)
        lead = self._lead(end) if end.meta["val"].dim() == 0 or end.meta["val"].shape[0] != 1 else None
        last = table[end]
        for _ in range(lead or 0):
            last = inner.call_function(torch.ops.aten.unsqueeze.default, (last, 0))
        inner.output(last)
        name = self.held[start.name] if start.op == "placeholder" else self.calls[cast(int, start.args[0])][0]
        if start.op == "placeholder":
            name = name.removeprefix("model.").replace(".", "_")
        self._put(self.root, name, Each(fx.GraphModule(root, inner)))
        return name

    # --- single nodes ---------------------------------------------------------------------------------------------------
    def _copied(self, node: fx.Node, graph: fx.Graph, root: nn.Module, table: dict[fx.Node, fx.Node]) -> fx.Node:
        if node.op == "placeholder":
            name = f"held.{node.name}"
            self._put(root, name, self._value(node))
            return graph.get_attr(name)
        if node.op == "get_attr":
            self._put(root, str(node.target), self._attribute(self.found.graph_module, str(node.target)))
            return graph.get_attr(str(node.target))
        if not self._is_layer(node):
            copy = graph.node_copy(node, table.__getitem__)
            if copy.target is torch.ops.aten.view.default:  # what it sees here may lie in memory in another way
                copy.target = torch.ops.aten.reshape.default
            return copy
        number, tensors = cast(tuple[int, list[fx.Node]], node.args)
        name, module, spec = self.calls[number]
        own = iter([table[tensor] for tensor in tensors])
        args, kwargs = pytree.tree_unflatten(
            [next(own) if isinstance(leaf, Tensor) else leaf for leaf in spec.arguments], spec.layout
        )
        self._put(root, name, module if spec.plain or spec.whole else Packed(module, spec.axes))
        return graph.call_module(name, args, kwargs)

    @staticmethod
    def _is_layer(node: fx.Node) -> bool:
        return node.op == "call_function" and node.target is torch.ops.dpulr.layer.default

    def _value(self, node: fx.Node) -> Any:
        target = self.held[node.name]
        try:
            return self._attribute(self.model, target)
        except AttributeError:
            return self.found.constants[target]

    @staticmethod
    def _attribute(owner: Any, path: str) -> Any:
        for part in path.split("."):
            owner = getattr(owner, part)
        return owner

    def _label(self, node: fx.Node) -> str:
        return f"'{self.held[node.name]}'" if node.name in self.held else f"'{node.name}'"

    @staticmethod
    def _put(root: nn.Module, path: str, value: Any) -> None:
        *owners, last = path.split(".")
        for part in owners:
            if not hasattr(root, part):
                root.add_module(part, nn.Module())
            root = getattr(root, part)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            root.register_buffer(last, value, persistent=False)
        else:
            setattr(root, last, value)


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return getattr(packet, "__name__", "")


def overwrites(node: fx.Node) -> bool:
    """Whether it writes to its argument: clean values are kept, so what it writes has to be a value of its own."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_check(node: fx.Node) -> bool:
    """What an export adds to refuse other shapes. They are public, and checked for each record."""
    return _name(node).startswith(("_assert", "sym_constrain")) or "_guards" in node.name
