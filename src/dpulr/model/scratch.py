"""State that a forward pass writes into the model (membranes of spiking neurons, records of spikes): scratch of that one pass.

What a pass has written is put back after it, so that the next one starts where it did, and nothing of a record stays in the model.
Whether a later pass would depend on it is checked on synthetic inputs (model/row_independence.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_MISSING: Any = object()


class Place(NamedTuple):
    """A buffer, or an attribute, of a module."""

    owner: str
    module: nn.Module
    key: str
    is_buffer: bool

    @property
    def label(self) -> str:
        kind = type(self.module).__name__
        owner = f"'{self.owner}' ({kind})" if self.owner else f"the model ({kind})"
        return f"{'buffer' if self.is_buffer else 'attribute'} '{self.key}' of {owner}"

    def get(self) -> Any:
        if self.of_script:
            return getattr(self.module, self.key)
        return (self.module._buffers if self.is_buffer else vars(self.module)).get(self.key, _MISSING)

    def tensors(self) -> list[Tensor]:
        """All tensors that are there now."""
        return [leaf for leaf in pytree.tree_leaves(self.get()) if isinstance(leaf, Tensor)]

    @property
    def of_script(self) -> bool:
        """TorchScript hands out its buffers as new objects each time."""
        return isinstance(self.module, torch.jit.ScriptModule)

    def set(self, value: Any) -> None:
        if self.of_script:
            setattr(self.module, self.key, value)
            return
        values = self.module._buffers if self.is_buffer else vars(self.module)
        if value is _MISSING:
            values.pop(self.key, None)
        else:
            values[self.key] = value


def places(model: nn.Module) -> list[Place]:
    """All that a pass may write: buffers, and attributes that are no modules or parameters."""
    return [
        Place(owner, module, key, is_buffer)
        for owner, module in model.named_modules()
        for keys, is_buffer in _keys(module)
        for key in keys
    ]


def _keys(module: nn.Module) -> list[tuple[list[str], bool]]:
    if isinstance(module, torch.jit.ScriptModule):
        return [([name for name, _ in module.named_buffers(recurse=False)], True)]
    return [(list(module._buffers), True), ([key for key in vars(module) if key not in _OF_EVERY_MODULE], False)]


class Scratch:
    """What some places of a model held when this was made. With `model`, what a pass adds to it is found, too."""

    def __init__(self, chosen: list[Place], model: nn.Module | None = None) -> None:
        self._kept = [(place, _Kept(place.get())) for place in chosen]
        self._model, self._known = model, {place[1:] for place in chosen}

    @classmethod
    def of(cls, model: nn.Module) -> Scratch:
        """All places of a model."""
        return cls(places(model), model)

    @property
    def places(self) -> list[Place]:
        return [place for place, _ in self._kept]

    def _new(self) -> list[Place]:
        return [] if self._model is None else [place for place in places(self._model) if place[1:] not in self._known]

    def written(self) -> list[Place]:
        """The places that hold something else by now."""
        return [place for place, kept in self._kept if kept.differs(place.get(), anew=place.of_script)] + self._new()

    def put_back(self) -> None:
        """Every place holds the very objects it held, with their values."""
        for place in self._new():
            place.set(_MISSING)
        for place, kept in self._kept:
            if kept.differs(place.get(), anew=place.of_script):
                place.set(kept.restored())

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """A pass that starts from this state and leaves nothing behind."""
        if not self._kept and self._model is None:
            yield
            return
        self.put_back()
        try:
            yield
        finally:
            self.put_back()


NO_SCRATCH = Scratch([])


class _Kept:
    """A value and what it consisted of: tensors by copies, lists and dicts by their items, anything else by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.items: list[tuple[Any, _Kept]] = []
        self.copy: Tensor | None = None
        if isinstance(value, Tensor):
            self.copy = value.detach().clone()
        elif isinstance(value, dict):
            self.items = [(key, _Kept(item)) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            self.items = [(i, _Kept(item)) for i, item in enumerate(value)]

    def differs(self, now: Any, *, anew: bool = False) -> bool:
        """`anew`: the same tensor may come as another object."""
        if now is not self.value and not anew:
            return True
        if self.copy is not None:
            return not equal_bits(now, self.copy)
        if isinstance(now, dict):
            return len(now) != len(self.items) or any(key not in now or kept.differs(now[key]) for key, kept in self.items)
        if isinstance(now, list | tuple):
            return len(now) != len(self.items) or any(kept.differs(now[i]) for i, kept in self.items)
        return False

    def restored(self) -> Any:
        """The very object, with what it held."""
        if self.copy is not None:
            with torch.inference_mode():
                self.value.set_(self.copy.clone()) if self.value.shape != self.copy.shape else self.value.copy_(self.copy)
        items = [(key, kept.restored()) for key, kept in self.items]
        if isinstance(self.value, dict):
            self.value.clear()
            self.value.update(items)
        elif isinstance(self.value, list):
            self.value[:] = [item for _, item in items]
        return self.value


def equal_bits(first: Tensor, second: Tensor) -> bool:
    """Bit for bit, but for the kind of NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(((first == second) | ((first != first) & (second != second))).all())
