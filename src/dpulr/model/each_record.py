"""What is computed once of each record, and then kept, counted or summed: the same to the last bit whoever is beside it.

Passes have one size, which was tried on synthetic records (model/row_sizes.py); where none is found, or the module reads values,
each record has a pass of its own. A record whose pass raises has something public instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpulr.model.batches import call_on_copy, count, rows, synthetic
from dpulr.model.rescue import of_each
from dpulr.model.row_independence import check_rows
from dpulr.model.row_sizes import agreeing
from dpulr.model.value_reads import Seen, observe

SIZES = (64, 32, 16)
_ROOM = 2**30
"""What all operations of a pass may return together; most of it is gone when the next begins."""


class EachRecord:
    """A module whose outputs have a row per record. Refused if a record's row depends on others.

    example  a batch of one record, of which only shapes and types are used
    size     how many rows a pass has; 1: each record has one of its own
    """

    def __init__(self, module: nn.Module, example: tuple[Any, Any], device: torch.device, seen: Seen | None = None) -> None:
        seen = observe(module, row_sums, example, device) if seen is None else seen
        self._module, self.device = module, device
        self._scratch = check_rows(module, row_sums, example, device, seen=seen, largest=SIZES[0], trained=False)
        self.nobody = synthetic(example, 1, torch.Generator().manual_seed(0), device)
        sizes = [size for size in SIZES if size * seen.bytes <= _ROOM] if seen.reads is None else []
        self.size = next((size for size in sizes if agreeing(self._tensors, self.nobody, [size])), 1)

    def outputs(self, batch: tuple[Any, Any]) -> Any:
        """What the module gives. What it writes into itself is put back."""
        with self._scratch.fresh():
            return call_on_copy(self._module, batch[0])

    def _tensors(self, batch: tuple[Any, Any]) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves(self.outputs(batch)) if isinstance(leaf, Tensor)]

    def rows(self, of_outputs: Callable[[Any], Tensor], batch: tuple[Any, Any], missing: Tensor) -> Tensor:
        """A row for each record, made of the module's outputs; `missing` (1, ...) for one whose pass raises."""

        def run(part: tuple[Any, Any]) -> Tensor:
            return of_outputs(self.outputs(part))

        def alive() -> None:  # a black box that is down raises on synthetic records, too: that may be seen
            run(self.nobody)

        found = [missing[:0]]
        for start in range(0, count(batch), self.size):
            part = rows(batch, start, start + self.size)
            absent, alone = missing.repeat(count(part), *[1] * (missing.dim() - 1)), self.size == 1
            found.append(of_each(run, part, self.nobody, absent, alone=alone, alive=alive, size=lambda _: self.size))
        return torch.cat(found)


class OfRecords(nn.Module):
    """`function((inputs, targets))`, which uses `model`, as a module: its inputs are such a pair."""

    def __init__(self, model: nn.Module, function: Callable[[tuple[Any, Any]], Tensor]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, inputs: Any, targets: Any) -> Tensor:
        return self.function((inputs, targets))


def sum_of_vectors(each: EachRecord, batch: tuple[Any, Any], longest: float, size: int) -> Tensor:
    """The sum over records of vectors (records, size), each shortened to `longest`; 0 where one raises, or is not finite."""
    zeros = torch.zeros(1, size, dtype=torch.float64, device=each.device)
    found = each.rows(lambda vectors: vectors.double(), (batch, batch[1]), zeros)
    found = torch.where(torch.isfinite(found).all(1, keepdim=True), found, 0)
    lengths = torch.linalg.vector_norm(found, dim=1, keepdim=True)
    total: Tensor = (found * (longest / lengths.clamp_min(longest))).sum(0)
    return total


def row_sums(outputs: Any, targets: Any) -> Tensor:
    """A number of each record's own, of all that was computed for it."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return torch.stack([leaf.flatten(1).double().sum(1) if leaf.dim() > 1 else leaf.double() for leaf in leaves]).sum(0)
