"""What happens when a forward pass raises: every record is tried alone, and only those that still raise are left out.

A black box may raise anything, for one record or for all. An error must not show which record it was, and a second draw of its
perturbation would be a choice; so each record keeps the perturbation it has. The others are then run together again, with
something public in the place of those that raise: a pass of other shape would round differently, for all of them. For the same
reason a pass of a few records is filled up with synthetic ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dpulr.errors import forgiven
from dpulr.model import batches

Value = TypeVar("Value")
Row = TypeVar("Row")

FEWEST_ROWS = 8
"""Passes of fewer records are filled up: torch has other kernels for one, two and three rows, which round differently."""


def not_too_few(records: int) -> int:
    """How many rows a pass for so many records has, where nothing better is known (model/row_sizes.py)."""
    return max(records, FEWEST_ROWS)


def together_or_apart(together: Callable[[], Value], apart: Callable[[], Value], alive: Callable[[], None]) -> Value:
    """`together()`; if that raises, `apart()`. `alive` raises what may be seen: an error that says nothing about any record."""
    with forgiven:  # so that no later error shows it as its context
        return together()
    alive()
    return apart()


def without_raising(rows: Iterable[Row], alone: Callable[[Row], object], together: Callable[[list[Row]], Value]) -> Value | None:
    """`together(raised)`, given the rows that raise where they are tried alone; None if that raises, too."""
    every = list(rows)
    survived = set(each_alone(every, alone))
    with forgiven:
        return together([row for row in every if row not in survived])
    return None


def each_alone(rows: Iterable[Row], evaluate: Callable[[Row], object]) -> list[Row]:
    """Evaluate one row at a time; return the rows that did not raise."""
    survived = []
    for row in rows:
        with forgiven:
            evaluate(row)
            survived.append(row)
    return survived


def filled(batch: Any, nobody: Any, *, absent: Sequence[int] = (), more: int = 0) -> Any:
    """The batch with `nobody`, a synthetic record, in these places, and so many times more behind it."""
    whole = batches.replaced(batch, absent, nobody) if absent else batch
    if more <= 0:
        return whole
    with torch.inference_mode(False), torch.no_grad():  # plain tensors, which a backward pass can keep without a copy
        return batches.followed_by(whole, nobody, more)


def of_each(
    run: Callable[[Any], Tensor],
    batch: Any,
    nobody: Any,
    missing: Tensor,
    *,
    alone: bool,
    alive: Callable[[], None],
    size: Callable[[int], int] = not_too_few,
) -> Tensor:
    """`run(batch)`, a row per record; for a record for which it raises the row of `missing`. `alone`: one record at a time.

    `size` says how many rows a pass for so many records has.
    """
    records, found = batches.count(batch), missing.clone()

    def together(part: Any, raised: Sequence[int] = ()) -> Tensor:
        own = batches.count(part)
        values = run(filled(part, nobody, absent=raised, more=size(own) - own))[:own]
        for i in raised:
            values[i] = missing[i]
        return values

    def one(i: int) -> None:
        found[i] = run(batches.row(batch, i))[0]

    def one_filled_up(i: int) -> None:
        found[i] = together(batches.row(batch, i))[0]

    def apart() -> Tensor:
        others = without_raising(range(records), lambda i: run(batches.row(batch, i)), lambda raised: together(batch, raised))
        if others is None:
            each_alone(range(records), one_filled_up)
        return found if others is None else others

    if not alone:
        return together_or_apart(lambda: together(batch), apart, alive)
    if not each_alone(range(records), one) and records:
        alive()
    return found
