"""Row independence: a record's loss may depend on that record alone. Checked on synthetic inputs before training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpulr.errors import ENDING, ModelRefused
from dpulr.model.batches import choose, join, synthetic
from dpulr.model.compared_runs import KEEPS_STATE, Run, outputs_of, refuse_difference, same
from dpulr.model.losses import LossFunction
from dpulr.model.scratch import NO_SCRATCH, Place, Scratch, equal_bits
from dpulr.model.trials import other_weights
from dpulr.model.value_reads import Seen, observe

_SEED = 20_240_229  # public: only synthetic inputs depend on it
LARGEST = 300
"""The size of the large batch that every model is tried with, if it fits."""
_ROOM = 64 * 2**20
"""No larger batch is tried than one whose pass returns so many bytes: a step has no larger passes either (mechanisms/chunks.py)."""
_LOUD, _SHAKEN = 4.0, 1_000.0
_ODD = (0.0, 1e20, -1e20), (math.nan, math.inf, 0.0)
_LARGER = (2,), (60, 2)
_KEPT = {5: (1, 3), 7: (1, 3, 5), 11: (1, 3, 4, 6, 8)}
"""Sizes of batches, and the records that stay while the others change: some lie before them, between them and after them."""


def check_rows(
    model: nn.Module,
    loss_fn: LossFunction,
    example: tuple[Any, Any],
    device: torch.device,
    *,
    seen: Seen | None = None,
    largest: int = LARGEST,
    trained: bool = True,
) -> Scratch:
    """Refuse, by name, a loss that is not one value per record, batch statistics, state that survives, and NaN at the start.

    `seen` is what `observe` found. A model that will see one record at a time is tried for state and losses only. Otherwise batches
    of a few records are compared, and one of `largest`, or of as many as the model's size allows. If it is not to be `trained`,
    no other weights than its own are tried, and its loss may be anything.
    Returns what a pass writes into the model: no later pass depends on it, so it may be put back after each.
    """
    seen = observe(model, loss_fn, example, device) if seen is None else seen
    check = _Check(model, loss_fn, example, device, seen)
    with check.start.fresh():
        first = check.run(check.batch)
        if first.losses.shape != (check.records,):
            raise ModelRefused(
                f"the loss function must return one value per record: for {check.records} records it returned shape "
                f"{tuple(first.losses.shape)}. {_one_per_record(first.losses, check.records)}"
            )
        written = check.refuse_state(first)
        if seen.reads is None:
            check.find_records(first)
            crowd = check.crowd(min(largest, _ROOM // seen.bytes))
            check.refuse_mixing(None if trained else crowd)
            check.refuse_mixing_of_odd()
            for keep in (1.0, 0.0) if trained else ():
                with other_weights(model.parameters(), keep=keep):
                    check.refuse_mixing(crowd if keep else None)
        if written:
            check.refuse_state_after_others(first, written)
            weights = model.parameters() if trained else ()
            with other_weights(weights, keep=0.0, noise=_LOUD):  # a threshold that nothing reaches hides what it keeps
                check.refuse_state(check.run(check.batch))
                if seen.reads is None:
                    check.refuse_mixing(None)
    if trained and not bool(torch.isfinite(first.losses).all()):
        raise ModelRefused(
            f"the loss is {first.losses[~torch.isfinite(first.losses)][0].item()} before the first step, on synthetic inputs "
            "between 0 and 1. Check the initial weights and the loss function."
        )
    return Scratch(written) if seen.reads is None else Scratch.of(model)  # what one record alone may write, nobody has seen


@dataclass(frozen=True)
class _Crowd:
    """A large batch, most of it other records, in which those of the small one stand again and again: `places`, `sources`."""

    batch: Any
    places: Tensor
    sources: Tensor


def _one_per_record(losses: Tensor, records: int) -> str:
    """What to do about a loss of another shape."""
    if losses.dim() > 1 and len(losses) == records:
        axes = "1" if losses.dim() == 2 else str(tuple(range(1, losses.dim())))
        return (
            f"Average over what a record has of its own, with .mean({axes}): "
            f"lambda output, target: loss_fn(output, target).mean({axes})."
        )
    return "Pass reduction='none', so that losses of records are not averaged."


class _Check:
    """The batches that are compared, and the comparisons."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, example: tuple[Any, Any], device: torch.device, seen: Seen) -> None:
        self.model, self.loss_fn, self.seen, self.start = model, loss_fn, seen, Scratch.of(model)
        lengths = {n for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor) for n in leaf.shape[1:]}
        apart = (n for n, kept in _KEPT.items() if lengths.isdisjoint({n, len(kept)}))  # so that one axis alone counts records
        self.records = next(apart, 5)
        self.kept = torch.tensor(_KEPT[self.records])
        self._make = partial(synthetic, example, generator=torch.Generator().manual_seed(_SEED), device=device)
        self.batch, self.others = self._make(self.records), self._make(self.records)
        self.axes: list[int] = []

    def run(self, batch: Any, kept: Tensor | None = None, *, noted: bool = False, fresh: bool = True) -> Run:
        """A pass from the state that the model had at the start; or, if not `fresh`, from what the pass before has left."""
        kept = self.kept if kept is None else kept
        scratch = self.start if fresh else NO_SCRATCH
        return Run(self.model, self.loss_fn, batch, kept, self.seen, scratch, noted=noted, axes=self.axes)

    def find_records(self, first: Run) -> None:
        """Which axis of each output counts the records: the first, unless another one is as long as there are records."""
        fewer = self.tried(choose(self.batch, self.kept), torch.arange(len(self.kept)))
        if fewer is not None:
            sizes = self.records, len(self.kept)
            first.axes[:] = self.axes[:] = [
                next((axis for axis, lengths in enumerate(zip(a.shape, b.shape, strict=False)) if lengths == sizes), 0)
                for a, b in zip(outputs_of(first), outputs_of(fewer), strict=False)
            ]

    def tried(self, batch: Any, kept: Tensor | None = None, *, fresh: bool = True) -> Run | None:
        """None if the run raises: a black box may refuse values out of its range, or that other weights give it, or sizes."""
        try:
            return self.run(batch, kept, fresh=fresh)
        except (ModelRefused, *ENDING):
            raise
        except BaseException:
            return None

    def refuse_state(self, first: Run) -> list[Place]:
        """A pass after another must give what a pass from the start gives. Returns what they have written."""
        self.run(self.batch, fresh=False)
        written = self.start.written()
        second = self.run(self.batch, fresh=False)
        second.again = self._noted_after_itself
        refuse_difference(self.model, first, second, _state(written), _FRESH)
        self._shake(written)
        refuse_difference(self.model, first, self.tried(self.batch, fresh=False), _state(written), _FRESH)
        self.start.put_back()
        return written

    def _noted_after_itself(self) -> Run:
        """Only where something differs: copies of all that modules put out may be as large as the model."""
        self.start.put_back()
        self.run(self.batch, fresh=False)
        return self.run(self.batch, noted=True, fresh=False)

    def _shake(self, written: list[Place]) -> None:
        """Put noise on what a pass has written of its records: a state that decides little by itself shows then."""
        before = [[tensor.clone() for tensor in place.tensors()] for place in written]
        self.tried(self.others, fresh=False)
        generator = torch.Generator().manual_seed(_SEED)
        with torch.inference_mode():
            for place, copies in zip(written, before, strict=True):
                for tensor, copy in zip_longest(place.tensors(), copies):
                    if tensor is None or not tensor.is_floating_point() or tensor.requires_grad:
                        continue
                    if copy is None or not equal_bits(tensor, copy):  # the same for all records: a table that was made once, say
                        tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor), alpha=_SHAKEN)

    def refuse_state_after_others(self, first: Run, written: list[Place]) -> None:
        """The same after other records, fewer ones, and in eval mode: running statistics show there only."""
        what = _state(written)
        with _evaluating(self.model):
            evaluated = self.tried(self.batch)
        for before in (self.others, choose(self.others, self.kept)):
            self.tried(before, fresh=False)
            with _evaluating(self.model):
                after = None if evaluated is None else self.tried(self.batch, fresh=False)
            if evaluated is not None and after is not None and not same(evaluated.output, after.output):
                raise ModelRefused(f"in eval mode the model ({type(self.model).__name__}) {what}. {_FRESH}")
            refuse_difference(self.model, first, self.run(self.batch, noted=True, fresh=False), what, _FRESH)

    def crowd(self, size: int) -> _Crowd | None:
        """None where a large batch would be no larger than the small one."""
        if size <= 2 * self.records:
            return None
        places = torch.arange(1, size, 2)
        sources = torch.arange(len(places)) % self.records
        index = torch.arange(size) + self.records
        index[places] = sources
        return _Crowd(choose(join([self.batch, self._make(size)]), index), places, sources)

    def refuse_mixing(self, crowd: _Crowd | None) -> None:
        first = self.tried(self.batch)
        if first is None:
            return
        for factor in (10, -10, 1_000, -1_000):  # so that a mean over records moves visibly, and sums change their sign
            self._refuse_others(first, _other(self.batch, self.others, factor))
        place = "mixes records: a record's value changes with its place in the batch or with the batch's size"
        fewer = self.tried(choose(self.batch, self.kept), torch.arange(len(self.kept)))
        refuse_difference(self.model, first, fewer, place)
        if crowd is not None:
            refuse_difference(self.model, first.of(crowd.sources), self.tried(crowd.batch, crowd.places), place)

    def refuse_mixing_of_odd(self) -> None:
        """Records that most data have none of may decide over the others, where nothing else does. Some models raise for them."""
        first = self.run(self.batch)
        for factors in _ODD:
            self._refuse_others(first, tuple(_odd(part, factors=factors) for part in self.others))
        inputs, targets = self.others
        if first.losses.is_cpu:  # elsewhere an index out of range ends the program
            self._refuse_others(first, (inputs, _odd(targets, numbers=(2,))))
            for numbers in _LARGER if any(_is_whole(leaf) for leaf in pytree.tree_leaves(inputs)) else ():
                self._refuse_others(first, (_odd(inputs, numbers=numbers), targets))

    def _refuse_others(self, first: Run, others: Any) -> None:
        """The kept records beside these instead of the others."""
        index = torch.arange(self.records) + self.records
        index[self.kept] = self.kept
        second = self.tried(choose(join([self.batch, others]), index))
        what = "mixes records: a record's value changes with the other records of its batch"
        refuse_difference(self.model, first, second, what)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """All modules in eval mode, for a while."""
    training = [module for module in model.modules() if getattr(module, "training", False)]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _state(written: list[Place]) -> str:
    """What is said of a model whose passes depend on each other."""
    if not written:
        return KEEPS_STATE
    more = f" and {len(written) - 1} more" if len(written) > 1 else ""
    return f"{KEEPS_STATE} ({written[0].label}{more}, written in the forward pass)"


_FRESH = (
    "It would carry records from one pass to the next. Let every forward pass start afresh, with all its time steps inside: a "
    "spiking network resets its membranes first (reset_mem() of each neuron, snntorch.utils.reset(self)), a recurrent one its "
    "hidden state; running statistics and observers belong in eval mode."
)


def _other(batch: Any, others: Any, factor: float) -> Any:
    """Records that surely differ from `batch`: input floats of `others` times `factor`, whole numbers 0 and 1 swapped."""

    def change(scale: float) -> Callable[[Any, Any], Any]:
        def one(leaf: Any, other: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return (leaf == 0).to(leaf.dtype) if _is_whole(leaf) else other * scale

        return one

    (inputs, targets), (other_inputs, other_targets) = batch, others
    return pytree.tree_map(change(factor), inputs, other_inputs), pytree.tree_map(change(1), targets, other_targets)


def _odd(batch: Any, *, factors: Sequence[float] = (1,), numbers: Sequence[int] = ()) -> Any:
    """The same records with their floats times these factors, in turn, and with these whole numbers, if there are any."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or (_is_whole(leaf) and not numbers):
            return leaf
        turns = torch.arange(len(leaf)) % len(numbers if _is_whole(leaf) else factors)
        own = torch.tensor(numbers if _is_whole(leaf) else factors)[turns].to(leaf).view(-1, *[1] * (leaf.dim() - 1))
        return own.expand_as(leaf).clone() if _is_whole(leaf) else leaf * own

    return pytree.tree_map(one, batch)


def _is_whole(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not (leaf.is_floating_point() or leaf.is_complex())
