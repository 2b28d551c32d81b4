"""Reading records from a data set, each alone and to a public schema, as nested batches (inputs, targets).

A record that can't be read or does not fit contributes nothing, without a word: a message, a redraw or any change for the others
would be a release of its own. `dpulr data check` tells the owner.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from dpulr import validate
from dpulr.data.views import ArrayDataset
from dpulr.errors import ENDING, DataError, forgiven
from dpulr.read_ahead import Workers
from dpulr.read_items import Items
from dpulr.read_rows import Rows
from dpulr.read_tables import Table
from dpulr.schema import Leaf, Schema

Batch = tuple[Any, Any]
_LOOKED_AT = 32


class Records:
    """A map-style data set as nested batches (inputs, targets).

    schema        what a record looks like, as a `Schema` or an example whose numbers do not matter; by default, what the first
                  record looks like (tensors and arrays: what all look like)
    num_workers   processes that read records ahead, where they are not rows of tensors or arrays; 0: they are read when needed
    may_be_empty  no records are fine: other processes have some

    Tensors, arrays and the columns of Arrow tables are read by rows, all other data sets by `dataset[i]`, never by batches.
    """

    def __init__(
        self, dataset: Dataset[Any], device: torch.device, schema: Any = None, num_workers: int = 0, may_be_empty: bool = False
    ) -> None:
        _check_map_style(dataset)
        validate.whole_number("num_workers", num_workers, 0)
        self.dataset, self.device = dataset, device
        self.size = len(cast(Sequence[Any], dataset))
        if self.size == 0 and not may_be_empty:
            raise DataError(f"the data set ({type(dataset).__name__}) is empty.")
        base, self._subsets = _behind_subsets(dataset)
        self.reason_for_none: str | None = base.reason_for_none if isinstance(base, ArrayDataset) else None
        self._store: Rows | Items = Rows.of(base) or Table.of(base) or Items(base)
        given = None if schema is None else Schema.given(schema)
        self.schema = self._schema_of_first() if given is None else given
        self._store.check(self.schema)
        self.example = self.schema.example()
        self._workers: Workers | None = None
        if num_workers and isinstance(self._store, Items):
            self._workers = Workers(partial(_read_as_bytes, self._store, self.schema), num_workers)

    @property
    def runs_user_code(self) -> bool:
        """Whether reading calls the data set, in this process."""
        return self._workers is None and isinstance(self._store, Items)

    @property
    def read_ahead(self) -> bool:
        """Whether `start` begins to read at once."""
        return self._workers is not None

    def start(self, rows: np.ndarray) -> Callable[[], tuple[Batch, np.ndarray]]:
        """Begin to read these rows, if there are workers; the function that comes back gives what `read` would."""
        if self._workers is None:
            return lambda: self.read(rows)
        places, kept = self._places(rows)
        parts = self._workers.start(places)

        def finish() -> tuple[Batch, np.ndarray]:
            columns, found = _joined(parts(), self.schema)
            return self._batch(columns), rows[kept[found]]

        return finish

    def take(self, rows: np.ndarray) -> Batch:
        """The batch of these rows, on the device, in their order; those that can't be read or do not fit are left out."""
        return self.read(rows)[0]

    def read(self, rows: np.ndarray) -> tuple[Batch, np.ndarray]:
        """The batch, and which of `rows` are in it. That is private."""
        places, kept = self._places(rows)
        columns, found = self._store.read(places, self.schema)
        return self._batch(columns), rows if len(found) == len(rows) else rows[kept[found]]

    def _batch(self, columns: Sequence[Tensor]) -> Batch:
        return self.schema.batch([column.to(self.device) for column in columns])

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

    def sample_digest(self, key: bytes) -> str:
        """The size, and where records lie in tensors or arrays a hash of some of them: whether two processes see the same data."""
        if not isinstance(self._store, Rows):
            return f"{self.size} records"
        columns, _ = self._store.read(self._places(np.linspace(0, self.size - 1, _LOOKED_AT).astype(np.int64))[0], self.schema)
        digest = blake2b(digest_size=8, key=key)
        for column in columns:
            digest.update(column.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return f"{self.size} records, hash {digest.hexdigest()}"

    def _schema_of_first(self) -> Schema:
        if isinstance(self._store, Rows):
            return self._store.schema_of_records
        name = type(self.dataset).__name__
        try:
            record = self.fetch(0)
        except ENDING:
            raise
        except BaseException as problem:  # its text may name the record
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
    with forgiven:
        return np.array([operator.index(indices[row]) for row in asked], dtype=np.int64), np.arange(len(rows))
    places, found = [], []
    for i, row in enumerate(asked):
        with forgiven:
            places.append(np.int64(operator.index(indices[row])))
            found.append(i)
    return np.array(places, dtype=np.int64), np.array(found, dtype=np.int64)


# --- between processes ----------------------------------------------------------------------------------------------------
def _read_as_bytes(store: Items, schema: Schema, places: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    columns, found = store.read(places, schema)
    return [column.contiguous().flatten().view(torch.uint8).numpy() for column in columns], found


def _joined(parts: Sequence[tuple[list[np.ndarray], np.ndarray]], schema: Schema) -> tuple[list[Tensor], np.ndarray]:
    """The columns of all parts, and which of the places are in them."""

    def rows(leaf: Leaf, column: np.ndarray) -> Tensor:
        return torch.from_numpy(column).view(leaf.dtype).view(-1, *leaf.shape)

    read = [columns for columns, found in parts if len(found)]
    columns = [
        torch.cat([torch.empty((0, *leaf.shape), dtype=leaf.dtype), *[rows(leaf, columns[i]) for columns in read]])
        for i, leaf in enumerate(schema.leaves)
    ]
    return columns, np.concatenate([np.empty(0, dtype=np.int64), *[found for _, found in parts]]).astype(np.int64)
