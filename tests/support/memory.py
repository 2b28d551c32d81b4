"""Counts the bytes of live tensors while a piece of code runs."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """`peak` is the most that tensors held at one time, of those that were not there before the start."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.held = [thing for thing in gc.get_objects() if _plain(thing)]  # held, so that no address is used again
        self.known = {_key(tensor) for tensor in self.held}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.live = {key: value for key, value in self.live.items() if not value[0].expired()}
        for leaf in pytree.tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor) and _key(leaf) not in self.known:
                storage = leaf.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


def _plain(thing: object) -> bool:
    """A tensor with a storage: not sparse, not without a shape yet."""
    return type(thing) in (Tensor, nn.Parameter) and thing.layout == torch.strided


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
