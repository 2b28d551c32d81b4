"""A model as a program (torch.export, dynamic batch dimension): where torch.fx can't take it apart, or its forward reads values.

An export runs the model on tensors without values: what it captures can't branch on a record. Every trained layer stays a module of
its own in the program, which calls the very objects of the model. What a layer puts out for the whole batch at once (positions, a
class token, a bias of attention) becomes a module that gives it to each record, so that each record can have its own.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from dpulr.model.batches import call_on_copy
from dpulr.model.graph import Untraceable
from dpulr.model.layers import has_rule, register
from dpulr.model.layers.base import LayerRule
from dpulr.model.losses import LossFunction
from dpulr.model.opaque import is_program
from dpulr.model.passes import hooks

_BROADCAST = {"add", "mul", "sub", "div", "where"}
"""Operations that line up axes from the last one on."""


class Exported(NamedTuple):
    """The program, and the loss of what it puts out: the model's output if that is a tensor, else the tensors in it, in order."""

    program: fx.GraphModule
    loss_fn: LossFunction


def export(model: nn.Module, loss_fn: LossFunction, probes: list[tuple[Any, Any]]) -> Exported:
    """Raises Untraceable. The probes are synthetic batches of two sizes."""
    inputs = probes[1][0]
    names = list(inputs) if isinstance(inputs, dict) else [f"input_{i}" for i in range(len(pytree.tree_leaves(inputs)))]
    flat = pytree.tree_leaves(inputs)
    if len(names) != len(flat) or not all(isinstance(leaf, Tensor) for leaf in flat):
        raise Untraceable("its inputs are nested")
    whole = _Whole(model, pytree.tree_structure(inputs))
    records = torch.export.Dim("records")
    try:
        with _no_fused_layers(), _quiet(), torch.no_grad():
            calls, kind = _calls(model, _leaves(model), probes)
            with _patched(calls):
                found = torch.export.export(whole, tuple(flat), dynamic_shapes=(tuple({0: records} for _ in flat),), strict=False)
                if any(_overwrites(node) for node in found.graph.nodes):
                    found = found.run_decompositions({})
    except Untraceable:
        raise
    except Exception as problem:  # whatever an export may raise on a user's forward
        raise Untraceable(f"torch.export: {str(problem).strip().split(chr(10), 1)[0]}") from problem
    if any(output.kind.name != "USER_OUTPUT" for output in found.graph_signature.output_specs):
        raise Untraceable("its forward pass writes into the model")
    program = _Builder(whole, names, calls, found).program()
    program.train(model.training)
    spec = found.call_spec.out_spec
    if spec.is_leaf():
        return Exported(program, loss_fn)

    def loss(output: Any, targets: Any) -> Tensor:
        filled = pytree.tree_unflatten(output, spec)
        return loss_fn(kind(**filled) if issubclass(kind, Mapping) else filled, targets)

    return Exported(program, loss)


class _Whole(nn.Module):
    """The model with flat inputs. Of an output with names, the tensors: a cache of keys, say, is no part of any loss."""

    def __init__(self, model: nn.Module, inputs: pytree.TreeSpec) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, *flat: Tensor) -> Any:
        output = call_on_copy(self.model, pytree.tree_unflatten(flat, self.inputs))
        if not isinstance(output, Mapping):
            return output
        return {name: value for name, value in output.items() if isinstance(value, Tensor)}


# --- layers, as single operations of the export -----------------------------------------------------------------------------
@dataclass(frozen=True)
class _Spec:
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
    leaves = set(_leaves(model).values())
    inside = {id(parameter) for leaf in leaves for parameter in leaf.parameters()}
    beside = any(parameter.requires_grad and id(parameter) not in inside for parameter in model.parameters())
    return bool(leaves) and (beside or any(isinstance(leaf, nn.MultiheadAttention | nn.RNNBase) for leaf in leaves))


def _leaves(model: nn.Module) -> dict[str, nn.Module]:
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


def _calls(model: nn.Module, leaves: dict[str, nn.Module], probes: list[tuple[Any, Any]]) -> tuple[list[_LayerCall], type[Any]]:
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
        calls += [_LayerCall(names[module], module, _spec(*pair)) for pair in zip(found[:turns], found[turns:], strict=True)]
    return calls, type(output)


def _spec(small: tuple[Any, Any], large: tuple[Any, Any]) -> _Spec:
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
    return _Spec(arguments, layout, [tuple(a.shape) for a, _ in tensors], axes, outputs, filled, tensors[0][0].dtype)


class _LayerCall(NamedTuple):
    """A call of a layer in a pass. Its place in the list of all calls is the number that stands for it in the export."""

    name: str
    module: nn.Module
    spec: _Spec


_EXPORTING: list[_LayerCall] = []


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
def _quiet() -> Iterator[None]:
    """What torch says of its inner workings while it exports, or fails to, is nobody's matter."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)


@contextmanager
def _no_fused_layers() -> Iterator[None]:
    """While it lasts, torch's encoder layers call the layers in them."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _patched(calls: list[_LayerCall]) -> Iterator[None]:
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


# --- from the export to a program of modules --------------------------------------------------------------------------------
class _Builder:
    """Copies the export's nodes into a graph whose layers are modules again.

    calls     the layers by the number that stands for them in the export
    fixed     nodes of the export that no input has a part in
    trained   those of them that a trained parameter has a part in: they are given to each record
    """

    def __init__(self, model: nn.Module, names: list[str], calls: list[_LayerCall], found: torch.export.ExportedProgram) -> None:
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


def _overwrites(node: fx.Node) -> bool:
    """Whether it writes to its argument: clean values are kept, so what it writes has to be a value of its own."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_check(node: fx.Node) -> bool:
    """What an export adds to refuse other shapes. They are public, and checked for each record."""
    return _name(node).startswith(("_assert", "sym_constrain")) or "_guards" in node.name
