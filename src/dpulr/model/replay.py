"""Losses under noise at sites: the clean pass once, then only what lies downstream, all sites in one pass.

A model that can't be taken apart (torch.fx) is run as a whole, once a site with a hook at it: the same losses, slower.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from dpulr.model.batches import call_model, call_on_copy, choose, count, join, rows, tile
from dpulr.model.graph import (
    Operand,
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
from dpulr.model.layers import Call
from dpulr.model.row_independence import LossFunction
from dpulr.model.sites import Layer, Site

Deltas = Sequence[tuple[int, Tensor]]
"""Sites and their perturbations (repeats, records, dim)."""


class Move(NamedTuple):
    """A site whose output is to be `perturbed` (repeats, records, *out), and sites behind it that are moved in the same pass."""

    site: int
    perturbed: Tensor
    also: Deltas = ()

    def one(self, repeat: int, record: int) -> Move:
        """The same for one row."""
        row = slice(repeat, repeat + 1), slice(record, record + 1)
        return Move(self.site, self.perturbed[row], [(site, delta[row]) for site, delta in self.also])


@dataclass
class Clean:
    """One clean pass over a batch: a loss per record, and each site's call."""

    inputs: Any
    targets: Any
    losses: Tensor
    calls: list[Call]
    output: Any
    values: dict[fx.Node, Any] = field(default_factory=dict)
    _tiled: dict[tuple[str, int], Any] = field(default_factory=dict)

    @property
    def records(self) -> int:
        return self.losses.shape[0]

    def tiled(self, key: str, value: Any, repeats: int) -> Any:
        """`value` repeated, kept for the other passes of this step."""
        if (key, repeats) not in self._tiled:
            self._tiled[key, repeats] = tile(value, repeats)
        return self._tiled[key, repeats]


class Forward(ABC):
    """Runs a model without gradients. `bytes_per_row` is what a pass allocates for one record."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, layers: list[Layer]) -> None:
        self.model = model
        self.loss_fn = _quick(loss_fn)
        self.layers = layers
        self.sites: list[Site] = []
        self.per_record: list[tuple[bool, ...]] = []
        self.bytes_per_row = 0
        self.probe: tuple[Any, Any] | None = None
        """Made-up inputs and targets, set when the model has passed all checks."""
        self._modes = [(module, module.training) for module in model.modules()]

    @contextmanager
    def checked_mode(self) -> Iterator[None]:
        """Every module in the mode (training or not) in which it was checked, whatever mode the user left it in."""
        changed = [(module, wanted) for module, wanted in self._modes if module.training != wanted]
        try:
            for module, training in changed:
                module.training = training
            yield
        finally:
            for module, training in changed:
                module.training = not training

    @abstractmethod
    def clean(self, inputs: Any, targets: Any) -> Clean:
        """One pass without noise."""

    def losses(self, clean: Clean, site: int, perturbed: Tensor) -> Tensor:
        """(repeats, records) losses when the site's output is `perturbed` (repeats, records, *out)."""
        return self.all_losses(clean, [Move(site, perturbed)])[0]

    def all_losses(self, clean: Clean, moves: Sequence[Move]) -> Tensor:
        """(moves, repeats, records) losses, one move at a time; all have as many repeats. Non-finite ones stay so.

        A record whose pass raises gets NaN there, with the perturbation it has: an error must not show which record it was, and a
        second draw would be a choice.
        """
        try:
            return self._losses(clean, moves)
        except Exception:  # whatever a black box may raise
            if self.probe is None:
                raise
            self.check_alive([move.site for move in moves])
        repeats = moves[0].perturbed.shape[0]
        losses = torch.full((len(moves), repeats, clean.records), math.nan, dtype=clean.losses.dtype, device=clean.losses.device)
        for i in range(clean.records):
            with suppress(Exception):
                alone = self.clean(*rows((clean.inputs, clean.targets), i, i + 1))
                for m, move in enumerate(moves):
                    for r in range(repeats):
                        with suppress(Exception):
                            losses[m, r, i] = self._losses(alone, [move.one(r, i)]).squeeze()
        return losses

    @abstractmethod
    def _losses(self, clean: Clean, moves: Sequence[Move]) -> Tensor:
        """`all_losses`, where nothing raises."""

    def moved_together(self, clean: Clean, deltas: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """(repeats, records) losses of passes through the whole model with every site moved, and the inputs that the sites saw.

        A row whose pass raises gets NaN, as in `all_losses`, and inputs of 0.
        """
        try:
            return self._whole(clean, deltas)
        except Exception:  # as there
            if self.probe is None:
                raise
            self.check_alive([0])
        repeats, records = deltas[0].shape[:2]
        losses = clean.losses.new_full((repeats, records), math.nan)
        inputs = [call.input.new_zeros(repeats, *call.input.shape) for call in clean.calls]
        for r, i in itertools.product(range(repeats), range(records)):
            with suppress(Exception):
                alone = self.clean(*rows((clean.inputs, clean.targets), i, i + 1))
                losses[r, i], seen = self._whole(alone, [delta[r : r + 1, i : i + 1] for delta in deltas])
                for all_rows, row in zip(inputs, seen, strict=True):
                    all_rows[r, i] = row[0]
        return losses, [all_rows.flatten(0, 1) for all_rows in inputs]

    def _whole(self, clean: Clean, deltas: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """`moved_together`, where nothing raises."""
        repeats, records = deltas[0].shape[:2]
        inputs: dict[int, Tensor] = {}
        with self._moved(list(enumerate(deltas)), inputs):
            output = call_on_copy(self.model, clean.tiled("inputs", clean.inputs, repeats))
        losses = self.loss_fn(output, clean.tiled("targets", clean.targets, repeats)).view(repeats, records)
        return losses, [inputs[site] for site in range(len(deltas))]

    @contextmanager
    def _moved(self, moves: Deltas, inputs: dict[int, Tensor] | None = None) -> Iterator[None]:
        """While it lasts, these sites add their perturbation to whatever they put out. What they see is kept in `inputs`."""
        waiting = {site for site, _ in moves}
        busy: set[int] = set()

        def hook(site: int, delta: Tensor) -> Any:
            def move(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
                if site in busy:  # a layer in weight space is run again, with other weights
                    return output
                waiting.discard(site)
                busy.add(site)
                try:
                    call = Call(args, kwargs, output, *self.per_record[site : site + 1])
                    if inputs is not None:
                        inputs[site] = call.input.clone()  # what follows may change it in place
                    return self.sites[site].perturbed(call, delta.flatten(0, 1).unsqueeze(0))[0]
                finally:
                    busy.discard(site)

            return move

        with _hooks([(self.layers[site].module, hook(site, delta)) for site, delta in moves]):
            yield
        if waiting:
            names = ", ".join(self.sites[site].layer.label for site in sorted(waiting))
            raise RuntimeError(f"{names} was not run in a pass that was to move it.")

    def surviving(self, inputs: Any, targets: Any) -> Clean | None:
        """The clean pass over the records for which it does not raise; None if there are none."""
        try:
            return self.clean(inputs, targets)
        except Exception:  # as above
            self.check_alive([0])
        kept = []
        for i in range(count(targets)):
            with suppress(Exception):
                self.clean(*rows((inputs, targets), i, i + 1))
                kept.append(i)
        with suppress(Exception):
            return self.clean(*choose((inputs, targets), torch.tensor(kept))) if kept else None
        return None

    def check_alive(self, sites: Sequence[int]) -> None:
        """A black box that is down raises on made-up inputs too. That says nothing about a record, so that error may be seen."""
        assert self.probe is not None
        clean = self.clean(*self.probe)
        self._losses(clean, [Move(site, clean.calls[site].output.unsqueeze(0)) for site in sites])


class TracedForward(Forward):
    """Replays only the nodes downstream of the sites, the rows of all sites in one pass."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, layers: list[Layer], inputs: Any) -> None:
        super().__init__(model, loss_fn, layers)
        if any(layer.module is model for layer in layers):
            raise Untraceable("the model itself holds the parameters")
        with attributes_restored(model):
            self.graph = trace(model, inputs, [layer.module for layer in layers])
            self.nodes = layer_nodes(self.graph, layers)
            self._suffixes: dict[tuple[int, ...], Suffix] = {
                (i,): suffix(model, self.graph, [node]) for i, node in enumerate(self.nodes)
            }
            wanted = {node for part in self._suffixes.values() for node in part.operands} | set(self.nodes)
            self.keep = [node for node in self.graph.nodes if node in wanted]  # what several sites together need is among it
            self.program = clean_program(model, self.graph, self.keep, self.nodes)
        self.tilings: dict[fx.Node, Tiling] = {}

    def suffix(self, sites: tuple[int, ...]) -> Suffix:
        """What lies downstream of these sites."""
        if sites not in self._suffixes:
            self._suffixes[sites] = suffix(self.program, self.graph, [self.nodes[i] for i in sites])
        return self._suffixes[sites]

    def learn(self, small: Clean, large: Clean) -> None:
        """How clean values grow with the batch, from two clean passes of different size."""
        sizes = (small.records, large.records)
        self.tilings = {node: Tiling(small.values[node], large.values[node], sizes) for node in self.keep}

    def clean(self, inputs: Any, targets: Any) -> Clean:
        output, kept, found = call_model(self.program, inputs)
        calls = [Call(*call, *self.per_record[i : i + 1]) for i, call in enumerate(found)]
        return Clean(inputs, targets, self.loss_fn(output, targets), calls, output, dict(zip(self.keep, kept, strict=True)))

    def _losses(self, clean: Clean, moves: Sequence[Move]) -> Tensor:
        repeats, records = moves[0].perturbed.shape[:2]
        if records == 0:
            return clean.losses.new_zeros(len(moves), repeats, 0)
        if len(moves) > 1 and any(move.also for move in moves):
            return torch.cat([self._losses(clean, [move]) for move in moves])
        part = self.suffix(tuple(move.site for move in moves))
        operands = [Operand(clean.values[node], self.tilings[node]) for node in part.operands]
        with self._moved(moves[0].also):
            output = part.program(repeats, *[move.perturbed.flatten(0, 1) for move in moves], *operands)
        targets = clean.tiled("targets", clean.targets, len(moves) * repeats)
        losses = self.loss_fn(output, targets).view(len(moves), repeats, records)
        return losses if part.in_order else losses[part.places]


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

    def _losses(self, clean: Clean, moves: Sequence[Move]) -> Tensor:
        return torch.stack([self._one(clean, move) for move in moves])

    def _one(self, clean: Clean, move: Move) -> Tensor:
        """(repeats, records)."""
        repeats, records = move.perturbed.shape[:2]
        if records == 0:
            return clean.losses.new_zeros(repeats, 0)
        with self._moved(move.also):
            output = self._replaced(move.site, move.perturbed.flatten(0, 1), clean.tiled("inputs", clean.inputs, repeats))
        return self.loss_fn(output, clean.tiled("targets", clean.targets, repeats)).view(repeats, records)

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

    def _one(self, clean: Clean, move: Move) -> Tensor:
        repeats, records = move.perturbed.shape[:2]
        batch = [rows((clean.inputs, clean.targets), i, i + 1) for i in range(records)]
        losses = []
        for r in range(repeats):
            for i, (inputs, targets) in enumerate(batch):
                one = move.one(r, i)
                with self._moved(one.also):
                    output = self._replaced(one.site, one.perturbed[0], inputs)
                losses.append(self.loss_fn(output, targets))
        return torch.cat(losses).view(repeats, records) if losses else clean.losses.new_zeros(repeats, records)


_FEW_CLASSES = 64


def _quick(loss_fn: LossFunction) -> LossFunction:
    """Cross-entropy over few classes with the records on the last axis: torch's softmax over a short last axis is much slower."""
    if type(loss_fn) is not nn.CrossEntropyLoss or loss_fn.reduction != "none":
        return loss_fn

    def losses(output: Any, targets: Any) -> Tensor:
        if output.dim() == 2 and targets.dim() == 1 and output.shape[1] < _FEW_CLASSES:
            output, targets = output.t().unsqueeze(0), targets.unsqueeze(0)
            return loss_fn(output, targets)[0]  # type: ignore[no-any-return]
        return loss_fn(output, targets)  # type: ignore[no-any-return]

    return losses


@contextmanager
def _hooks(hooks: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
