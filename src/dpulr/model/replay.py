"""Replay: the clean pass once, then only what lies downstream of the layers that are moved, the rows of all of them in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from dpulr.model.batches import call_model
from dpulr.model.graph import (
    Operand,
    Suffix,
    Tiling,
    Untraceable,
    clean_program,
    layer_nodes,
    suffix,
    trace,
)
from dpulr.model.losses import LossFunction
from dpulr.model.passes import Clean, Marks, Move, Passes, begins_history, no_losses
from dpulr.model.scratch import NO_SCRATCH, Scratch
from dpulr.model.trained_layers import Layer


class TracedPasses(Passes):
    """The model as a graph (torch.fx). Two probes of different size show how clean values grow with the batch."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        layers: list[Layer],
        marks: Marks,
        probes: Sequence[tuple[Any, Any]],
        *,
        scratch: Scratch = NO_SCRATCH,
    ) -> None:
        super().__init__(model, loss_fn, layers, marks, scratch=scratch)
        if any(layer.module is model for layer in layers):
            raise Untraceable("the model itself holds the parameters")
        with Scratch.of(model).fresh():  # tracing leaves constants, and what the forward pass writes, as attributes
            self.graph = trace(model, probes[0][0], [layer.module for layer in layers])
            self.nodes = layer_nodes(self.graph, layers)
            self._suffixes: dict[tuple[int, ...], Suffix] = {
                (i,): suffix(model, self.graph, [node]) for i, node in enumerate(self.nodes)
            }
            wanted = {node for part in self._suffixes.values() for node in part.operands} | set(self.nodes)
            self.keep = [node for node in self.graph.nodes if node in wanted]  # what several layers together need is among it
            self.program = clean_program(model, self.graph, self.keep, self.nodes)
        self._recording: dict[tuple[int, ...], fx.GraphModule] = {}
        self.tilings = self._tilings(probes)

    def _tilings(self, probes: Sequence[tuple[Any, Any]]) -> dict[fx.Node, Tiling]:
        with torch.inference_mode():
            small, large = (self.clean(*probe) for probe in probes)
        sizes = (small.records, large.records)
        return {node: Tiling(small.values[node], large.values[node], sizes) for node in self.keep}

    def suffix(self, indices: tuple[int, ...]) -> Suffix:
        """What lies downstream of these layers. Programs for several layers together are made when they are first needed."""
        if indices not in self._suffixes:
            self._suffixes[indices] = suffix(self.program, self.graph, [self.nodes[i] for i in indices])
        return self._suffixes[indices]

    @contextmanager
    def with_history_from(self, indices: Sequence[int]) -> Iterator[None]:
        """Of several layers by a program of its own: hooks would make every call slower."""
        if len(indices) < 2:
            with super().with_history_from(indices):
                yield
            return
        own, key = self.program, tuple(indices)
        if key not in self._recording:
            change = {self.nodes[i]: begins_history for i in key}
            self._recording[key] = clean_program(own, self.graph, self.keep, self.nodes, change)
        self.program = self._recording[key]
        try:
            yield
        finally:
            self.program = own

    def clean(self, inputs: Any, targets: Any) -> Clean:
        with self.scratch.fresh():
            output, kept, found = call_model(self.program, inputs)
        calls = [self.call(i, *call) for i, call in enumerate(found)]
        return Clean(inputs, targets, self.loss_fn(output, targets), calls, output, dict(zip(self.keep, kept, strict=True)))

    def losses(self, clean: Clean, moves: Sequence[Move]) -> Tensor:
        repeats, records = moves[0].moved.shape[:2]
        if records == 0:
            return no_losses(clean, len(moves), repeats)
        if len(moves) > 1 and any(move.also for move in moves):
            return torch.cat([self.losses(clean, [move]) for move in moves])
        part = self.suffix(tuple(move.site_index for move in moves))
        operands = [Operand(clean.values[node], self.tilings[node]) for node in part.operands]
        with self.scratch.fresh(), self.shifted(moves[0].also):
            output = part.program(repeats, *[move.moved.flatten(0, 1) for move in moves], *operands)
        losses = self.loss_fn(output, clean.tiled_targets(len(moves) * repeats)).view(len(moves), repeats, records)
        return losses if part.in_order else losses[part.places]
