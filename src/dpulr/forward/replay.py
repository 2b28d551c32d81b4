"""Losses under noise at one site: the clean pass once, then only what lies downstream of the site.

`prepare` takes a model apart (torch.fx) and proves on synthetic inputs that the replay gives the losses of the whole model. A model
that can't be taken apart is run as a whole with a hook at the site: the same losses, slower.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpulr.forward.checks import LossFunction, check_rows, other_weights, reads_values, without_dropout
from dpulr.forward.sites import Layer, Site, Space, enclosing, find_layers
from dpulr.forward.synthetic import call_model, call_on_copy, count, join, like, rows, tile
from dpulr.forward.trace import (
    Suffix,
    Tiling,
    Untraceable,
    attributes_restored,
    clean_program,
    layer_nodes,
    refuse_calls,
    suffix,
    trace,
)
from dpulr.layers import Call

_PROBE_SIZES = (2, 3)
_SEED = 20_240_301  # public: only made-up inputs depend on it


@dataclass
class Clean:
    """One clean pass over a batch: a loss per record, and each site's call."""

    inputs: Any
    targets: Any
    losses: Tensor
    calls: list[Call]
    output: Any
    values: dict[fx.Node, Any] = field(default_factory=dict)
    _tiled: dict[tuple[Any, int], Any] = field(default_factory=dict)

    @property
    def records(self) -> int:
        return self.losses.shape[0]

    def tiled(self, key: Any, value: Any, repeats: int, how: Any = tile) -> Any:
        """`value` repeated, kept for the other sites of this step."""
        if (key, repeats) not in self._tiled:
            self._tiled[key, repeats] = how(value, repeats)
        return self._tiled[key, repeats]


class Forward(ABC):
    """Runs a model without gradients. `bytes_per_row` is what a pass allocates for one record."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, layers: list[Layer]) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.layers = layers
        self.sites: list[Site] = []
        self.per_record: list[tuple[bool, ...]] = []
        self.bytes_per_row = 0
        self._modes = [(module, module.training) for module in model.modules()]

    @contextmanager
    def checked_mode(self) -> Iterator[None]:
        """Every module in the mode (training or not) in which it was checked, whatever mode the user left it in."""
        found = [(module, module.training) for module, _ in self._modes]
        try:
            for module, training in self._modes:
                module.training = training
            yield
        finally:
            for module, training in found:
                module.training = training

    @abstractmethod
    def clean(self, inputs: Any, targets: Any) -> Clean:
        """One pass without noise."""

    @abstractmethod
    def output(self, clean: Clean, site: int, rows: Tensor, repeats: int) -> Any:
        """The model's output when the site's output is `rows` (repeats * records, *out)."""

    def losses(self, clean: Clean, site: int, perturbed: Tensor) -> Tensor:
        """(repeats, records) losses when the site's output is `perturbed` (repeats, records, *out). Non-finite ones stay so."""
        repeats, records = perturbed.shape[:2]
        if records == 0:
            return clean.losses.new_zeros(repeats, 0)
        output = self.output(clean, site, perturbed.flatten(0, 1), repeats)
        targets = clean.tiled("targets", clean.targets, repeats)
        return self.loss_fn(output, targets).view(repeats, records)


class TracedForward(Forward):
    """Replays only the nodes downstream of a site."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, layers: list[Layer], inputs: Any) -> None:
        super().__init__(model, loss_fn, layers)
        if any(layer.module is model for layer in layers):
            raise Untraceable("the model itself holds the parameters")
        with attributes_restored(model):
            self._take_apart(model, trace(model, inputs, [layer.module for layer in layers]), layers)
        self.tilings: dict[fx.Node, Tiling] = {}

    def _take_apart(self, model: nn.Module, graph: fx.Graph, layers: list[Layer]) -> None:
        self.nodes = layer_nodes(graph, layers)
        self.suffixes: list[Suffix] = [suffix(model, graph, node) for node in self.nodes]
        wanted = {node for part in self.suffixes for node in part.operands}
        wanted |= {parent for node in self.nodes for parent in node.all_input_nodes} | set(self.nodes)
        self.keep = [node for node in graph.nodes if node in wanted]
        self.program = clean_program(model, graph, self.keep)

    def learn(self, small: Clean, large: Clean) -> None:
        """How clean values grow with the batch, from two clean passes of different size."""
        sizes = (small.records, large.records)
        self.tilings = {node: Tiling(small.values[node], large.values[node], sizes) for node in self.keep}

    def clean(self, inputs: Any, targets: Any) -> Clean:
        output, kept = call_model(self.program, inputs)
        values = dict(zip(self.keep, kept, strict=True))
        calls = []
        for i, node in enumerate(self.nodes):
            args = fx.node.map_arg(node.args, values.__getitem__)
            kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
            calls.append(Call(args, kwargs, values[node], *self.per_record[i : i + 1]))
        return Clean(inputs, targets, self.loss_fn(output, targets), calls, output, values)

    def output(self, clean: Clean, site: int, rows: Tensor, repeats: int) -> Any:
        part = self.suffixes[site]
        operands = [clean.tiled(node, clean.values[node], repeats, self.tilings[node]) for node in part.operands]
        return part.program(rows, *operands)


class HookedForward(Forward):
    """Runs the whole model and replaces the site's output on the way."""

    def clean(self, inputs: Any, targets: Any) -> Clean:
        seen: list[list[Call]] = [[] for _ in self.layers]

        def note(index: int) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                copied = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs, output))
                seen[index].append(Call(*copied, *self.per_record[index : index + 1]))

            return hook

        with _hooks([(layer.module, note(i)) for i, layer in enumerate(self.layers)]):
            output = call_on_copy(self.model, inputs)
        for layer, calls in zip(self.layers, seen, strict=True):
            refuse_calls(layer, len(calls))
        return Clean(inputs, targets, self.loss_fn(output, targets), [calls[0] for calls in seen], output)

    def output(self, clean: Clean, site: int, rows: Tensor, repeats: int) -> Any:
        return self._replaced(site, rows, clean.tiled("inputs", clean.inputs, repeats))

    def _replaced(self, site: int, rows: Tensor, inputs: Any) -> Any:
        if self.layers[site].module is self.model:
            return rows

        def replace(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor:
            return rows

        with _hooks([(self.layers[site].module, replace)]):
            return call_on_copy(self.model, inputs)


class LoneForward(HookedForward):
    """Runs the whole model on one record at a time: where it branches on values, a record's branch is then its own."""

    def clean(self, inputs: Any, targets: Any) -> Clean:
        parts = []
        for i in range(count(targets)):
            parts.append(super().clean(*rows((inputs, targets), i, i + 1)))
        calls = [
            Call(*join([(call.args, call.kwargs, call.output) for call in calls]), *self.per_record[i : i + 1])
            for i, calls in enumerate(zip(*[part.calls for part in parts], strict=True))
        ]
        return Clean(inputs, targets, torch.cat([part.losses for part in parts]), calls, join([part.output for part in parts]))

    def losses(self, clean: Clean, site: int, perturbed: Tensor) -> Tensor:
        records = perturbed.shape[1]
        batch = [rows((clean.inputs, clean.targets), i, i + 1) for i in range(records)]
        losses = []
        for j, row in enumerate(perturbed.flatten(0, 1)):
            inputs, targets = batch[j % records]
            losses.append(self.loss_fn(self._replaced(site, row.unsqueeze(0), inputs), targets))
        return torch.cat(losses).view(perturbed.shape[:2]) if losses else clean.losses.new_zeros(perturbed.shape[:2])


@contextmanager
def _hooks(hooks: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def prepare(
    model: nn.Module,
    loss_fn: LossFunction,
    example: tuple[Any, Any],
    device: torch.device,
    *,
    space: Space = "auto",
    method: str = "auto",
) -> Forward:
    """Check the model on made-up inputs and return the fastest forward that gives its losses.

    `example` is a batch of one record, of which only shapes and types are used. `method` is "auto", "trace" or "hook".
    """
    if method not in ("auto", "trace", "hook"):
        raise ValueError(f"replay is {method!r}; it must be 'auto', 'trace' or 'hook'.")
    layers = find_layers(model)
    alone = reads_values(model, loss_fn, example, device)
    check_rows(model, loss_fn, example, device, alone=alone)
    generator = torch.Generator().manual_seed(_SEED)
    probes = [like(example, size, generator, device) for size in _PROBE_SIZES]
    kind = LoneForward if alone else HookedForward
    layers = _with_plain_outputs(model, layers, lambda found: kind(model, loss_fn, found), probes)
    if alone:
        problem = "the forward pass or the loss reads the value of a tensor, as an `if` or .item() does"
        if method == "trace":
            raise ValueError(f"the model can't be traced: {problem}.")
        warnings.warn(f"running records one by one, which is slow, because {problem}", stacklevel=3)
    elif method != "hook":
        try:
            traced = TracedForward(model, loss_fn, layers, probes[0][0])
            _finish(traced, probes, space)
            with other_weights(model, keep=1.0):
                _verify(traced, HookedForward(model, loss_fn, layers), probes[1])
            return traced
        except Untraceable as problem:
            if method == "trace":
                raise ValueError(f"the model can't be traced: {problem}") from problem
            warnings.warn(f"running whole forward passes, which is slower, because {problem}", stacklevel=3)
    hooked = kind(model, loss_fn, layers)
    _finish(hooked, probes, space)
    with other_weights(model, keep=1.0):
        _check_alignment(hooked, probes[1])
    return hooked


def _with_plain_outputs(
    model: nn.Module, layers: list[Layer], forward: Callable[[list[Layer]], Forward], probes: list[tuple[Any, Any]]
) -> list[Layer]:
    """Layers that return one tensor with a row per record. One that does not (recurrent, say) gives way to the module around it."""
    while True:
        with torch.inference_mode():
            small, large = [forward(layers).clean(*probe).calls for probe in probes]
        for layer, a, b in zip(layers, small, large, strict=True):
            try:
                _carries_records(layer, a, b)
            except ValueError:
                if layer.module is model:
                    raise
                layers = enclosing(model, layers, layer)
                break
        else:
            return layers


def _finish(forward: Forward, probes: list[tuple[Any, Any]], space: Space) -> None:
    """Fill in what two probing passes show: which arguments carry records, the sites' shapes, the memory of a row."""
    with torch.inference_mode():
        counted = []
        cleans = []
        for inputs, targets in probes:
            with _Allocations() as allocations:
                cleans.append(forward.clean(inputs, targets))
            counted.append(allocations.bytes)
        small, large = cleans
        if isinstance(forward, TracedForward):
            forward.learn(small, large)
        for layer, a, b in zip(forward.layers, small.calls, large.calls, strict=True):
            forward.per_record.append(_carries_records(layer, a, b))
            forward.sites.append(Site(layer, a.output.shape[1:], space))
        forward.bytes_per_row = max(counted[1] - counted[0], 1)


def _carries_records(layer: Layer, small: Call, large: Call) -> tuple[bool, ...]:
    """For each argument of the call: does its first axis count the records? Any other growth with the batch is refused."""
    marks = []
    leaves = zip(
        [*pytree.tree_leaves((small.args, small.kwargs)), small.output],
        [*pytree.tree_leaves((large.args, large.kwargs)), large.output],
        strict=True,
    )
    for a, b in leaves:
        if not isinstance(a, Tensor) or a.shape == b.shape:
            marks.append(False)
            continue
        if a.shape[1:] != b.shape[1:] or (a.shape[0], b.shape[0]) != _PROBE_SIZES:
            raise ValueError(
                f"{layer.label} sees tensors of shape {tuple(a.shape)} for {_PROBE_SIZES[0]} records. The first axis must "
                "count the records, one row each (batch_first=True; flatten positions into later axes, not into the first)."
            )
        marks.append(True)
    if not isinstance(small.output, Tensor) or not marks.pop():
        raise ValueError(f"{layer.label} must return one tensor whose first axis counts the records.")
    return tuple(marks)


def _verify(traced: TracedForward, hooked: HookedForward, probe: tuple[Any, Any]) -> None:
    """Replay and whole passes must agree at every site, and a record's noise must reach that record's loss only."""
    _check_alignment(traced, probe)
    with torch.inference_mode(), torch.random.fork_rng(), without_dropout(traced.model):
        torch.manual_seed(_SEED)
        clean, whole = traced.clean(*probe), hooked.clean(*probe)
        for i, call in enumerate(clean.calls):
            perturbed = call.output + 0.3 * torch.randn(2, *call.output.shape, dtype=call.output.dtype, device=call.output.device)
            pairs = [
                (clean.losses, whole.losses),
                (traced.losses(clean, i, perturbed), hooked.losses(whole, i, perturbed)),
            ]
            if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True) for a, b in pairs):
                raise Untraceable(f"replaying it from {traced.layers[i].label} does not give the losses of the whole model")


def _check_alignment(forward: Forward, probe: tuple[Any, Any]) -> None:
    with torch.inference_mode(), torch.random.fork_rng():
        for i, layer in enumerate(forward.layers):
            torch.manual_seed(_SEED)
            clean = forward.clean(*probe)
            output = clean.calls[i].output
            moved = output.clone()
            moved[0] += torch.randn_like(moved[0])
            torch.manual_seed(_SEED)
            base = forward.losses(clean, i, output.unsqueeze(0))[0]
            torch.manual_seed(_SEED)
            if not torch.allclose(
                forward.losses(clean, i, moved.unsqueeze(0))[0, 1:], base[1:], rtol=1e-4, atol=1e-5, equal_nan=True
            ):
                raise ValueError(f"downstream of {layer.label} records are mixed: noise on record 0 reaches the loss of another.")


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.bytes += sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor))
        return out
