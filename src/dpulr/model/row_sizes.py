"""How many rows a pass has: so many that a record's numbers are the same to the last bit wherever its row stands.

Matrix products and vectorised loops may round a row differently by its place and by the number of rows. Then one record more would
change the last bits of others, and a sign can be made of just these bits (docs/theory.md, section 9). So passes have one of a few
sizes, filled up with synthetic rows, and these sizes are tried before they are used: synthetic records must give the same numbers
in whatever place they are put, and in every size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpulr.model.batches import choose, row, synthetic
from dpulr.model.equal_rows import EqualRows
from dpulr.model.trials import SEED

_COMPARED = 300
_FEWEST = 16
"""Below that, loops over records are not computed by whole vectors."""
_SPREAD = 4.0
_COARSER = 4
_RUNGS = 8
Agree = Callable[[Sequence[int]], int]
"""How many of these sizes, from the largest down, agree: the rows of one record to the last bit, in all places of their passes."""


class RowSizes:
    """The sizes of a run's passes: found when they are first asked for, and again when torch computes with other threads.

    expected  rows of an average batch: public
    most      rows that fit into one pass
    agree     tries sizes on synthetic records
    alone     no sizes were found, not even a single one: each record has a pass of its own
    """

    def __init__(self, expected: Callable[[], float], most: int, agree: Agree) -> None:
        self._expected, self._most, self._agree = expected, most, agree
        self._threads, self._sizes, self.alone = 0, list[int](), False

    @property
    def sizes(self) -> list[int]:
        """From the smallest to the largest."""
        self.settle()
        return self._sizes

    @property
    def settled(self) -> bool:
        """Whether the sizes are known."""
        return self._threads == torch.get_num_threads()

    def settle(self) -> None:
        """Find the sizes, unless they are known."""
        if not self.settled:
            self._threads, self._sizes = torch.get_num_threads(), self._found(max(1.0, self._expected()))

    @property
    def largest(self) -> int:
        """How many records a pass takes."""
        sizes = self.sizes
        return 1 if self.alone else sizes[-1]

    def of(self, rows: int) -> int:
        """The size of a pass for so many rows. More than the largest has only one person, who then is alone in a pass."""
        return next((size for size in self.sizes if size >= rows), rows)

    def _found(self, expected: float) -> list[int]:
        unit = max(_FEWEST, 2 ** round(math.log2(expected) / 2))
        fine, *coarser = [self._multiples(unit << i, expected) for i in range(_COARSER)]
        found = self._upper(fine)
        if len(found) < min(2, len(fine)):
            tried = []
            for sizes in coarser:
                tried = self._upper(sizes)
                if len(tried) == len(sizes):
                    break
            found = tried if len(tried) == len(sizes) else found or tried
        self.alone = not found
        return found or [min(_FEWEST, self._most)]

    def _upper(self, sizes: list[int]) -> list[int]:
        """The largest that agree: matrix products may change their ways at some number of rows."""
        return sizes[len(sizes) - self._agree(sizes) :]

    def _multiples(self, unit: int, expected: float) -> list[int]:
        """Multiples of `unit` that nearly all batches lie between; where memory is short, a ladder up to the most that fits."""
        spread = _SPREAD * math.sqrt(expected)
        first, last = (max(1, math.ceil((expected + way) / unit)) for way in (-spread, spread))
        return [unit * i for i in range(first, last + 1)] if unit * last <= self._most else self._ladder(unit)

    def _ladder(self, unit: int) -> list[int]:
        """For batches that take several passes: all but the last are full, and that may have any number of rows."""
        top = next((whole for size in (unit, _FEWEST) if (whole := self._most // size * size)), self._most)
        step = max(_FEWEST, unit, -(-top // (_RUNGS * unit)) * unit)
        return list(range(top, 0, -step))[::-1]


def agreeing(numbers: Callable[[Any], Iterable[Tensor]], probe: Any, sizes: Sequence[int]) -> int:
    """How many of `sizes`, from the largest down, agree: `numbers` of a batch, a row per record, are the same to the last bit for a
    record in any place of them.

    Synthetic records, shaped like those of `probe`, are put into places at random: in every size at least once, in small ones more
    often, so that some hundred places are compared. (Few rows differ where rows differ at all: the last ones, or every second.)
    """
    device = next(leaf for leaf in pytree.tree_leaves(probe) if isinstance(leaf, Tensor)).device
    generator = torch.Generator().manual_seed(SEED)
    some = synthetic(row(probe, 0), max(sizes), generator, device)

    def found(chosen: Tensor) -> list[Tensor]:
        return [_digests(values) for values in numbers(choose(some, chosen))]

    def same(size: int) -> bool:
        chosen = torch.randperm(max(sizes), generator=generator)[:size].to(device)
        with EqualRows(size, public=True) if seen.calls else nullcontext():  # watching takes as long as the pass
            own = found(chosen)
        return len(own) == len(first) and all(torch.equal(a, b[chosen]) for a, b in zip(own, first, strict=True))

    with torch.inference_mode(), torch.random.fork_rng():
        with EqualRows(max(sizes), public=True) as seen:
            first = found(torch.arange(max(sizes), device=device))
        tried, agree, before = Counter[int](), len(sizes), -1
        while agree != before:  # the fewer sizes are left, the more often each is tried
            before, agree = agree, 0
            for size in reversed(sizes[len(sizes) - before :]):
                while tried[size] * size * before < _COMPARED and same(size):
                    tried[size] += 1
                if tried[size] * size * before < _COMPARED:
                    break
                agree += 1
    return agree


def _digests(values: Tensor) -> Tensor:
    """(records,): a whole number for each row, made of all bits of its numbers: rows are compared without being kept."""
    flat = values.reshape(len(values), math.prod(values.shape[1:]))
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten(1)
    if flat.is_floating_point():
        flat = flat.double().nan_to_num(nan=0.5).add(0.0).view(torch.int64)  # -0 is 0
    factors = torch.randint(2**62, (flat.shape[1],), generator=torch.Generator().manual_seed(SEED)).to(flat.device)
    return (flat.long() * (2 * factors + 1)).sum(1)
