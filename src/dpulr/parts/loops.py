"""Batches as a loop sees them: how many are left, and where an epoch ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Batch = tuple[Any, Any]


class Batches(Iterator[Batch]):
    """The next private batches of an engine. `len` is how many are left."""

    def __init__(self, batches: Iterator[Batch], left: Callable[[], int]) -> None:
        self._batches, self._left = batches, left

    def __next__(self) -> Batch:
        return next(self._batches)

    def __len__(self) -> int:
        return self._left()


class Epochs(Iterator[Batches]):
    """The rest of a run by epochs: `for epoch in engine.epochs(): for x, y in epoch: ...`. The last one may be shorter."""

    def __init__(self, batches: Callable[[int], Batches], size: int, steps: Callable[[], tuple[int, int]]) -> None:
        self._batches, self._size, self._steps = batches, size, steps  # steps: taken, planned

    def __next__(self) -> Batches:
        taken, planned = self._steps()
        if taken >= planned:
            raise StopIteration
        return self._batches(self._size - taken % self._size)

    def __len__(self) -> int:
        taken, planned = self._steps()
        return -(-planned // self._size) - taken // self._size if taken < planned else 0
