"""Nested batches: tensors in tuples, lists and dicts, with the records along the first axis of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def rows(batch: Any, start: int, stop: int) -> Any:
    """Rows start..stop of every tensor."""
    return pytree.tree_map(lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) else leaf, batch)


def row(batch: Any, index: int) -> Any:
    """A batch of one record."""
    return rows(batch, index, index + 1)


def choose(batch: Any, index: Tensor) -> Any:
    """These rows of every tensor."""
    return pytree.tree_map(lambda leaf: leaf[index.to(leaf.device)] if isinstance(leaf, Tensor) else leaf, batch)


def replaced(batch: Any, index: Sequence[int], by: Any) -> Any:
    """The batch with the only row of `by` in these places."""

    def put(leaf: Any, own: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.clone()
        leaf[list(index)] = own.to(leaf)
        return leaf

    return pytree.tree_map(put, batch, by)


def join(parts: Sequence[Any]) -> Any:
    """Batches, one after the other."""
    return pytree.tree_map(lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *parts)


def followed_by(batch: Any, one: Any, times: int) -> Any:
    """The batch, and behind it so many copies of the only row of `one`."""

    def put(leaf: Any, own: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        known, whole = getattr(leaf, _FOLLOWED, (None, leaf))
        if known is own and whole.shape[0] == leaf.shape[0] + times:
            return whole
        return torch.cat([leaf, own.expand(times, *own.shape[1:])])

    if _plain(batch):
        return tuple(map(put, batch, one))
    return pytree.tree_map(put, batch, one)


_ROOM, _FOLLOWED = "_room_behind", "_followed_by"


def with_room(buffer: Tensor, records: int) -> Tensor:
    """The first rows of a buffer, which know that those behind them are free."""
    first = buffer[:records]
    setattr(first, _ROOM, buffer)
    return first


def fill_room(batch: Any, one: Any, times: int) -> None:
    """Write what `followed_by` would add where the batch has room for it: then that need not copy the batch."""
    if times > 0 and _plain(batch):
        for leaf, own in zip(batch, one, strict=True):
            buffer, records = getattr(leaf, _ROOM, leaf), leaf.shape[0]
            if buffer.shape[0] >= records + times:
                buffer[records : records + times] = own
                setattr(leaf, _FOLLOWED, (own, buffer[: records + times]))


def tensors(batch: Any) -> list[Tensor]:
    """All tensors of a batch."""
    if isinstance(batch, Tensor) or _plain(batch):
        return [batch] if isinstance(batch, Tensor) else list(batch)
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def _plain(batch: Any) -> bool:
    """Nearly all batches are pairs of tensors: for these no slow walk by pytree is needed."""
    return type(batch) is tuple and all(isinstance(part, Tensor) for part in batch)


def count(batch: Any) -> int:
    """How many records a batch has."""
    return tensors(batch)[0].shape[0]


def tile(batch: Any, repeats: int) -> Any:
    """Every tensor repeated: row i of repeat r is row r * records + i."""
    if repeats == 1:
        return batch
    return pytree.tree_map(lambda leaf: leaf.repeat(repeats, *[1] * (leaf.dim() - 1)) if isinstance(leaf, Tensor) else leaf, batch)


def copied(batch: Any) -> Any:
    """The same values in new tensors."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)


def handed_out(batch: Any) -> Any:
    """The same values in new tensors, for somebody who may change them. They are copied when one side is written to, not before."""
    if _plain(batch):
        return tuple(_lazily(part) for part in batch)
    return pytree.tree_map(lambda leaf: _lazily(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def _lazily(leaf: Tensor) -> Tensor:
    try:
        return leaf._lazy_clone()
    except (AttributeError, RuntimeError):  # memory that is not torch's own
        return leaf.clone()


def described(batch: Any) -> str:
    """Shapes and types only, never values."""
    leaves = pytree.tree_leaves(batch)
    return " and ".join(
        f"{leaf.dtype} of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves
    )


def synthetic(example: Any, records: int, generator: torch.Generator, device: torch.device) -> Any:
    """A batch of `records` rows shaped like the one-row batch `example`, with none of its values.

    Checks of a model run on these, so that no refusal depends on a private value. Floats are uniform on [0, 1); whole numbers are
    0 or 1, which every vocabulary and every set of labels has.
    """

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = (records, *leaf.shape[1:])
        if leaf.is_floating_point() or leaf.is_complex():
            return torch.rand(shape, generator=generator, dtype=leaf.dtype).to(device)
        return torch.randint(0, 2, shape, generator=generator).to(device=device, dtype=leaf.dtype)

    return pytree.tree_map(make, example)


def call_model(model: Any, inputs: Any) -> Any:
    """A tuple or list of inputs becomes positional arguments, a mapping keyword arguments, anything else the only argument."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def call_on_copy(model: Any, inputs: Any) -> Any:
    """`call_model` for a model that may overwrite its inputs."""
    return call_model(model, copied(inputs))
