"""Who a record belongs to, where the unit of privacy is a person (docs/users.md). This is private, as the records are.

A record whose person can't be told contributes nothing, without a word: to count it as a person of its own could count a person
twice. `dpulr.data.check(..., unit=...)` tells the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from torch.utils.data import Subset

from dpulr.data.views import Columns
from dpulr.errors import DataError, forgiven

Unit = Any
"""A column's name, a function of a record, or a label for each record (a list, an array, a tensor)."""


class Membership:
    """The people of a data set, each with the rows of his or her records."""

    def __init__(self, labels: Iterator[Any]) -> None:
        numbers: dict[Hashable, int] = {}
        self.owners = np.array([_number(label, numbers) for label in labels], dtype=np.int64)
        known = np.flatnonzero(self.owners >= 0)
        self._rows = known[np.argsort(self.owners[known], kind="stable")]
        self.sizes = np.bincount(self.owners[known], minlength=len(numbers))
        self._starts = np.cumsum(self.sizes) - self.sizes
        self.people = len(numbers)

    @classmethod
    def of(cls, dataset: Any, unit: Unit) -> Membership:
        """Read who the records of a map-style data set belong to, each alone."""
        return cls(labels_of(dataset, unit))

    def rows(self, people: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
        """Rows of these people, one person after the other: all, or `most` of them, drawn with this secret randomness."""
        return np.fromiter(chain.from_iterable(self._rows_of(int(person), most, rng) for person in people), dtype=np.int64)

    def _rows_of(self, person: int, most: int, rng: np.random.Generator) -> np.ndarray:
        start, size = int(self._starts[person]), int(self.sizes[person])
        if size <= most:
            return self._rows[start : start + size]
        return self._rows[start + rng.choice(size, most, replace=False)]


def labels_of(dataset: Any, unit: Unit) -> Iterator[Any]:
    """A label per record; None for one that can't be read. What is wrong with `unit` itself is said before a record is read."""
    size = len(dataset)
    if isinstance(unit, str):
        return _each(_column(dataset, unit), size)
    if callable(unit):
        return _each(lambda row: unit(dataset[row]), size)
    if not hasattr(unit, "__len__") or not hasattr(unit, "__getitem__"):
        raise DataError(
            f"unit is of type {type(unit).__name__}; it must be a column's name, a function of a record, or labels of all records."
        )
    if len(unit) != size:
        raise DataError(f"unit has {len(unit):,} labels, but the data set has {size:,} records: it must say whose each of them is.")
    at = unit.iloc if hasattr(unit, "iloc") else unit
    return _each(lambda row: at[row], size)


def _each(label: Callable[[int], Any], size: int) -> Iterator[Any]:
    for row in range(size):
        found = None
        with forgiven:  # what is raised may name the record
            found = label(row)
        yield found


def _column(dataset: Any, name: str) -> Callable[[int], Any]:
    """The values of a column of the table that lies behind a data set."""
    rows: list[Any] = []
    while True:
        if type(dataset) is Subset:
            rows.append(dataset.indices)
        elif not isinstance(dataset, Columns):
            break
        dataset = dataset.dataset
    names = getattr(dataset, "column_names", None)
    if names is None and len(dataset) and isinstance(first := dataset[0], dict):
        names = list(first)
    if names is None:
        raise DataError(
            f"unit is {name!r}, but the data set ({type(dataset).__name__}) has no columns with names: give a function of a "
            "record, or labels of all records."
        )
    if name not in names:
        raise DataError(f"unit is {name!r}, but the data set has no such column; it has {', '.join(map(repr, names))}.")
    column = dataset.column(name) if hasattr(dataset, "column") else None

    def value(row: int) -> Any:
        for indices in rows:
            row = int(indices[row])
        return column[row] if column is not None else dataset[row][name]

    return value


def _number(label: Any, numbers: dict[Hashable, int]) -> int:
    """The number of a person, new ones counted up; -1 where a label is missing."""
    with forgiven:
        own = label.item() if hasattr(label, "item") else label
        own = own.as_py() if hasattr(own, "as_py") else own
        if own is None or bool(own != own) or (isinstance(own, str | bytes) and not own.strip()):  # NaN is not itself
            return -1
        return numbers.setdefault(own, len(numbers))
    return -1
