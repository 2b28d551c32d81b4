"""Memory policy: how many records, and how many repeats, go through the model at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from dpulr.allocator import keep_freed
from dpulr.errors import InvalidArgument
from dpulr.model.batches import count, rows
from dpulr.model.forward import Forward
from dpulr.model.people import People
from dpulr.model.sites import Site

_FAST = 64 * 2**20
"""Repeats are taken together while their replays need less than this: larger tensors leave the cache, which costs more."""


class Chunks:
    """Splits a batch, and the repeats of a pass, so that a step stays below the memory limit.

    The release is held twice in float64 and twice in the model's type; what the limit leaves beside that is for records. Without a
    limit: 128 MiB, or four times what one record needs if that is more. More would be slower.
    """

    def __init__(self, forward: Forward, sites: Sequence[Site], size: int, memory_limit: int | None) -> None:
        self._forward, self._itemsize = forward, forward.dtype.itemsize
        self.row_bytes = [self._row_bytes(site, replay) for site, replay in zip(sites, forward.replay_bytes, strict=False)]
        self._record_bytes = forward.bytes_per_record + 2 * max(self.row_bytes, default=0)
        fixed = (16 + 2 * self._itemsize) * size
        if memory_limit is not None and memory_limit < fixed + self._record_bytes:
            raise InvalidArgument(
                f"memory_limit is {memory_limit} bytes, but a step on one record of this model takes about "
                f"{fixed + self._record_bytes}."
            )
        self.room = max(2 * _FAST, 4 * self._record_bytes) if memory_limit is None else memory_limit - fixed
        if forward.device.type == "cpu" and sites:  # not for zeroth-order, which is to take no more memory than inference
            keep_freed(min(self.room, 4 * _FAST))

    @property
    def most(self) -> int:
        """The most records of a clean pass."""
        return max(1, self.room // self._record_bytes)

    def _row_bytes(self, site: Site, replay: int) -> int:
        """Bytes that one record costs in one replay: what the pass allocates, its perturbation, the next one, the output."""
        return replay + self._itemsize * (5 * site.full_dim + 3 * math.prod(site.output_shape))

    def parts(self, batch: tuple[Any, Any], people: People | None, most: int) -> Iterator[tuple[tuple[Any, Any], People | None]]:
        """The batch in parts of at most so many records; where there are people, of whole ones."""
        if people is not None:
            yield from people.parts(batch, most)
            return
        records = count(batch[1])
        for start in range(0, records, most):
            yield (batch if records <= most else rows(batch, start, start + most)), None

    def replays(self, bytes_per_record: int, records: int) -> int:
        """How many replays that take so much fit into one pass: below the memory limit, and small enough to stay in the cache."""
        room = min(self.room - records * self._forward.bytes_per_record, _FAST)
        return room // (max(records, 1) * bytes_per_record)

    def repeats(self, bytes_per_record: int, records: int, repeats: int) -> Iterator[int]:
        """Repeats in parts that fit into one pass."""
        most = max(1, self.replays(bytes_per_record, records))
        while repeats > 0:
            part = min(most, repeats)
            yield part
            repeats -= part
