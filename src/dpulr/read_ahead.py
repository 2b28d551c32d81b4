"""Reading a batch before it is needed, in other processes: for data sets that are read record by record.

A worker's generators (torch's, numpy's, Python's) start from the operating system's secret numbers, so that no augmentation can be
foretold. A record whose reading ends its worker contributes nothing, as any other that can't be read.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack

import numpy as np
import torch

from dpulr.randomness import RandomSource

Columns = list[np.ndarray]
Part = tuple[Columns, np.ndarray]
Read = Callable[[np.ndarray], Part]
"""From the places of records to their columns, and which of the places are in them."""

_PARTS_PER_WORKER = 4
_read: Read
_secrets = ExitStack()


class Workers:
    """Processes that call `read` on parts of a batch."""

    def __init__(self, read: Read, count: int) -> None:
        self._read, self._count = read, count
        self._pool = self._started()

    def start(self, places: np.ndarray) -> Callable[[], list[Part]]:
        """Begin to read; the function that comes back waits for the parts, in their order. What they hold is counted over all."""
        parts = np.array_split(places, min(len(places), self._count * _PARTS_PER_WORKER) or 1)
        try:
            begun: list[Future[Part] | None] = [self._pool.submit(_part, part) for part in parts]
        except BrokenProcessPool:  # a worker ended while it had nothing to do
            begun = [None] * len(parts)

        def finish() -> list[Part]:
            done, before = [], 0
            for future, part in zip(begun, parts, strict=True):
                columns, found = self._finished(future, part)
                done.append((columns, found + before))
                before += len(part)
            return done

        return finish

    def _finished(self, begun: Future[Part] | None, places: np.ndarray) -> Part:
        if begun is not None:
            try:
                return begun.result()
            except Exception:
                pass  # one of these records has ended its worker
        found = [(i, part) for i, place in enumerate(places) for part in self._alone(place)]
        columns = [np.concatenate(own) for own in zip(*[columns for _, (columns, _) in found], strict=True)]
        return columns, np.array([i for i, (_, kept) in found if len(kept)], dtype=np.int64)

    def _alone(self, place: np.int64) -> list[Part]:
        try:
            return [self._pool.submit(_part, np.array([place])).result()]
        except Exception:
            self._pool.shutdown(wait=False)
            self._pool = self._started()
            return []

    def _started(self) -> ProcessPoolExecutor:
        """All processes exist before this returns: later, other threads would run while they are forked."""
        way = "fork" if sys.platform == "linux" else None  # macOS has it, but its libraries do not survive it
        pool = ProcessPoolExecutor(self._count, multiprocessing.get_context(way), _begin, (self._read,))
        pool.submit(os.getpid).result()
        return pool


def _begin(read: Read) -> None:
    """In a worker, once."""
    global _read
    _read = read
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _secrets.enter_context(RandomSource().reading_randomness())
    end_with_parent()


def end_with_parent() -> None:
    """From now on this process ends when the one that started it does, however that ends."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _part(places: np.ndarray) -> Part:
    try:
        return _read(places)
    except BaseException:  # SystemExit, say
        raise RuntimeError from None  # its text may name a record
