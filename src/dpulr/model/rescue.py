"""What happens when a forward pass raises: every record is evaluated alone, and only those that still raise are left out.

A black box may raise anything, for one record or for all. An error must not show which record it was, and a second draw of its
perturbation would be a choice; so each record keeps the perturbation it has.
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


def each_alone(rows: Iterable[Row], evaluate: Callable[[Row], object]) -> list[Row]:
    """Evaluate one row at a time; return the rows that did not raise."""
    survived = []
    for row in rows:
        with suppress(Exception):
            evaluate(row)
            survived.append(row)
    return survived
