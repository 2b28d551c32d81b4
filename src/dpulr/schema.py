"""What every record looks like: the shape and the type of each of its numbers. This is public, and the same for all records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpulr.errors import DataError


class Misfit(ValueError):
    """A value that is not what the schema says. `kind` is "shape", "type" or "structure"."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class Leaf:
    """A tensor in each record: its type and its shape, without the axis of the records."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{_short(self.dtype)} of shape {self.shape}"

    def fitted(self, value: Any) -> Tensor:
        """One record's value in this type, if it has this shape and the type can hold it. Floats are rounded to a shorter float."""
        given = value if type(value) is Tensor and value.is_cpu and value.layout is torch.strided else as_tensor(value)
        if given.shape != self.shape:
            raise Misfit("shape", f"has shape {tuple(given.shape)} instead of {self.shape}")
        cast, same = self._cast(given)
        if same is not None and not bool(same.all()):
            raise Misfit("type", f"is {_short(given.dtype)} and has values that {_short(self.dtype)} can't hold")
        return cast

    def fitted_rows(self, block: Tensor) -> tuple[Tensor, np.ndarray | None]:
        """Many records' values in this type, and for each record whether it can hold them (None: it can)."""
        cast, same = self._cast(block)
        return cast, None if same is None else (same.flatten(1).all(1) if same.dim() > 1 else same).cpu().numpy()

    def _cast(self, given: Tensor) -> tuple[Tensor, Tensor | None]:
        if given.dtype == self.dtype:
            return given, None
        cast = given.to(self.dtype)
        if self.dtype.is_complex or (self.dtype.is_floating_point and not given.is_complex()):
            return cast, None
        return cast, cast.to(given.dtype) == given  # NaN is never the same as anything: no whole number holds it


@dataclass(frozen=True)
class Constant:
    """A word, or None, that a given schema has in place of numbers: every record has it, and so it is public."""

    value: Any

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class Schema:
    """`inputs` and `target`: leaves, nested in tuples, lists and dicts as in a record."""

    inputs: Any
    target: Any

    def __post_init__(self) -> None:
        if not all(any(isinstance(leaf, Leaf) for leaf in _walk(part)) for part in (self.inputs, self.target)):
            raise DataError("a record needs numbers in its inputs and in its target.")

    @classmethod
    def of(cls, record: Any, what: str = "schema") -> Schema:
        """The schema that a record has. Its numbers do not matter."""
        inputs, target = _pair(record, what)
        return cls(*(_mapped(lambda value: _leaf_of(value, what), part) for part in (inputs, target)))

    @classmethod
    def given(cls, example: Any) -> Schema:
        """The schema that a user has given, as such or by an example record. Words in it are constants of all records."""
        if isinstance(example, Schema):
            return example
        inputs, target = _pair(example, "schema")

        def leaf(value: Any) -> Leaf | Constant:
            return Constant(value) if value is None or isinstance(value, str | bytes) else _leaf_of(value, "schema")

        return cls(_mapped(leaf, inputs), _mapped(leaf, target))

    @classmethod
    def of_columns(cls, inputs: Any, targets: Any) -> Schema:
        """The schema of arrays that have the records along their first axis."""
        return cls(*(_mapped(lambda column: Leaf(_type_of(column), tuple(column.shape[1:])), part) for part in (inputs, targets)))

    def __str__(self) -> str:
        return f"{_described(self.inputs)} and {_described(self.target)}"

    @cached_property
    def leaves(self) -> list[Leaf]:
        return [leaf for leaf in _walk((self.inputs, self.target)) if isinstance(leaf, Leaf)]

    def values(self, record: Any) -> list[Any]:
        """A record's values in the order of `leaves`. Misfit if it is nested in another way; values are not looked at."""
        if not isinstance(record, tuple | list) or len(record) != 2:
            raise Misfit("structure", "is no pair (inputs, target)")
        found: list[Any] = []
        _collect(self.inputs, record[0], found)
        _collect(self.target, record[1], found)
        return found

    def batch(self, columns: Sequence[Tensor]) -> tuple[Any, Any]:
        """Tensors in the order of `leaves` nested as the records are."""
        if type(self.inputs) is type(self.target) is Leaf:  # the usual case, quicker
            return columns[0], columns[1]
        left = iter(columns)
        inputs, target = (
            _mapped(lambda leaf: next(left) if isinstance(leaf, Leaf) else leaf.value, part) for part in (self.inputs, self.target)
        )
        return inputs, target

    def example(self) -> tuple[Any, Any]:
        """A batch of one record that is all zeros."""
        return self.batch([torch.zeros((1, *leaf.shape), dtype=leaf.dtype) for leaf in self.leaves])

    def fitted(self, record: Any) -> list[Tensor]:
        """The record's values in the schema's types; Misfit, with the place, if it has none that fit."""
        fitted: list[Tensor] = []
        try:
            for leaf, value in zip(self.leaves, self.values(record), strict=True):
                fitted.append(leaf.fitted(value))
        except Misfit as misfit:
            place = "" if misfit.kind == "structure" else f"value {len(fitted) + 1} of {len(self.leaves)} "
            raise Misfit(misfit.kind, f"{place}{misfit}") from None
        return fitted


def as_tensor(value: Any) -> Tensor:
    """A tensor, array or number as a tensor on the CPU that shares no memory with arrays."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise Misfit("type", "is a sparse or quantised tensor: use a plain one")
        return value.detach().cpu().as_subclass(Tensor)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), subok=False))
    if isinstance(value, bool | int):
        return torch.tensor(value if isinstance(value, bool) else int(value))
    if isinstance(value, float | complex):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.complex128)
    kind = f"{type(value).__name__} of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise Misfit("type", f"is of type {kind}: a model takes tensors, arrays and numbers")


# --- trees ----------------------------------------------------------------------------------------------------------------
def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _mapped(change, part) for key, part in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [_mapped(change, part) for part in tree]
        if isinstance(tree, list):
            return parts
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return change(tree)


def _walk(tree: Any) -> Iterator[Leaf | Constant]:
    if isinstance(tree, Leaf | Constant):
        yield tree
    else:
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _walk(part)


def _collect(tree: Any, value: Any, found: list[Any]) -> None:
    if isinstance(tree, Leaf):
        found.append(value)
    elif isinstance(tree, Constant):
        if value != tree.value:
            raise Misfit("structure", f"has not {tree} where the schema has it")
    elif isinstance(tree, dict):
        if not isinstance(value, Mapping) or value.keys() != tree.keys():
            raise Misfit("structure", f"has no dict with the keys {', '.join(map(repr, tree))} where the schema has one")
        for key, part in tree.items():
            _collect(part, value[key], found)
    else:
        if not isinstance(value, tuple | list) or len(value) != len(tree):
            raise Misfit("structure", f"has no tuple of {len(tree)} values where the schema has one")
        for part, own in zip(tree, value, strict=True):
            _collect(part, own, found)


def _described(tree: Any) -> str:
    if isinstance(tree, Leaf | Constant):
        return str(tree)
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key}: {_described(part)}" for key, part in tree.items()) + "}"
    return "(" + ", ".join(map(_described, tree)) + ")"


# --- single values --------------------------------------------------------------------------------------------------------
def _pair(record: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(record, tuple | list) or len(record) != 2:
        raise DataError(
            f"{what} must be a pair (inputs, target). Several inputs go into a tuple or a dict: ((a, b), target). "
            "dpulr.data.Columns makes pairs of items that are dicts, dpulr.data.ArrayDataset of the rows of two arrays."
        )
    return record[0], record[1]


def _leaf_of(value: Any, what: str) -> Leaf:
    try:
        tensor = as_tensor(value)
    except Misfit as misfit:
        raise DataError(f"a value in {what} {misfit}.") from None
    except (OverflowError, RuntimeError, TypeError, ValueError):
        raise DataError(f"a value in {what} is of type {type(value).__name__}, which torch can't hold.") from None
    return Leaf(tensor.dtype, tuple(tensor.shape))


def _type_of(column: Any) -> torch.dtype:
    return column.dtype if isinstance(column, Tensor) else as_tensor(column[:0]).dtype


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
