"""What happens when a forward pass raises: every record is tried alone, and only those that still raise are left out.

A black box may raise anything, for one record or for all. An error must not show which record it was, and a second draw of its
perturbation would be a choice; so each record keeps the perturbation it has. The others are then run together again, with
something public in the place of those that raise: a pass of other shape would round differently, for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

Value = TypeVar("Value")
Row = TypeVar("Row")


def together_or_apart(together: Callable[[], Value], apart: Callable[[], Value], alive: Callable[[], None]) -> Value:
    """`together()`; if that raises, `apart()`. `alive` raises what may be seen: an error that says nothing about any record."""
    with suppress(Exception):  # whatever a black box may raise: it is forgotten, so that no later error shows it as its context
        return together()
    alive()
    return apart()


def without_raising(rows: Iterable[Row], alone: Callable[[Row], object], together: Callable[[list[Row]], Value]) -> Value | None:
    """`together(raised)`, given the rows that raise where they are tried alone; None if that raises, too."""
    every = list(rows)
    survived = set(each_alone(every, alone))
    with suppress(Exception):
        return together([row for row in every if row not in survived])
    return None


def each_alone(rows: Iterable[Row], evaluate: Callable[[Row], object]) -> list[Row]:
    """Evaluate one row at a time; return the rows that did not raise."""
    survived = []
    for row in rows:
        with suppress(Exception):
            evaluate(row)
            survived.append(row)
    return survived
