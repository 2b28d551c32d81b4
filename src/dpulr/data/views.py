"""Arrays, and the columns of a table, as data sets of pairs (inputs, target)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dpulr.errors import DataError

Names = str | Sequence[str] | Mapping[str, str]


class ArrayDataset:
    """Numpy arrays, in memory or mapped from a file, with the records along their first axis. Only rows that are drawn are read.

    `inputs` and `targets` are arrays, or tuples, lists or dicts of arrays: ArrayDataset(np.load("x.npy", mmap_mode="r"), y).
    """

    schema: Any = None  # an example of a record, where its types are not those of the arrays
    reason_for_none: str | None = None  # why a run on it has no guarantee, if so

    def __init__(self, inputs: Any, targets: Any) -> None:
        self.inputs, self.targets = inputs, targets
        sizes = []
        for array in _arrays((inputs, targets)):
            if not isinstance(array, np.ndarray) or array.ndim == 0 or array.dtype.kind not in "biufc":
                kind = f"an array of {array.dtype}, shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
                raise DataError(f"ArrayDataset takes numpy arrays of numbers, with one row per record, not {kind}.")
            sizes.append(len(array))
        if len(set(sizes)) != 1:
            raise DataError(f"the arrays of an ArrayDataset must have the same number of rows; they have {sizes}.")
        self._size = sizes[0]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return _mapped(lambda array: array[row], self.inputs), _mapped(lambda array: array[row], self.targets)


class Columns:
    """Columns of a data set whose items are dicts, as pairs (inputs, target): a Hugging Face data set, or a list of dicts.

    `inputs` is a column; or a list of columns, which become the model's positional arguments; or {argument: column}, which become
    keyword arguments. `target` takes the same forms. Lists of numbers become arrays. Items are fetched one by one.
    """

    def __init__(self, dataset: Any, *, inputs: Names, target: Names) -> None:
        self.dataset, self.inputs, self.target = dataset, inputs, target

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        item = self.dataset[int(row)]
        return _picked(self.inputs, item), _picked(self.target, item)


def _picked(names: Names, item: Any) -> Any:
    if isinstance(names, Mapping):
        return {argument: _value(item[name]) for argument, name in names.items()}
    return _value(item[names]) if isinstance(names, str) else tuple(_value(item[name]) for name in names)


def _value(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, list) else value


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _mapped(change, part) for key, part in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(_mapped(change, part) for part in tree)
    return change(tree)


def _arrays(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict | tuple | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _arrays(part)
    else:
        yield tree
