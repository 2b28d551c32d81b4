"""How a model is run without gradients: a clean pass, and passes with some layers' outputs moved.

Three ways share this interface: `TracedPasses` (model/replay.py) re-runs only what lies downstream of a layer; `HookedPasses` and
`RecordwisePasses` (model/whole_passes.py) run the whole model. What they raise is handled by `Forward` (model/forward.py).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from dpulr.errors import StepError
from dpulr.model.batches import call_on_copy, tile
from dpulr.model.layers import Call
from dpulr.model.layers.base import without_history
from dpulr.model.losses import LossFunction, quick
from dpulr.model.opaque import modules_of
from dpulr.model.people import People
from dpulr.model.scratch import NO_SCRATCH, Scratch
from dpulr.model.sites import Site
from dpulr.model.trained_layers import Layer

Marks = tuple[tuple[bool, ...], ...]
"""For each layer, which tensors among its arguments carry records along the first axis."""


class Shift(NamedTuple):
    """A layer, as a site, that adds `delta` (repeats, records, dim) to what it puts out in a pass."""

    site_index: int
    site: Site
    delta: Tensor


class Move(NamedTuple):
    """A layer whose output is `moved` (repeats, records, *out), and sites behind it that are shifted in the same pass."""

    site_index: int
    moved: Tensor
    also: Sequence[Shift] = ()

    def one(self, repeat: int, record: int) -> Move:
        """The same for one row."""
        row = slice(repeat, repeat + 1), slice(record, record + 1)
        return Move(self.site_index, self.moved[row], [Shift(index, site, delta[row]) for index, site, delta in self.also])

    def among(self, clean: Clean) -> Move:
        """The move of one row, as that of the first of these records: the others are not moved."""
        if clean.records == 1:
            return self
        others = clean.calls[self.site_index].output[1:].unsqueeze(0)
        also = []
        for shift in self.also:
            zeros = shift.delta.new_zeros(1, clean.records - 1, shift.delta.shape[2])
            also.append(shift._replace(delta=torch.cat([shift.delta, zeros], dim=1)))
        return Move(self.site_index, torch.cat([self.moved, others], dim=1), also)


@dataclass
class Clean:
    """One clean pass over a batch: a loss per record, and each layer's call; where asked for, gradients at layers' outputs.

    `people` says which rows belong to one person, where people are protected rather than records. `absent` are rows whose record's
    pass raises, and rows that fill a pass up: something public stands in their place, their loss is NaN. What is made of their
    gradients must not count (`silence`); where there are people, it is 0. `alone` is how many rows a pass for one of these records
    has.
    """

    inputs: Any
    targets: Any
    losses: Tensor
    calls: list[Call]
    output: Any
    values: dict[fx.Node, Any] = field(default_factory=dict)
    slopes: list[Tensor] = field(default_factory=list)
    people: People | None = None
    absent: Sequence[int] = ()
    alone: int = 1
    _tiled: dict[tuple[str, int], Any] = field(default_factory=dict)

    @property
    def records(self) -> int:
        return self.losses.shape[0]

    def leave_out(self, absent: Sequence[int]) -> Clean:
        """These rows say nothing from now on."""
        if absent:
            self.absent = absent
            self.silence(self.losses, math.nan)
            if self.people is not None:  # a person's rows are one
                for slope in self.slopes:
                    self.silence(slope.movedim(0, -1))
        return self

    def silence(self, values: Tensor, number: float = 0.0) -> None:
        """Write a number over what was made of absent rows, along the last axis."""
        if isinstance(self.absent, range):  # the last ones: quicker
            values[..., self.absent.start : self.absent.stop] = number
        elif self.absent:
            values[..., list(self.absent)] = number

    def detached(self) -> Clean:
        """The same without its history."""
        output, values = without_history((self.output, list(self.values.values())))
        kept = dict(zip(self.values, values, strict=True))
        return Clean(self.inputs, self.targets, self.losses.detach(), [call.detached() for call in self.calls], output, kept)

    def tiled_inputs(self, repeats: int) -> Any:
        return self._repeated("inputs", self.inputs, repeats)

    def tiled_targets(self, repeats: int) -> Any:
        return self._repeated("targets", self.targets, repeats)

    def _repeated(self, key: str, value: Any, repeats: int) -> Any:
        """Kept for the other passes of this step."""
        if (key, repeats) not in self._tiled:
            self._tiled[key, repeats] = tile(value, repeats)
        return self._tiled[key, repeats]


class Passes(ABC):
    """`marks` are empty only while a model is probed; calls then don't say which arguments carry records.

    `scratch` is what a pass writes into the model: every pass finds it as it was, and leaves it so.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, layers: list[Layer], marks: Marks = (), *, scratch: Scratch = NO_SCRATCH
    ) -> None:
        self.model, self.loss_fn, self.layers, self.scratch = model, quick(loss_fn), layers, scratch
        self.marks = marks or ((),) * len(layers)
        self.turns = Counter(layer.module for layer in layers)  # how often a pass calls each

    @abstractmethod
    def clean(self, inputs: Any, targets: Any) -> Clean:
        """One pass without noise."""

    @abstractmethod
    def losses(self, clean: Clean, moves: Sequence[Move]) -> Tensor:
        """(moves, repeats, records) losses, one move at a time; all have as many repeats. Non-finite ones stay so."""

    def all_shifted(self, clean: Clean, shifts: Sequence[Shift]) -> tuple[Tensor, list[Tensor]]:
        """(repeats, records) losses of passes through the whole model with all sites shifted, and the inputs that they saw."""
        repeats, records = shifts[0].delta.shape[:2]
        seen: dict[int, Tensor] = {}
        with self.scratch.fresh(), self.shifted(shifts, seen):
            output = call_on_copy(self.model, clean.tiled_inputs(repeats))
        losses = self.loss_fn(output, clean.tiled_targets(repeats)).view(repeats, records)
        return losses, [seen[shift.site_index] for shift in shifts]

    @contextmanager
    def shifted(self, shifts: Sequence[Shift], seen: dict[int, Tensor] | None = None) -> Iterator[None]:
        """While it lasts, these sites add their perturbation to whatever they put out. What goes in is kept in `seen`."""
        waiting = {shift.site_index for shift in shifts}
        calls = Counter[int]()
        busy: set[int] = set()

        def hook(shift: Shift) -> Any:
            def move(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
                if shift.site_index in busy:  # a layer in weight space is run again, with other weights
                    return output
                calls[shift.site_index] += 1
                if calls[shift.site_index] != self.layers[shift.site_index].turn + 1 and self.turns[module] > 1:
                    return output
                waiting.discard(shift.site_index)
                busy.add(shift.site_index)
                try:
                    call = self.call(shift.site_index, args, kwargs, output)
                    if seen is not None:
                        seen[shift.site_index] = call.input.clone()  # what follows may change it in place
                    return shift.site.moved(call, shift.delta.flatten(0, 1).unsqueeze(0))[0]
                finally:
                    busy.discard(shift.site_index)

            return move

        with hooks([(self.layers[shift.site_index].module, hook(shift)) for shift in shifts]):
            yield
        if waiting:
            names = ", ".join(self.layers[index].label for index in sorted(waiting))
            raise StepError(f"{names} was not run in a pass that was to move it.")

    @contextmanager
    def recorded(self, indices: Sequence[int]) -> Iterator[None]:
        """While it lasts, autograd records what follows the outputs of these layers, and nothing else: no weight gets a gradient.

        So whatever lies before them may be a box that takes no tensor with a history.
        """
        held = (parameter for module in modules_of(self.model) for parameter in module._parameters.values())
        trained = [parameter for parameter in held if parameter is not None and parameter.requires_grad]

        try:
            for parameter in trained:
                parameter.requires_grad_(False)
            with torch.inference_mode(False), torch.enable_grad(), self.with_history_from(indices):
                yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)

    def with_history_from(self, indices: Sequence[int]) -> AbstractContextManager[None]:
        """While it lasts, the outputs of these layers begin a history, unless they have one."""

        def begin(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return begins_history(output)

        return hooks([(self.layers[i].module, begin) for i in indices])

    def call(self, index: int, args: Any, kwargs: Any, output: Tensor) -> Call:
        return Call(args, kwargs, output, self.marks[index])


def begins_history(output: Tensor) -> Tensor:
    """The same values, whose gradient autograd can give. It is no leaf, as it may be overwritten."""
    return output if output.requires_grad else output.detach().requires_grad_().clone()


@contextmanager
def hooks(wanted: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Forward hooks, while it lasts. Of TorchScript, too, which has its own method forbidden."""
    handles = [nn.Module.register_forward_hook(module, hook, with_kwargs=True) for module, hook in wanted]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def no_losses(clean: Clean, moves: int, repeats: int) -> Tensor:
    """The losses of an empty batch."""
    return torch.zeros(moves, repeats, 0, dtype=clean.losses.dtype, device=clean.losses.device)
