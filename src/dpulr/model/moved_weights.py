"""A model with moved weights and no copy of them: an operation that takes a parameter sees it moved, the parameter stays as it is.

Only one parameter is moved at a time, while the operation that uses it runs. So nothing has to be moved back, and nothing drifts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from tempfile import SpooledTemporaryFile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK = 2**20
"""Directions are made again in blocks of so many numbers."""
_IN_MEMORY = 2**22


class Direction:
    """A public normal vector over all parameters, made again from its seed, block by block. The last block is kept.

    sphere: scaled to the length sqrt(dim).
    """

    def __init__(self, seed: int, dim: int, dtype: torch.dtype, device: torch.device, *, sphere: bool = False) -> None:
        self._seed, self._dim, self._dtype, self._device = seed, dim, dtype, device
        self._number, self._block = -1, torch.empty(0)
        self._scale = 1.0
        if sphere:
            squares = (self._made(i).double().square().sum().item() for i in range(math.ceil(dim / BLOCK)))
            self._scale = math.sqrt(dim / math.fsum(squares))

    def add_to(self, values: Tensor, offset: int, alpha: float) -> None:
        """Add `alpha` times the numbers from `offset` on, in place, to contiguous `values`."""
        flat, start, end = values.view(-1), offset, offset + values.numel()
        while start < end:
            number, within = divmod(start, BLOCK)
            size = min(end - start, BLOCK - within)
            part = self._made(number)[within : within + size]
            flat[start - offset : start - offset + size].add_(part, alpha=alpha * self._scale)
            start += size

    def add_to_rows(self, values: Tensor, rows: Tensor, offset: int, alpha: float) -> None:
        """The same for these rows, in ascending order, of a table that begins at `offset`; `values` is (rows, width).

        Product and sum are rounded one by one: the bits of a row don't depend on which others there are.
        """
        width = values.shape[1]
        starts = rows * width + offset
        block_of = torch.div(starts + (width - 1), BLOCK, rounding_mode="floor")  # that of a row's last number
        first, last = int(starts[0]) // BLOCK, int(block_of[-1])
        ends = torch.searchsorted(block_of, torch.arange(first, last + 1, device=rows.device), right=True).tolist()
        before = torch.empty(0, dtype=self._dtype, device=self._device)
        for number, (start, end) in enumerate(pairwise([0, *ends]), first):
            block = self._made(number)
            if start < end:
                windows = torch.cat([before, block]).unfold(0, width, 1)
                values[start:end] += windows[starts[start:end] - (number * BLOCK - len(before))] * (alpha * self._scale)
            before = block[len(block) - min(width - 1, len(block)) :]

    def _made(self, number: int) -> Tensor:
        if number != self._number:
            seed = (
                self._seed
                if number == 0
                else int(np.random.SeedSequence((self._seed, number)).generate_state(1, np.uint64)[0] >> 1)
            )
            generator = torch.Generator(self._device).manual_seed(seed)
            size = min(BLOCK, self._dim - number * BLOCK)
            self._number, self._block = number, torch.randn(size, generator=generator, dtype=self._dtype, device=self._device)
        return self._block


class Moved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it lasts, operations see these parameters moved by `length` times the direction. `offsets`: where each begins in it."""

    def __init__(self, offsets: Mapping[nn.Parameter, int], direction: Direction, length: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._offsets = {id(parameter): offset for parameter, offset in offsets.items()}
        self._direction, self._length = direction, length

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding.default and id(args[0]) in self._offsets and args[0].shape[1] < BLOCK:
            return self._rows(args[0], args[1])
        return func(*self._seen(args), **({name: self._seen(value) for name, value in kwargs.items()} if kwargs else {}))

    def _seen(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._moved(value) if id(value) in self._offsets else value
        if isinstance(value, tuple | list):
            return type(value)(self._seen(item) for item in value) if value else value
        return value

    def _rows(self, table: Tensor, index: Tensor) -> Tensor:
        """Of a table that is looked up, only the rows that are wanted: it may be most of the model."""
        rows, places = torch.unique(index, return_inverse=True)
        with torch.inference_mode(False), torch.no_grad():
            moved = table[rows]
            if len(rows):
                self._direction.add_to_rows(moved, rows, self._offsets[id(table)], self._length)
        return moved[places]

    def _moved(self, parameter: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():  # what takes a view of it expects a plain tensor, as a parameter is
            moved = parameter.clone(memory_format=torch.contiguous_format)
            self._direction.add_to(moved, self._offsets[id(parameter)], self._length)
        return moved


@contextmanager
def put_back_later(parameters: Iterable[Tensor]) -> Iterator[None]:
    """What is done to these tensors in place is undone, bit for bit. Their values wait in memory, or on disk if they are many."""
    tensors = list(parameters)
    with SpooledTemporaryFile(max_size=_IN_MEMORY) as file:
        for tensor in tensors:
            for block in blocks_of(tensor):
                file.write(block.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        try:
            yield
        finally:
            file.seek(0)
            with torch.no_grad():
                for tensor in tensors:
                    for block in blocks_of(tensor):
                        read = bytearray(file.read(block.numel() * block.element_size()))
                        block.copy_(torch.frombuffer(read, dtype=block.dtype).view(block.shape))


def blocks_of(tensor: Tensor) -> Iterator[Tensor]:
    """Parts that cover the tensor, each a view of it."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from torch.split(tensor.detach().view(-1), BLOCK)
    else:
        yield tensor.detach()
