"""Passes over two batches that have records in common: whether these come out the same, and where a difference begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpulr.errors import ModelRefused
from dpulr.model.batches import call_on_copy, count, join, row
from dpulr.model.black_box import BlackBox
from dpulr.model.equal_rows import EqualRows
from dpulr.model.losses import LossFunction
from dpulr.model.quantised import DYNAMIC, is_dynamic
from dpulr.model.scratch import Scratch
from dpulr.model.value_reads import Seen
from dpulr.randomness import public_seed


class Run:
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
        self.again: Callable[[], Run] = partial(Run, model, loss_fn, batch, kept, seen, scratch, noted=True)
        self.kept, self.axes = kept, list(axes)
        self._calls: list[tuple[str, Any, Any]] | None = None
        handles = self._noted(model) if noted else []
        one_by_one, size = seen.reads is not None, count(batch)
        parts = [row(batch, i) for i in range(size)] if one_by_one else [batch]
        try:
            with torch.inference_mode(), torch.random.fork_rng():
                public_seed(0)
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
            self._calls = self.again().calls
        return self._calls

    def of(self, kept: Tensor) -> Run:
        """The same run, of which these records are looked at."""
        other = copy(self)
        other.kept = kept
        return other

    @property
    def kept_outputs(self) -> list[Tensor]:
        """Of each tensor that the model returns, what belongs to the kept records."""
        axes = [*self.axes, *[0] * len(outputs_of(self))]
        return [leaf.index_select(axis, self.kept.to(leaf.device)) for leaf, axis in zip(outputs_of(self), axes, strict=False)]

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


def outputs_of(run: Run) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(run.output) if isinstance(leaf, Tensor) and leaf.dim() > 0]


def _called(model: nn.Module, inputs: Any, scratch: Scratch) -> Any:
    with scratch.fresh():
        return pytree.tree_map(_cloned, call_on_copy(model, inputs))


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def refuse_difference(model: nn.Module, first: Run, second: Run | None, what: str, advice: str | None = None) -> None:
    """If the kept records differ between the two runs, say where the difference begins."""
    if second is None:
        return
    advice = _ADVICE if advice is None else advice
    if same(first.kept_outputs, second.kept_outputs):
        if same(first.losses[first.kept], second.losses[second.kept]):
            return
        raise ModelRefused(f"the loss function {what}. {_LOSS_ADVICE}")
    others = second.calls  # before the first's, which may have to be repeated, and then puts back what the second started from
    for (name, inputs, output), (_, other_inputs, other_output) in zip(first.calls, others, strict=False):
        if not _same_rows(inputs, other_inputs, first, second):
            raise ModelRefused(f"an operation before '{name}' {what}. {advice}")
        if not _same_rows(output, other_output, first, second):
            raise ModelRefused(_named(name, model.get_submodule(name), what, advice))
    raise ModelRefused(f"an operation in the forward of {type(model).__name__} {what}. {advice}")


_ADVICE = "Nothing bounds a record's influence then. Use GroupNorm or LayerNorm instead of batch statistics."
_LOSS_ADVICE = "Nothing bounds a record's influence then: a loss must be a number of each record's own."
KEEPS_STATE = "keeps state from one call to the next"


def _named(name: str, module: nn.Module, what: str, advice: str) -> str:
    if isinstance(module, BlackBox):
        if what.startswith(KEEPS_STATE):
            return (
                f"'{name}', the black box {module.name!r}, gives other values when it is called again with the same records. If it "
                "draws random numbers, say so: BlackBox(..., random=True); it then gets one record at a time. If it learns from "
                "what it sees, nothing bounds a record's influence."
            )
        return f"'{name}', the black box {module.name!r}, {what}. Give it one record at a time: BlackBox(..., batch_size=1)."
    return f"'{name}' ({type(module).__name__}) {what}. {DYNAMIC if is_dynamic(module) else advice}"


def _same_rows(first: Any, second: Any, one: Run, two: Run) -> bool:
    """Compare the kept records in tensors that carry records along the first axis."""
    return all(
        same(a[one.kept], b[two.kept])
        for a, b in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=False)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() > 0
        if len(a) == len(one.losses) and len(b) == len(two.losses)
    )


def same(first: Any, second: Any) -> bool:
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
