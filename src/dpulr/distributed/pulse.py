"""Who is still there: each rank writes a sign of life into the store of torch.distributed, once a second.

A collective that fails says that somebody is missing, not who. The signs of life do: a rank that died, was stopped or has ended
gives none, and one that is busy with something else has come to fewer meetings than the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_INTERVAL = 0.5
_PATIENCE = 4.0
_STORE_SECONDS = 5.0


class Pulse:
    """The signs of life of one rank, and what can be told from those of the others."""

    def __init__(self, store: Any, rank: int, names: Sequence[str]) -> None:
        self.rank, self.names = rank, names
        self.meetings = 0
        self._store, self._ended = store, threading.Event()
        threading.Thread(target=self._beat, name="dpulr-pulse", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def _beat(self) -> None:
        beats = 0
        while not self._ended.is_set():
            beats += 1
            try:
                self._store.set(f"pulse/{self.rank}", f"{beats} {self.meetings}")
            except RuntimeError:  # the store is gone: whoever waits for this rank will find out
                return
            self._ended.wait(_INTERVAL)

    def verdict(self, problem: BaseException) -> str:
        """Which rank is missing, in words. The first rank to ask decides; the others, which lose it too, say the same."""
        try:
            if self._store.check(["verdict"]):
                return str(self._store.get("verdict").decode())
            found = self._missing(problem)
            return str(self._store.compare_set("verdict", "", found).decode())
        except RuntimeError:
            return f"{self.names[0]} has ended, died or hangs: the store of torch.distributed, which it or torchrun holds, is gone"

    def _missing(self, problem: BaseException) -> str:
        before = self._signs()
        end = time.monotonic() + _PATIENCE
        silent = set(range(len(self.names))) - {self.rank}
        while silent and time.monotonic() < end:
            time.sleep(_INTERVAL / 2)
            now = self._signs()
            silent -= {rank for rank in silent if now[rank][0] > before[rank][0]}
        if silent:
            return f"{self._listed(silent)} {'has' if len(silent) == 1 else 'have'} ended, died or hang{'s' * (len(silent) == 1)}"
        meetings = [count for _, count in self._signs()]
        behind = {rank for rank, count in enumerate(meetings) if count < max(meetings)}
        if behind:
            return f"{self._listed(behind)} did not come, but lives: it does something else, or works for longer than the time-out"
        return f"the connection between the ranks broke ({type(problem).__name__})"

    def _signs(self) -> list[tuple[int, int]]:
        """For each rank its signs of life so far, and the meetings that it has come to."""
        found = []
        for rank in range(len(self.names)):
            key = f"pulse/{rank}"
            beats, meetings = self._store.get(key).decode().split() if self._store.check([key]) else ("0", "0")
            found.append((int(beats), int(meetings)))
        return found

    def _listed(self, ranks: set[int]) -> str:
        return " and ".join(self.names[rank] for rank in sorted(ranks))


def own_store(store: Any, prefix: str) -> Any:
    """A part of a store that nobody else writes to, over a connection of its own if that can be had: no other call has to wait."""
    with suppress(AttributeError, RuntimeError):  # older versions of torch, and stores that can't be cloned
        store = store.clone()
        store.set_timeout(timedelta(seconds=_STORE_SECONDS))
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
