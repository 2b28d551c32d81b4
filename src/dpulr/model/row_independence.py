"""Row independence: a record's loss may depend on that record alone. Checked on synthetic inputs before training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpulr.errors import ModelRefused
from dpulr.model.batches import call_on_copy, choose, count, join, row, synthetic
from dpulr.model.black_box import BlackBox
from dpulr.model.equal_rows import EqualRows
from dpulr.model.losses import LossFunction
from dpulr.model.moved_weights import put_back_later
from dpulr.model.quantised import DYNAMIC, is_dynamic
from dpulr.model.scratch import NO_SCRATCH, Place, Scratch, equal_bits
from dpulr.model.value_reads import Seen, observe

_SEED = 20_240_229  # public: only synthetic inputs depend on it
_LARGEST = 300
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
    largest: int = _LARGEST,
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
        first = check.run(check.batch, noted=True)
        if first.losses.shape != (check.records,):
            raise ModelRefused(
                f"the loss function must return one value per record: for {check.records} records it returned shape "
                f"{tuple(first.losses.shape)}. {_one_per_record(first.losses, check.records)}"
            )
        written = check.refuse_state(first)
        if seen.reads is None:
            check.find_records(first)
            crowd = check.crowd(min(largest, _ROOM // seen.bytes))
            check.refuse_mixing(crowd)
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

    def run(self, batch: Any, kept: Tensor | None = None, *, noted: bool = False, fresh: bool = True) -> _Run:
        """A pass from the state that the model had at the start; or, if not `fresh`, from what the pass before has left."""
        kept = self.kept if kept is None else kept
        scratch = self.start if fresh else NO_SCRATCH
        return _Run(self.model, self.loss_fn, batch, kept, self.seen, scratch, noted=noted, axes=self.axes)

    def find_records(self, first: _Run) -> None:
        """Which axis of each output counts the records: the first, unless another one is as long as there are records."""
        fewer = self.tried(choose(self.batch, self.kept), torch.arange(len(self.kept)))
        if fewer is not None:
            sizes = self.records, len(self.kept)
            first.axes[:] = self.axes[:] = [
                next((axis for axis, lengths in enumerate(zip(a.shape, b.shape, strict=False)) if lengths == sizes), 0)
                for a, b in zip(_outputs(first), _outputs(fewer), strict=False)
            ]

    def tried(self, batch: Any, kept: Tensor | None = None, *, fresh: bool = True) -> _Run | None:
        """None if the run raises: a black box may refuse values out of its range, or that other weights give it, or sizes."""
        try:
            return self.run(batch, kept, fresh=fresh)
        except ModelRefused:
            raise
        except Exception:
            return None

    def refuse_state(self, first: _Run) -> list[Place]:
        """A pass after another must give what a pass from the start gives. Returns what they have written."""
        self.run(self.batch, fresh=False)
        written = self.start.written()
        _refuse_difference(self.model, first, self.run(self.batch, noted=True, fresh=False), _state(written), _FRESH)
        self._shake(written)
        _refuse_difference(self.model, first, self.tried(self.batch, fresh=False), _state(written), _FRESH)
        self.start.put_back()
        return written

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

    def refuse_state_after_others(self, first: _Run, written: list[Place]) -> None:
        """The same after other records, fewer ones, and in eval mode: running statistics show there only."""
        what = _state(written)
        with _evaluating(self.model):
            evaluated = self.tried(self.batch)
        for before in (self.others, choose(self.others, self.kept)):
            self.tried(before, fresh=False)
            with _evaluating(self.model):
                after = None if evaluated is None else self.tried(self.batch, fresh=False)
            if evaluated is not None and after is not None and not _same(evaluated.output, after.output):
                raise ModelRefused(f"in eval mode the model ({type(self.model).__name__}) {what}. {_FRESH}")
            _refuse_difference(self.model, first, self.run(self.batch, noted=True, fresh=False), what, _FRESH)

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
        _refuse_difference(self.model, first, fewer, place)
        if crowd is not None:
            _refuse_difference(self.model, first.of(crowd.sources), self.tried(crowd.batch, crowd.places), place)

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

    def _refuse_others(self, first: _Run, others: Any) -> None:
        """The kept records beside these instead of the others."""
        index = torch.arange(self.records) + self.records
        index[self.kept] = self.kept
        second = self.tried(choose(join([self.batch, others]), index))
        what = "mixes records: a record's value changes with the other records of its batch"
        _refuse_difference(self.model, first, second, what)


@contextmanager
def other_weights(weights: Iterable[nn.Parameter], *, keep: float, noise: float = 0.5) -> Iterator[None]:
    """The model with `keep` times these weights plus noise, for a while: what a layer that starts at zero hides shows here."""
    generator = torch.Generator().manual_seed(_SEED)
    parameters = [p for p in weights if p.is_floating_point()]
    with put_back_later(parameters):
        with torch.no_grad():
            for p in parameters:
                random = torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device)
                p.mul_(keep).add_(random, alpha=noise / max(1, p[0].numel() if p.dim() > 1 else 1) ** 0.5)
        yield


class _Run:
    """One pass over a batch. `calls` are the inputs and outputs of all innermost modules in the order of their calls."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batch: tuple[Any, Any],
        kept: Tensor,
        seen: Seen,
        scratch: Scratch,
        *,
        noted: bool = False,
        axes: Sequence[int] = (),
    ) -> None:
        self._again = partial(_Run, model, loss_fn, batch, kept, seen, scratch, noted=True)
        self.kept, self.axes = kept, list(axes)
        self._calls: list[tuple[str, Any, Any]] | None = None
        handles = self._noted(model) if noted else []
        one_by_one, size = seen.reads is not None, count(batch)
        parts = [row(batch, i) for i in range(size)] if one_by_one else [batch]
        try:
            with torch.inference_mode(), torch.random.fork_rng():
                torch.manual_seed(0)
                with EqualRows(1 if one_by_one else size) if seen.draws else nullcontext():
                    outputs = [_called(model, inputs, scratch) for inputs, _ in parts]
                    losses = [loss_fn(output, targets) for output, (_, targets) in zip(outputs, parts, strict=True)]
        finally:
            for handle in handles:
                handle.remove()
        if not isinstance(losses[0], Tensor):
            raise ModelRefused(
                f"the loss function must return a tensor with one value per record, not {type(losses[0]).__name__}. For one that "
                "works on arrays: dpulr.BlackBox(function, output_shape=())."
            )
        self.output, self.losses = join(outputs) if one_by_one else outputs[0], losses[0]
        if one_by_one and losses[0].dim() > 0:
            self.losses = torch.cat(losses)

    @property
    def calls(self) -> list[tuple[str, Any, Any]]:
        """Copies of everything: so the pass is repeated for them, where a difference has been found."""
        if self._calls is None:
            self._calls = self._again().calls
        return self._calls

    def of(self, kept: Tensor) -> _Run:
        """The same run, of which these records are looked at."""
        other = copy(self)
        other.kept = kept
        return other

    @property
    def kept_outputs(self) -> list[Tensor]:
        """Of each tensor that the model returns, what belongs to the kept records."""
        axes = [*self.axes, *[0] * len(_outputs(self))]
        return [leaf.index_select(axis, self.kept.to(leaf.device)) for leaf, axis in zip(_outputs(self), axes, strict=False)]

    def _noted(self, model: nn.Module) -> list[Any]:
        calls = self._calls = []

        def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
            return lambda module, inputs, output: calls.append(
                (name, pytree.tree_map(_cloned, inputs), pytree.tree_map(_cloned, output))
            )

        innermost = [
            (name, module)
            for name, module in model.named_modules()
            if is_dynamic(module) or not any(True for _ in module.children())
        ]
        return [nn.Module.register_forward_hook(module, note(name)) for name, module in innermost]  # TorchScript has it forbidden


def _outputs(run: _Run) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(run.output) if isinstance(leaf, Tensor) and leaf.dim() > 0]


def _called(model: nn.Module, inputs: Any, scratch: Scratch) -> Any:
    with scratch.fresh():
        return pytree.tree_map(_cloned, call_on_copy(model, inputs))


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
        return _STATE
    more = f" and {len(written) - 1} more" if len(written) > 1 else ""
    return f"{_STATE} ({written[0].label}{more}, written in the forward pass)"


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _refuse_difference(model: nn.Module, first: _Run, second: _Run | None, what: str, advice: str | None = None) -> None:
    """If the kept records differ between the two runs, say where the difference begins."""
    if second is None:
        return
    advice = _ADVICE if advice is None else advice
    if _same(first.kept_outputs, second.kept_outputs):
        if _same(first.losses[first.kept], second.losses[second.kept]):
            return
        raise ModelRefused(f"the loss function {what}. {_LOSS_ADVICE}")
    for (name, inputs, output), (_, other_inputs, other_output) in zip(first.calls, second.calls, strict=False):
        if not _same_rows(inputs, other_inputs, first, second):
            raise ModelRefused(f"an operation before '{name}' {what}. {advice}")
        if not _same_rows(output, other_output, first, second):
            raise ModelRefused(_named(name, model.get_submodule(name), what, advice))
    raise ModelRefused(f"an operation in the forward of {type(model).__name__} {what}. {advice}")


_FRESH = (
    "It would carry records from one pass to the next. Let every forward pass start afresh, with all its time steps inside: a "
    "spiking network resets its membranes first (reset_mem() of each neuron, snntorch.utils.reset(self)), a recurrent one its "
    "hidden state; running statistics and observers belong in eval mode."
)
_ADVICE = "Nothing bounds a record's influence then. Use GroupNorm or LayerNorm instead of batch statistics."
_LOSS_ADVICE = "Nothing bounds a record's influence then: a loss must be a number of each record's own."
_STATE = "keeps state from one call to the next"


def _named(name: str, module: nn.Module, what: str, advice: str) -> str:
    if isinstance(module, BlackBox):
        if what.startswith(_STATE):
            return (
                f"'{name}', the black box {module.name!r}, gives other values when it is called again with the same records. If it "
                "draws random numbers, say so: BlackBox(..., random=True); it then gets one record at a time. If it learns from "
                "what it sees, nothing bounds a record's influence."
            )
        return f"'{name}', the black box {module.name!r}, {what}. Give it one record at a time: BlackBox(..., batch_size=1)."
    return f"'{name}' ({type(module).__name__}) {what}. {DYNAMIC if is_dynamic(module) else advice}"


def _same_rows(first: Any, second: Any, one: _Run, two: _Run) -> bool:
    """Compare the kept records in tensors that carry records along the first axis."""
    return all(
        _same(a[one.kept], b[two.kept])
        for a, b in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=False)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() > 0
        if len(a) == len(one.losses) and len(b) == len(two.losses)
    )


def _same(first: Any, second: Any) -> bool:
    return all(
        _close(a, b) for a, b in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True) if isinstance(a, Tensor)
    )


def _close(first: Tensor, second: Tensor) -> bool:
    """Equal up to rounding, for small values too."""
    if first.shape != second.shape:
        return False
    a, b = first.double(), second.double()
    largest = float(a.nan_to_num(0, 0, 0).abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-4, atol=max(1e-5 * min(1.0, largest), 1e-9), equal_nan=True)


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
