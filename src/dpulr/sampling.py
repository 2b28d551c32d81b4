"""Which records a step sees (docs/theory.md, sections 1 and 3), and how they are read from a data set.

Public settings are fields; what is private (the data, the random state) is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from scipy.special import bdtrc
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from dpulr import validate


@dataclass(frozen=True)
class PoissonSampling:
    """Every record enters a batch on its own with probability `sample_rate`; batches below the threshold are drawn again.

    Empty batches are legal: they give a step of noise alone.
    """

    sample_rate: float
    rejection_threshold: int = 0
    private: ClassVar[bool] = True

    def __post_init__(self) -> None:
        validate.rate(self.sample_rate)
        validate.whole("rejection_threshold", self.rejection_threshold, 0)

    def check(self, records: int) -> None:
        """Refuse a threshold that nearly no batch of a data set of this size reaches: drawing would never end."""
        if self.rejection_threshold and bdtrc(self.rejection_threshold - 1, records, self.sample_rate) < _LEAST_ACCEPTANCE:
            raise ValueError(
                f"rejection_threshold is {self.rejection_threshold}, but batches of {records} records at sample_rate="
                f"{self.sample_rate:.3g} hold about {records * self.sample_rate:.0f}: nearly all would be drawn again."
            )

    def draw(self, records: int, rng: np.random.Generator) -> np.ndarray:
        """Row numbers. The size is binomial, and given its size every subset is equally likely: the same as a coin per record."""
        size = -1
        while size < self.rejection_threshold:
            size = int(rng.binomial(records, self.sample_rate))
        return rng.choice(records, size, replace=False, shuffle=False)


class ShuffledSampling:
    """Fixed-size batches from a random permutation, as the paper's experiments do. No guarantee is known for it."""

    private: ClassVar[bool] = False

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._order = np.empty(0, dtype=np.int64)

    def draw(self, records: int, rng: np.random.Generator) -> np.ndarray:
        if len(self._order) < self.batch_size:
            self._order = rng.permutation(records)
        batch, self._order = self._order[: self.batch_size], self._order[self.batch_size :]
        return batch


class Records:
    """A map-style data set as nested batches (inputs, targets). Tensor data sets are indexed at once, others item by item."""

    def __init__(self, dataset: Dataset[Any], device: torch.device) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"the data set ({type(dataset).__name__}) must be map-style, with __getitem__ and __len__: sampling picks records."
            )
        self.dataset = dataset
        self.device = device
        self.size = len(cast(Sequence[Any], dataset))
        if self.size == 0:
            raise ValueError(f"the data set ({type(dataset).__name__}) is empty.")
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
            raise ValueError(
                f"items of the data set ({type(self.dataset).__name__}) don't fit into one batch: all must have the same shapes, "
                f"and hold tensors, arrays or numbers. Pad what varies in length. {problem}"
            ) from problem

    def _checked(self, example: Any) -> tuple[Any, Any]:
        if not isinstance(example, tuple | list) or len(example) != 2:
            raise ValueError(
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


_LEAST_ACCEPTANCE = 1e-3


def _nothing(example: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf[:0] if isinstance(leaf, Tensor) else leaf, example)
