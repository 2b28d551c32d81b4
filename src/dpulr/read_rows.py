"""Records that lie in tensors or arrays, which may be files: read by rows. All have one type and one shape."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dpulr.data.tables import TableDataset
from dpulr.data.texts import TextDataset
from dpulr.data.views import ArrayDataset
from dpulr.errors import DataError
from dpulr.model.batches import with_room
from dpulr.read_items import quiet
from dpulr.schema import Misfit, Schema

_LEAST_ROOM = 32
"""Rows that a pass may be filled up with are written behind those of a batch (model/batches.py)."""


class Rows:
    """Tensors or arrays with the records along the first axis."""

    def __init__(self, inputs: Any, targets: Any, records_look_like: Any = None) -> None:
        self.schema = Schema.of_columns(inputs, targets)
        self.schema_of_records = self.schema if records_look_like is None else Schema.given(records_look_like)
        self._whole, self._own = (inputs, targets), self.schema.values((inputs, targets))
        self.columns, self.size = self._own, len(self._own[0])

    @classmethod
    def of(cls, dataset: Any) -> Rows | None:
        if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
            return cls(*dataset.tensors)
        if type(dataset) in (ArrayDataset, TableDataset, TextDataset):
            return cls(dataset.inputs, dataset.targets, dataset.schema)
        return None

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
        if len(places) and np.minimum.reduce(places) >= 0 and np.maximum.reduce(places) < self.size:
            return places, np.arange(len(places))
        found = np.flatnonzero((places >= -self.size) & (places < self.size))
        return places[found] % self.size, found

    def read(self, places: np.ndarray, schema: Schema) -> tuple[list[Tensor], np.ndarray]:
        places, found = self.inside(places)
        with nullcontext() if schema is self.schema or schema == self.schema else quiet():
            pairs = [leaf.fitted_rows(rows_of(column, places)) for leaf, column in zip(schema.leaves, self.columns, strict=True)]
        fits = [mask for _, mask in pairs if mask is not None]
        blocks = [block for block, _ in pairs]
        if fits and not (good := np.logical_and.reduce(fits)).all():
            found, blocks = found[good], [block[torch.from_numpy(good).to(block.device)] for block in blocks]
        return blocks, found

    def fetch(self, row: int) -> Any:
        return self.schema.batch([column[row] for column in self._own])


def rows_of(column: Any, places: np.ndarray) -> Tensor:
    """A copy of these rows, with room behind them. An array's are read in the order in which they lie, as it may be a file."""
    records = len(places)
    size = (records + max(_LEAST_ROOM, records // 8), *column.shape[1:])
    if isinstance(column, Tensor):
        first = with_room(torch.empty(size, dtype=column.dtype, device=column.device), records)
        return torch.index_select(column.detach(), 0, torch.from_numpy(places).to(column.device), out=first)
    order = np.argsort(places, kind="stable")
    rows = np.empty(size, column.dtype.newbyteorder("="))
    rows[order] = column[places[order]]
    return with_room(torch.from_numpy(rows), records)
