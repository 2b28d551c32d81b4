"""Reading records from a data set, as nested batches (inputs, targets)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from dpulr.errors import DataError


class Records:
    """A map-style data set as nested batches (inputs, targets). Tensor data sets are indexed at once, others item by item."""

    def __init__(self, dataset: Dataset[Any], device: torch.device, schema: Any = None) -> None:
        self.schema = schema
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise DataError(
                f"the data set ({type(dataset).__name__}) must be map-style, with __getitem__ and __len__: sampling picks records."
            )
        self.dataset = dataset
        self.device = device
        self.size = len(cast(Sequence[Any], dataset))
        if self.size == 0:
            raise DataError(f"the data set ({type(dataset).__name__}) is empty.")
        self._tensors, self._rows = _tensors_of(dataset)
        self.example = self._checked(self._read(np.zeros(1, dtype=np.int64)))

    def take(self, rows: np.ndarray) -> tuple[Any, Any]:
        """The batch of these rows, on the device. No rows: a batch of length 0 in the data's shape."""
        batch = _nothing(self.example) if len(rows) == 0 else self._read(rows)
        if self.device.type != "cpu":
            batch = pytree.tree_map(lambda leaf: leaf.to(self.device) if isinstance(leaf, Tensor) else leaf, batch)
        inputs, targets = batch
        return inputs, targets

    def all_targets(self) -> Tensor | None:
        """All targets where they lie in one tensor; None where reading them would mean reading the data set."""
        if self._tensors is not None:
            targets = self._tensors[1]
            return targets if self._rows is None else targets[self._rows]
        listed = getattr(self.dataset, "targets", None)
        changed = getattr(self.dataset, "target_transform", None) is not None
        if changed or not isinstance(listed, Tensor | list | np.ndarray):
            return None
        try:
            return torch.as_tensor(listed)
        except (TypeError, ValueError, RuntimeError):  # words, lists of unequal length
            return None

    def _read(self, rows: np.ndarray) -> Any:
        if self._tensors is not None:
            index = torch.from_numpy(rows)
            index = index if self._rows is None else self._rows[index]
            return tuple(tensor.index_select(0, index.to(tensor.device)) for tensor in self._tensors)
        fetch = getattr(self.dataset, "__getitems__", None)
        items: Iterable[Any] = fetch(rows.tolist()) if fetch is not None else [self.dataset[int(row)] for row in rows]
        try:
            return default_collate(list(items))
        except (RuntimeError, TypeError) as problem:
            raise DataError(
                f"items of the data set ({type(self.dataset).__name__}) don't fit into one batch: all must have the same shapes, "
                f"and hold tensors, arrays or numbers. Pad what varies in length. {problem}"
            ) from problem

    def _checked(self, example: Any) -> tuple[Any, Any]:
        if not isinstance(example, tuple | list) or len(example) != 2:
            raise DataError(
                f"an item of the data set ({type(self.dataset).__name__}) must be a pair (inputs, target). "
                "Several inputs go into a tuple or a dict: ((a, b), target)."
            )
        return example[0], example[1]


def _tensors_of(dataset: Dataset[Any]) -> tuple[tuple[Tensor, ...] | None, Tensor | None]:
    """The tensors behind a TensorDataset, or behind a Subset of one with its row numbers."""
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return dataset.tensors, None
    if type(dataset) is Subset:
        tensors, rows = _tensors_of(dataset.dataset)
        if tensors is not None:
            index = torch.as_tensor(dataset.indices, dtype=torch.int64)
            return tensors, index if rows is None else rows[index]
    return None, None


def _nothing(example: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf[:0] if isinstance(leaf, Tensor) else leaf, example)
