"""Whole passes: for a model that can't be taken apart. A hook replaces the layer's output on the way: the same losses, slower."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count as count_from
from typing import Any

import torch
from torch import Tensor, nn

from dpulr.model.batches import call_on_copy, copied, count, join, row
from dpulr.model.passes import Clean, Move, Passes, hooks
from dpulr.model.trained_layers import refuse_calls


class HookedPasses(Passes):
    """Runs the whole model, once per layer that is moved."""

    def clean(self, inputs: Any, targets: Any) -> Clean:
        seen: dict[nn.Module, list[tuple[Any, Any, Any]]] = {module: [] for module in self.turns}

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if torch.is_grad_enabled() and isinstance(output, Tensor):  # what follows may change it in place: it gets a copy
                seen[module].append((*copied((args, kwargs)), output))
                return output.clone()
            seen[module].append(copied((args, kwargs, output)))
            return None

        with self.scratch.fresh(), hooks([(module, note) for module in self.turns]):
            output = call_on_copy(self.model, inputs)
        for layer in self.layers:
            refuse_calls(layer, len(seen[layer.module]), self.turns[layer.module])
        calls = [self.call(i, *seen[layer.module][layer.turn]) for i, layer in enumerate(self.layers)]
        return Clean(inputs, targets, self.loss_fn(output, targets), calls, output)

    def losses(self, clean: Clean, moves: Sequence[Move]) -> Tensor:
        return torch.stack([self._moved_losses(clean, move) for move in moves])

    def _moved_losses(self, clean: Clean, move: Move) -> Tensor:
        """(repeats, records)."""
        repeats, records = move.moved.shape[:2]
        if records == 0:
            return clean.losses.new_zeros(repeats, 0)
        with self.shifted(move.also):
            output = self._output_with(move.site_index, move.moved.flatten(0, 1), clean.tiled_inputs(repeats))
        return self.loss_fn(output, clean.tiled_targets(repeats)).view(repeats, records)

    def _output_with(self, index: int, moved: Tensor, inputs: Any) -> Any:
        """The model's output when this layer's is replaced."""
        if self.layers[index].module is self.model:
            return moved

        turns = count_from(0)

        def replace(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
            return moved if next(turns) == self.layers[index].turn else None

        with self.scratch.fresh(), hooks([(self.layers[index].module, replace)]):
            return call_on_copy(self.model, inputs)


class RecordwisePasses(HookedPasses):
    """Runs the whole model on one record at a time: where it branches on values, a record's branch is then its own."""

    def clean(self, inputs: Any, targets: Any) -> Clean:
        if count(targets) == 1:
            return super().clean(inputs, targets)
        parts = [super(RecordwisePasses, self).clean(*row((inputs, targets), i)) for i in range(count(targets))]
        calls = [
            self.call(i, *join([(call.args, call.kwargs, call.output) for call in calls]))
            for i, calls in enumerate(zip(*[part.calls for part in parts], strict=True))
        ]
        return Clean(inputs, targets, torch.cat([part.losses for part in parts]), calls, join([part.output for part in parts]))

    def _moved_losses(self, clean: Clean, move: Move) -> Tensor:
        repeats, records = move.moved.shape[:2]
        batch = [row((clean.inputs, clean.targets), i) for i in range(records)]
        losses = []
        for r in range(repeats):
            for i, (inputs, targets) in enumerate(batch):
                one = move.one(r, i)
                with self.shifted(one.also):
                    output = self._output_with(one.site_index, one.moved[0], inputs)
                losses.append(self.loss_fn(output, targets))
        return torch.cat(losses).view(repeats, records) if losses else clean.losses.new_zeros(repeats, records)
