"""Reading records from a data set, each alone and to a public schema, as nested batches (inputs, targets).

A record that can't be read or does not fit contributes nothing, without a word: a message, a redraw or any change for the others
would be a release of its own. `dpulr data check` tells the owner.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from hashlib import blake2b
from itertools import chain
from mmap import mmap
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from dpulr.data.views import ArrayDataset
from dpulr.errors import DataError
from dpulr.schema import Leaf, Misfit, Schema

_WORTH_THREADS, _ITEMS_AT_ONCE, _LOOKED_AT = 64, 16, 32
_UNREAD = object()


class Records:
    """A map-style data set as nested batches (inputs, targets).

    schema        what a record looks like, as a `Schema` or an example whose numbers do not matter; by default, what the first
                  record looks like (tensors and arrays: what all look like)
    num_workers   threads that read items of a data set which says that they may (`thread_safe = True`)
    may_be_empty  no records are fine: other processes have some

    Tensors and arrays are read by rows, all other data sets by `dataset[i]`, never by batches.
    """

    def __init__(
        self, dataset: Dataset[Any], device: torch.device, schema: Any = None, num_workers: int = 4, may_be_empty: bool = False
    ) -> None:
        _check_map_style(dataset)
        self.dataset, self.device = dataset, device
        self.size = len(cast(Sequence[Any], dataset))
        if self.size == 0 and not may_be_empty:
            raise DataError(f"the data set ({type(dataset).__name__}) is empty.")
        base, self._subsets = _behind_subsets(dataset)
        self._store: _Rows | _Items = _Rows.of(base) or _Items(base, num_workers)
        given = None if schema is None else Schema.given(schema)
        self.schema = self._schema_of_first() if given is None else given
        self._store.check(self.schema)
        self.example = self.schema.example()

    def take(self, rows: np.ndarray) -> tuple[Any, Any]:
        """The batch of these rows, on the device, in their order; those that can't be read or do not fit are left out."""
        return self.read(rows)[0]

    def read(self, rows: np.ndarray) -> tuple[tuple[Any, Any], np.ndarray]:
        """The batch, and which of `rows` are in it. That is private."""
        places, kept = self._places(rows)
        columns, found = self._store.read(places, self.schema)
        return self.schema.batch([column.to(self.device) for column in columns]), rows[kept[found]]

    def _places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where these rows lie behind all subsets, and which of them lie anywhere."""
        places, kept = rows.astype(np.int64), np.arange(len(rows))
        for subset in self._subsets:
            places, found = _places(subset.indices, places)
            kept = kept[found]
        return places, kept

    def fetch(self, row: int) -> Any:
        """One record as the data set has it, or whatever reading it raises."""
        for subset in self._subsets:
            row = operator.index(subset.indices[row])
        return self._store.fetch(row)

    def all_targets(self) -> Tensor | None:
        """All targets where they lie in one tensor or array in memory; None where they would have to be read."""
        if isinstance(self._store, _Rows):
            column = self._store.columns[-1]
            if self.schema.target != self._store.schema.target or not isinstance(self.schema.target, Leaf) or _is_mapped(column):
                return None
            if not self._subsets:
                return torch.as_tensor(column)
            return _rows_of(column, self._store.inside(self._places(np.arange(self.size))[0])[0])
        listed = getattr(self.dataset, "targets", None)
        changed = getattr(self.dataset, "target_transform", None) is not None
        return listed if isinstance(listed, Tensor) and not changed else None

    def sample_digest(self) -> str:
        """The size, and where records lie in tensors or arrays a hash of some of them: whether two processes see the same data."""
        if not isinstance(self._store, _Rows):
            return f"{self.size} records"
        columns, _ = self._store.read(self._places(np.linspace(0, self.size - 1, _LOOKED_AT).astype(np.int64))[0], self.schema)
        digest = blake2b(digest_size=8)
        for column in columns:
            digest.update(column.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return f"{self.size} records, hash {digest.hexdigest()}"

    def _schema_of_first(self) -> Schema:
        if isinstance(self._store, _Rows):
            return self._store.schema
        name = type(self.dataset).__name__
        try:
            record = self.fetch(0)
        except Exception as problem:  # its text may name the record
            hint = " Of a table, take arrays: dpulr.data.ArrayDataset." if hasattr(self.dataset, "iloc") else ""
            raise DataError(
                f"the first record of the data set ({name}) can't be read ({type(problem).__name__}), so it can't say what records "
                f"look like. Give schema=, an example of a record; dpulr.data.check tells more.{hint}"
            ) from None
        return Schema.of(record, f"an item of the data set ({name})")


def _check_map_style(dataset: Any) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise DataError(f"a data set is needed, not a loader ({name}): give loader.dataset; the engine samples by itself.")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(f"the data set ({name}) must be map-style, with __getitem__ and __len__: sampling picks records.")


# --- subsets --------------------------------------------------------------------------------------------------------------
def _behind_subsets(dataset: Any) -> tuple[Any, list[Subset[Any]]]:
    """What lies behind torch's subsets, and these, the outermost first. A Subset's way to read many at once is not used."""
    subsets = []
    while type(dataset) is Subset:
        subsets.append(dataset)
        dataset = dataset.dataset
    return dataset, subsets


def _places(indices: Sequence[int], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places that a subset's rows stand for, and which rows have one."""
    asked = rows.tolist()
    try:
        return np.array([operator.index(indices[row]) for row in asked], dtype=np.int64), np.arange(len(rows))
    except Exception:
        places, found = [], []
        for i, row in enumerate(asked):
            try:
                places.append(np.int64(operator.index(indices[row])))
            except Exception:
                continue
            found.append(i)
        return np.array(places, dtype=np.int64), np.array(found, dtype=np.int64)


# --- tensors and arrays: one type and one shape for all records -------------------------------------------------------------
class _Rows:
    """Tensors or arrays with the records along the first axis."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        self.schema = Schema.of_columns(inputs, targets)
        self._whole, self._own = (inputs, targets), self.schema.values((inputs, targets))
        self.columns, self.size = self._own, len(self._own[0])

    @classmethod
    def of(cls, dataset: Any) -> _Rows | None:
        if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
            return cls(*dataset.tensors)
        return cls(dataset.inputs, dataset.targets) if type(dataset) is ArrayDataset else None

    def check(self, schema: Schema) -> None:
        """Shapes are the same for all records here, so it is no secret whether they fit."""
        try:
            self.columns = schema.values(self._whole)
            fits = all(tuple(column.shape[1:]) == leaf.shape for column, leaf in zip(self.columns, schema.leaves, strict=True))
        except Misfit:
            fits = False
        if not fits:
            raise DataError(f"the schema says {schema}, but the data set has {self.schema}.")

    def inside(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places as row numbers, and which of them exist."""
        found = np.flatnonzero((places >= -self.size) & (places < self.size))
        return places[found] % self.size, found

    def read(self, places: np.ndarray, schema: Schema) -> tuple[list[Tensor], np.ndarray]:
        places, found = self.inside(places)
        with nullcontext() if schema == self.schema else _quiet():
            pairs = [leaf.fitted_rows(_rows_of(column, places)) for leaf, column in zip(schema.leaves, self.columns, strict=True)]
        fits = [mask for _, mask in pairs if mask is not None]
        blocks = [block for block, _ in pairs]
        if fits and not (good := np.logical_and.reduce(fits)).all():
            found, blocks = found[good], [block[torch.from_numpy(good).to(block.device)] for block in blocks]
        return blocks, found

    def fetch(self, row: int) -> Any:
        return self.schema.batch([column[row] for column in self._own])


def _rows_of(column: Any, places: np.ndarray) -> Tensor:
    """A copy of these rows. Those of an array are read in the order in which they lie, as it may be a file."""
    if isinstance(column, Tensor):
        return column.detach().index_select(0, torch.from_numpy(places).to(column.device))
    order = np.argsort(places, kind="stable")
    rows = np.empty((len(places), *column.shape[1:]), column.dtype.newbyteorder("="))
    rows[order] = column[places[order]]
    return torch.from_numpy(rows)


def _is_mapped(column: Any) -> bool:
    """Whether an array lies in a file."""
    while isinstance(column, np.ndarray) and not isinstance(column, np.memmap):
        column = column.base
    inside = column.obj if isinstance(column, memoryview) else column
    return isinstance(inside, np.memmap | mmap)


# --- anything else: record by record --------------------------------------------------------------------------------------
class _Items:
    """A data set that is asked for one record at a time."""

    def __init__(self, dataset: Any, num_workers: int) -> None:
        self.dataset = dataset
        self._workers = num_workers if _is_thread_safe(dataset) else 0
        self._reuses_memory = False

    def check(self, schema: Schema) -> None:
        """Whether a record fits is its secret."""

    def fetch(self, row: int) -> Any:
        return self.dataset[int(row)]

    def read(self, places: np.ndarray, schema: Schema) -> tuple[list[Tensor], np.ndarray]:
        with _quiet():
            if not self._reuses_memory:
                records = list(self._fetched(places))
                self._reuses_memory = _share_memory(records, schema)
                if not self._reuses_memory:
                    return _joined_or_fitted(records, schema)
            return _fitted(self._fetched(places), schema)

    def _fetched(self, places: np.ndarray) -> Iterable[Any]:
        if self._workers < 1 or len(places) < _WORTH_THREADS:
            return self._one_by_one(places.tolist())
        parts = np.split(places, range(_ITEMS_AT_ONCE, len(places), _ITEMS_AT_ONCE))
        with ThreadPoolExecutor(self._workers) as pool:
            return chain.from_iterable(list(pool.map(lambda part: list(self._one_by_one(part.tolist())), parts)))

    def _one_by_one(self, places: Iterable[int]) -> Iterator[Any]:
        dataset = self.dataset
        for place in places:
            try:
                record = dataset[place]
            except Exception:
                record = _UNREAD
            yield record


def _fitted(records: Iterable[Any], schema: Schema) -> tuple[list[Tensor], np.ndarray]:
    """For each leaf the values of the records that were read and fit, each copied before the next record is looked at."""
    columns: list[list[Tensor]] = [[] for _ in schema.leaves]
    kept: list[int] = []
    for i, record in enumerate(records):
        if record is _UNREAD:
            continue
        try:
            fitted = [value.detach().clone() for value in schema.fitted(record)]
        except Exception:
            continue
        kept.append(i)
        for column, value in zip(columns, fitted, strict=True):
            column.append(value)
    joined = [
        torch.stack(column) if column else torch.empty((0, *leaf.shape), dtype=leaf.dtype)
        for leaf, column in zip(schema.leaves, columns, strict=True)
    ]
    return joined, np.array(kept, dtype=np.int64)


def _share_memory(records: list[Any], schema: Schema) -> bool:
    """Whether values of different records lie at one place: an earlier record's may have been overwritten by a later one's.

    A data set that fills one buffer again and again does so for all records, so that the first of a batch are enough to see it.
    """
    seen: set[tuple[int, int]] = set()
    for record in records[:_LOOKED_AT]:
        with suppress(Exception):
            for i, value in enumerate(schema.values(record)):
                place = (i, _address(value))
                if place[1] and place in seen:
                    return True
                seen.add(place)
    return False


def _address(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return int(value.__array_interface__["data"][0]) if isinstance(value, np.ndarray) else 0


# The short way, for records of which none is odd. It raises where one is, and so changes no value.
def _joined_or_fitted(records: list[Any], schema: Schema) -> tuple[list[Tensor], np.ndarray]:
    with suppress(Exception):
        return _joined(records, schema), np.arange(len(records))
    columns: list[list[Tensor]] = [[torch.empty((0, *leaf.shape), dtype=leaf.dtype)] for leaf in schema.leaves]
    kept = []
    for start in range(0, len(records), _ITEMS_AT_ONCE):  # few are odd, and most parts have none
        part = records[start : start + _ITEMS_AT_ONCE]
        try:
            own, found = _joined(part, schema), np.arange(len(part))
        except Exception:
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


@contextmanager
def _quiet() -> Iterator[None]:
    """A warning would tell of a record; as an error, if the user has made warnings errors, it would leave it out."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def _is_thread_safe(dataset: Any) -> bool:
    """Whether the data set says so, or the one that it is a view of. One that shares a file's position would mix records."""
    while not hasattr(dataset, "thread_safe") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return getattr(dataset, "thread_safe", False) is True
