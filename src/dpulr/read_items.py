"""Records of any other data set: asked for one at a time, fitted to the schema, and left out where they can't be read."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpulr.errors import forgiven
from dpulr.schema import Leaf, Schema

_THREADS, _WORTH_THREADS, _ITEMS_AT_ONCE, _LOOKED_AT = 4, 64, 16, 32
_UNREAD = object()


class Items:
    """A data set that is asked for one record at a time."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._threads = _THREADS if _is_thread_safe(dataset) else 0
        self._reuses_memory = False

    def check(self, schema: Schema) -> None:
        """Whether a record fits is its secret."""

    def fetch(self, row: int) -> Any:
        return self.dataset[int(row)]

    def read(self, places: np.ndarray, schema: Schema) -> tuple[list[Tensor], np.ndarray]:
        with quiet():
            if not self._reuses_memory:
                records = list(self._fetched(places))
                self._reuses_memory = _share_memory(records)
                if not self._reuses_memory:
                    return _joined_or_fitted(records, schema)
            return _fitted(self._one_by_one(places.tolist()), schema)

    def _fetched(self, places: np.ndarray) -> Iterable[Any]:
        if self._threads < 1 or len(places) < _WORTH_THREADS:
            return self._one_by_one(places.tolist())
        parts = np.split(places, range(_ITEMS_AT_ONCE, len(places), _ITEMS_AT_ONCE))
        with ThreadPoolExecutor(self._threads) as pool:
            return chain.from_iterable(list(pool.map(lambda part: list(self._one_by_one(part.tolist())), parts)))

    def _one_by_one(self, places: Iterable[int]) -> Iterator[Any]:
        dataset = self.dataset
        for place in places:
            record = _UNREAD
            with forgiven:
                record = dataset[place]
            yield record


def _fitted(records: Iterable[Any], schema: Schema) -> tuple[list[Tensor], np.ndarray]:
    """For each leaf the values of the records that were read and fit, each copied before the next record is looked at."""
    columns: list[list[Tensor]] = [[] for _ in schema.leaves]
    kept: list[int] = []
    for i, record in enumerate(records):
        if record is _UNREAD:
            continue
        with forgiven:
            values = zip(schema.leaves, schema.fitted(record), strict=True)
            fitted = [torch.empty(leaf.shape, dtype=leaf.dtype).copy_(value.detach()) for leaf, value in values]
            kept.append(i)
            for column, value in zip(columns, fitted, strict=True):
                column.append(value)
    joined = [
        torch.stack(column) if column else torch.empty((0, *leaf.shape), dtype=leaf.dtype)
        for leaf, column in zip(schema.leaves, columns, strict=True)
    ]
    return joined, np.array(kept, dtype=np.int64)


def _share_memory(records: list[Any]) -> bool:
    """Whether values of different records lie at one place: an earlier record's may have been overwritten by a later one's.

    A data set that fills one buffer, list or dict again and again does so for all records, so that the first of a batch are enough
    to see it.
    """
    seen: set[int] = set()
    for record in records[:_LOOKED_AT]:
        own: set[int] = set()
        with forgiven:
            own.update(_addresses(record))
        if not seen.isdisjoint(own):
            return True
        seen |= own
    return False


def _addresses(value: Any) -> Iterator[int]:
    """Where whatever can be written to lies, of a record and all that is in it."""
    if isinstance(value, Tensor):
        yield from [value.data_ptr()] if value.numel() else []
    elif isinstance(value, np.ndarray):
        yield from [int(value.__array_interface__["data"][0])] if value.size else []
    elif isinstance(value, Mapping | list | tuple):
        if not isinstance(value, tuple):
            yield id(value)
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _addresses(part)


# The short way, for records of which none is odd. It raises where one is, and so changes no value.
def _joined_or_fitted(records: list[Any], schema: Schema) -> tuple[list[Tensor], np.ndarray]:
    with forgiven:
        return _joined(records, schema), np.arange(len(records))
    columns: list[list[Tensor]] = [[torch.empty((0, *leaf.shape), dtype=leaf.dtype)] for leaf in schema.leaves]
    kept = []
    for start in range(0, len(records), _ITEMS_AT_ONCE):  # few are odd, and most parts have none
        part = records[start : start + _ITEMS_AT_ONCE]
        own = None
        with forgiven:
            own, found = _joined(part, schema), np.arange(len(part))
        if own is None:
            own, found = _fitted(part, schema)
        kept.append(start + found)
        for column, values in zip(columns, own, strict=True):
            column.append(values)
    return [torch.cat(column) for column in columns], np.concatenate([np.empty(0, dtype=np.int64), *kept])


def _joined(records: list[Any], schema: Schema) -> list[Tensor]:
    columns: list[Sequence[Any]] = []
    _transpose((schema.inputs, schema.target), records, columns)
    return list(map(_stacked, schema.leaves, columns))


def _transpose(tree: Any, values: Sequence[Any], columns: list[Sequence[Any]]) -> None:
    if isinstance(tree, Leaf):
        columns.append(values)
    elif isinstance(tree, dict):
        if set(map(type, values)) != {dict} or set(map(len, values)) != {len(tree)}:
            raise TypeError
        for key, part in tree.items():
            _transpose(part, [value[key] for value in values], columns)
    else:
        if not set(map(type, values)) <= {tuple, list} or set(map(len, values)) != {len(tree)}:
            raise TypeError
        for part, own in zip(tree, zip(*values, strict=True), strict=True):
            _transpose(part, own, columns)


_NUMBERS = {torch.int64: int, torch.float64: float, torch.bool: bool}


def _stacked(leaf: Leaf, values: Sequence[Any]) -> Tensor:
    (kind,) = set(map(type, values))
    if kind is _NUMBERS.get(leaf.dtype):
        stack = torch.tensor(values, dtype=leaf.dtype)
    else:
        if issubclass(kind, np.generic):
            values = [torch.from_numpy(np.array(value)) for value in values]
        elif issubclass(kind, np.ndarray):
            values = list(map(torch.from_numpy, values))
        elif kind is not Tensor:
            raise TypeError
        stack = torch.stack(tuple(values)).detach()  # it widens types: if the schema's comes out, each value was cast to it
    if stack.dtype is not leaf.dtype or stack.shape[1:] != leaf.shape or not stack.is_cpu or stack.layout is not torch.strided:
        raise TypeError
    return stack


def _is_thread_safe(dataset: Any) -> bool:
    """Whether the data set says so, or the one that it is a view of. One that shares a file's position would mix records."""
    while not hasattr(dataset, "thread_safe") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return getattr(dataset, "thread_safe", False) is True


@contextmanager
def quiet() -> Iterator[None]:
    """A warning would tell of a record; as an error, if the user has made warnings errors, it would leave it out."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield
