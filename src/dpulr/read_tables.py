"""Records that lie in an Arrow table, as Hugging Face data sets do: numbers are taken from its buffers, which may be a file's.

What a row holds decides only how fast it is read. One with a missing value, or of another length than the schema's, is asked for as
an item, so that what comes out is what `dataset[i]` would have given.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpulr.data.views import Columns, Names
from dpulr.read_items import Items, quiet
from dpulr.schema import Leaf, Schema

_FORMATS = (None, "torch")
_NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float", "double")
_TYPES = {"float": "float32", "double": "float64"}


class Table(Items):
    """Columns of a Hugging Face data set that hold numbers, or lists of numbers."""

    def __init__(self, view: Columns, columns: list[_Column], places: _Column | None, narrow: bool) -> None:
        super().__init__(view)
        self._columns, self._places, self._narrow = columns, places, narrow

    @classmethod
    def of(cls, view: Any) -> Table | None:
        """None where the items are not simply what the table holds: strings, pictures, a transform of one's own."""
        library = sys.modules.get("datasets")
        dataset: Any = getattr(view, "dataset", None)
        if library is None or type(view) is not Columns or type(dataset) is not library.Dataset:
            return None
        table, names = dataset.data.table, [*_listed(view.inputs), *_listed(view.target)]
        how = dataset.format
        if how["type"] not in _FORMATS or how["format_kwargs"] or not set(names) <= set(how["columns"]) & set(table.column_names):
            return None
        columns = [_Column(table.column(name)) for name in names]
        if not all(column.depth is not None for column in columns):
            return None
        places = None if dataset._indices is None else _Column(dataset._indices.table.column(0), view="int64")
        return cls(view, columns, places, narrow=how["type"] is not None)  # "torch" has floats of 32 bits

    def read(self, places: np.ndarray, schema: Schema) -> tuple[list[Tensor], np.ndarray]:
        size = len(self.dataset)
        inside = np.flatnonzero((places >= 0) & (places < size))
        rows = places[inside]
        if self._places is not None:
            rows = self._places.take(rows, Leaf(torch.int64, ()))[0].numpy()
        if len(schema.leaves) != len(self._columns) or len(rows) == 0:
            return super().read(places, schema)
        good, blocks = np.zeros(len(places), dtype=bool), []
        good[inside] = True
        with quiet():
            for leaf, column in zip(schema.leaves, self._columns, strict=True):
                own, regular = column.take(rows, leaf)
                block, held = leaf.fitted_rows(own.float() if self._narrow and own.is_floating_point() else own)
                blocks.append(block)
                good[inside] &= regular if held is None else regular & held
        if good.all():
            return blocks, np.arange(len(places))
        return self._with_odd(places, schema, good, [block[torch.from_numpy(good[inside])] for block in blocks])

    def _with_odd(
        self, places: np.ndarray, schema: Schema, good: np.ndarray, blocks: list[Tensor]
    ) -> tuple[list[Tensor], np.ndarray]:
        """The odd rows as items, each at its place among the others."""
        odd = np.flatnonzero(~good)
        others, found = super().read(places[odd], schema)
        kept = np.concatenate([np.flatnonzero(good), odd[found]])
        order = np.argsort(kept)
        picked = torch.from_numpy(order)
        return [torch.cat([block, other])[picked] for block, other in zip(blocks, others, strict=True)], kept[order]


def _listed(names: Names) -> Sequence[str]:
    if isinstance(names, str):
        return [names]
    return list(names.values()) if isinstance(names, Mapping) else list(names)


class _Column:
    """A column in chunks. `depth` is how many lists are nested in each other; None: it holds something else than numbers."""

    def __init__(self, column: Any, view: str | None = None) -> None:
        self._chunks = column.chunks if view is None else [chunk.view(view) for chunk in column.chunks]
        self._ends = np.cumsum([len(chunk) for chunk in self._chunks], dtype=np.int64)
        self._opened: dict[int, _Lists | _Numbers] = {}
        self.depth = _depth(column.type) if view is None else 0

    def take(self, rows: np.ndarray, leaf: Leaf) -> tuple[Tensor, np.ndarray]:
        """The rows' numbers in the table's type, and which rows are complete and have the leaf's shape; the others are zeros."""
        out: np.ndarray | None = None
        good = np.zeros(len(rows), dtype=bool)
        which = np.searchsorted(self._ends, rows, side="right")
        order = np.argsort(which, kind="stable")
        for own in np.split(order, np.flatnonzero(np.diff(which[order])) + 1) if len(order) else []:
            number = int(which[own[0]])
            chunk = self._open(number)
            if out is None:
                out = np.zeros((len(rows), *leaf.shape), dtype=chunk.type)
            start = int(self._ends[number - 1]) if number else 0
            if len(leaf.shape) == self.depth:
                good[own] = chunk.copy(rows[own] - start, out, own, leaf.shape)
        return torch.from_numpy(np.zeros((0, *leaf.shape)) if out is None else out), good

    def _open(self, number: int) -> _Lists | _Numbers:
        if number not in self._opened:
            self._opened[number] = _opened(self._chunks[number])
        return self._opened[number]


def _depth(kind: Any) -> int | None:
    from pyarrow import types

    if hasattr(kind, "storage_type"):
        return _depth(kind.storage_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inside = _depth(kind.value_type)
        return None if inside is None else inside + 1
    return 0 if str(kind) in _NUMBERS else None


def _opened(array: Any) -> _Lists | _Numbers:
    if hasattr(array, "storage"):
        array = array.storage
    return _Lists(array) if hasattr(array, "values") else _Numbers(array)


class _Nulls:
    """How many values before each place are missing; nothing is looked up where none is."""

    def __init__(self, array: Any) -> None:
        self._before = None
        if array.null_count:
            missing = array.is_null().to_numpy(zero_copy_only=False)
            self._before = np.concatenate([[0], np.cumsum(missing)])

    def none(self, starts: np.ndarray, count: int) -> np.ndarray:
        return np.ones(len(starts), dtype=bool) if self._before is None else self._before[starts + count] == self._before[starts]


class _Numbers:
    """An array of numbers, seen in place."""

    def __init__(self, array: Any) -> None:
        self.type = np.dtype(_TYPES.get(str(array.type), str(array.type)))
        self._values = np.frombuffer(array.buffers()[1], dtype=self.type)[array.offset : array.offset + len(array)]
        self._nulls = _Nulls(array)

    def copy(self, starts: np.ndarray, out: np.ndarray, to: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Copy values from each start to a row of `out`; which of them are complete."""
        if not shape:
            out[to] = self._values[starts]
            return self._nulls.none(starts, 1)
        count = int(np.prod(shape))
        flat = out.reshape(len(out), count)
        for start, row in zip(starts.tolist(), to.tolist(), strict=True):
            flat[row] = self._values[start : start + count]
        return self._nulls.none(starts, count)


class _Lists:
    """An array of lists: each is a stretch of the array inside."""

    def __init__(self, array: Any) -> None:
        self._inside = _opened(array.values)
        self.type: np.dtype[Any] = self._inside.type
        fixed = getattr(array.type, "list_size", None)
        if fixed is None:
            self._offsets = array.offsets.to_numpy().astype(np.int64)
        else:
            self._offsets = (array.offset + np.arange(len(array) + 1, dtype=np.int64)) * fixed
        self._nulls = _Nulls(array)

    def copy(self, starts: np.ndarray, out: np.ndarray, to: np.ndarray, shape: tuple[int, ...], before: int = 1) -> np.ndarray:
        """As for numbers: `before` lists from each start on, each of length shape[0]."""
        good = self._nulls.none(starts, before)
        places = starts[:, None] + np.arange(before)
        lengths = self._offsets[places + 1] - self._offsets[places]
        good &= (lengths == shape[0]).all(1)
        own = np.flatnonzero(good)
        begins = self._offsets[starts[own]]
        if isinstance(self._inside, _Lists):
            good[own] &= self._inside.copy(begins, out, to[own], shape[1:], before * shape[0])
        else:
            good[own] &= self._inside.copy(begins, out, to[own], (before * shape[0],))
        return good
