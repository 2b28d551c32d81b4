"""Which rows of a batch belong to one person, where a person's records count as one (docs/theory.md, "People")."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpulr.model.batches import rows


@dataclass(frozen=True)
class People:
    """A person's rows are neighbours. `owners` (rows,) counts people up from 0; none has more than `most` rows."""

    owners: Tensor
    count: int
    most: int

    @classmethod
    def of(cls, owners: np.ndarray, most: int, device: torch.device) -> People:
        """From the people's numbers, in any order, but with each person's rows together."""
        new = np.ones(len(owners), dtype=bool)
        new[1:] = owners[1:] != owners[:-1]
        return cls(torch.from_numpy(np.cumsum(new) - 1).to(device), int(new.sum()), most)

    @cached_property
    def sizes(self) -> Tensor:
        return torch.bincount(self.owners, minlength=self.count)

    @cached_property
    def starts(self) -> Tensor:
        return torch.cumsum(self.sizes, 0) - self.sizes

    @cached_property
    def slots(self) -> Tensor:
        """(rows,): the place of each row among its person's."""
        return torch.arange(len(self.owners), device=self.owners.device) - self.starts[self.owners]

    # --- numbers of rows and of people -----------------------------------------------------------------------------------
    def summed(self, values: Tensor) -> Tensor:
        """(..., people): sums over each person's rows of (..., rows)."""
        total = values.new_zeros(*values.shape[:-1], self.count)
        return total.index_add_(-1, self.owners, values)

    def mean(self, values: Tensor) -> Tensor:
        return self.summed(values) / self.sizes

    def to_rows(self, values: Tensor) -> Tensor:
        """(..., rows): for each row what its person has in (..., people)."""
        return values[..., self.owners]

    def joint_norms(self, norms: Tensor) -> Tensor:
        """(..., rows): for each row the length of all its person's rows together."""
        wide = norms.double()
        return self.to_rows(self.summed(wide.square()).sqrt()).to(norms.dtype)

    def shares(self, z: Tensor) -> Tensor:
        """(repeats, rows, dim): each row's block of its person's vector, of (repeats, people, most * dim)."""
        return z.view(*z.shape[:2], self.most, -1)[:, self.owners, self.slots]

    def by_slot(self) -> Iterator[tuple[Tensor, Tensor]]:
        """For each slot: a row of each person, and whether it is the person's row of that slot (else it is his or her first).

        As many as anybody may have, whoever is in the batch: how many there are could decide how the others' numbers are rounded.
        """
        for slot in range(self.most if self.count else 0):
            held = slot < self.sizes
            yield self.starts + slot * held, held

    # --- parts -----------------------------------------------------------------------------------------------------------
    def joined_by(self, more: int) -> People:
        """With so many people more behind them, who have a row each."""
        if not more:
            return self
        others = torch.arange(self.count, self.count + more, device=self.owners.device)
        return People(torch.cat([self.owners, others]), self.count + more, self.most)

    def part(self, first: int, last: int) -> tuple[People, int, int]:
        """Some of the people, and from where to where their rows lie."""
        bounds = [*self.starts.tolist(), len(self.owners)]
        start, stop = bounds[first], bounds[last]
        return People(self.owners[start:stop] - first, last - first, self.most), start, stop

    def parts(self, batch: Any, size: int) -> Iterator[tuple[Any, People]]:
        """A batch in parts of at most `size` rows, but of whole people: at least one."""
        bounds, first = [*self.starts.tolist(), len(self.owners)], 0
        while first < self.count:
            last = first + 1
            while last < self.count and bounds[last + 1] - bounds[first] <= size:
                last += 1
            people, start, stop = self.part(first, last)
            yield (batch if stop - start == len(self.owners) else rows(batch, start, stop)), people
            first = last
