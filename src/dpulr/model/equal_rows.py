"""The same random numbers for every record, whatever the batch's size and the record's place in it: so that runs can be compared.

Two passes of a model with dropout differ by their masks. Inside `EqualRows` they do not, and any difference that is left is one
that records make to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpulr.errors import ModelRefused
from dpulr.randomness import public_seed

_OF_TORCH = frozenset(
    {"aten", "prim", "prims", "rngprims", "inductor", "inductor_prims", "debugprims", "profiler", "_native", "sparse"}
    | {"quantized", "_quantized", "quantization", "mkl", "mkldnn", "mkldnn_prepacked", "onednn"}
)
"""Namespaces of operators that torch itself brings. Those between processes (c10d) are not among them."""


def of_torch(func: Any) -> bool:
    """Whether an operator is one of torch's own: what it reads is known by its tags."""
    return func.namespace in _OF_TORCH


def draws_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """By torch's own tags, and whether there is anything to draw: attention without dropout, and dropout in eval mode, do not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    values = _by_name(func, args, kwargs)
    return all(values.get(name, True) not in (0, False) for name in ("dropout_p", "dropout", "train", "training"))


def _by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an operation, defaults included."""
    arguments = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return {**defaults, **dict(zip([argument.name for argument in arguments], args, strict=False)), **kwargs}


class EqualRows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation that draws random numbers does so for one record, and all records get what it drew.

    `records` is the size of the batch: the axis of that size counts them, or one whose size is a multiple of it (heads, repeats).
    Where there is none, or for one record, the operation is run as it is. Calls are seeded by their number, or, if not `counted`,
    all alike: for passes that leave out a part of the model. What is drawn from another generator than torch's own is refused,
    unless that is meant to be `public`; then it is left as it is.
    """

    def __init__(self, records: int, *, counted: bool = True, public: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records, self.counted, self.public, self.calls = records, counted, public, 0
        self._state = torch.get_rng_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws_numbers(func, args, kwargs):
            out = func(*args, **kwargs)
            if not of_torch(func):
                self._state = torch.get_rng_state()
            return out
        with self:
            out = func.decompose(*args, **kwargs)  # dropout, attention: into operations that do nothing but draw
        if out is not NotImplemented:
            return out
        values = _by_name(func, args, kwargs)
        if not self.public:
            self._refuse_known_numbers(values.get("generator"))
        elif values.get("generator") is not None:
            return func(**values)
        self.calls += 1
        try:
            return self._drawn(func, values)
        finally:
            self._state = torch.get_rng_state()

    def _refuse_known_numbers(self, generator: torch.Generator | None) -> None:
        """Secret randomness comes from torch's own generator. What the model seeds by itself, everybody can compute."""
        state = torch.get_rng_state()
        if generator is not None and not (generator.device.type == "cpu" and torch.equal(generator.get_state(), state)):
            raise ModelRefused(
                "the forward pass draws random numbers from a torch.Generator of its own. They are not secret, and one record more "
                "changes those of the others. Draw from torch's own generator: the engine makes that secret in each step."
            )
        if not torch.equal(state, self._state):
            raise ModelRefused(
                "the forward pass sets the seed of torch's generator, so that everybody knows what it draws. Leave the seed alone: "
                "the engine makes it secret in each step."
            )

    def _drawn(self, func: Any, values: dict[str, Any]) -> Any:
        if "generator" in values:
            values = {**values, "generator": None}
        size = values.get("size", values.get("shape"))
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        largest = max(tensors, key=lambda name: tensors[name].numel(), default=None)
        shape = list(tensors[largest].shape if size is None and largest is not None else size or [])
        axis = None if "out" in values else self._axis(shape)
        name = func.overloadpacket.__name__
        if axis is None or (name == "multinomial" and len(shape) == 1):
            return self._seeded(func, values)
        one = [1 if a == axis else length for a, length in enumerate(shape)]
        if size is not None:
            key = "size" if "size" in values else "shape"
            return self._seeded(func, {**values, key: one}).repeat(_times(axis, shape))
        assert largest is not None
        first = tensors[largest]
        if name == "native_dropout":
            scaled, mask = self._seeded(func, {**values, largest: first.new_ones(one)})
            return first * scaled, mask.expand(shape)
        if name.endswith("_like"):
            plain = {key: value for key, value in values.items() if key != "memory_format"}
            return self._seeded(func, {**plain, largest: first.new_empty(one)}).repeat(_times(axis, shape))
        if name.endswith("_") and len(tensors) == 1:
            return first.copy_(self._seeded(func, {**values, largest: first.new_empty(one)}))
        rows = [
            self._seeded(func, {**values, **{key: _at(tensor, axis, i, shape) for key, tensor in tensors.items()}})
            for i in range(shape[axis])
        ]
        if isinstance(rows[0], tuple):
            return tuple(torch.cat(parts, dim=axis) for parts in zip(*rows, strict=True))
        joined = torch.cat(rows, dim=axis)
        return first.copy_(joined) if name.endswith("_") else joined

    def _axis(self, shape: Sequence[int]) -> int | None:
        if self.records == 1:
            return None
        equal = [axis for axis, length in enumerate(shape) if length == self.records]
        multiple = [axis for axis, length in enumerate(shape) if length > 0 and length % self.records == 0]
        return next(iter([*equal, *multiple]), None)

    def _seeded(self, func: Any, values: dict[str, Any]) -> Any:
        public_seed(self.calls if self.counted else 0)
        return func(**values)


def _times(axis: int, shape: Sequence[int]) -> list[int]:
    return [length if a == axis else 1 for a, length in enumerate(shape)]


def _at(tensor: Tensor, axis: int, index: int, shape: Sequence[int]) -> Tensor:
    """One index along the axis that counts the records, of tensors that have it."""
    if tensor.dim() != len(shape) or tensor.shape[axis] != shape[axis]:
        return tensor
    return tensor.narrow(axis, index, 1).clone(memory_format=torch.contiguous_format)
