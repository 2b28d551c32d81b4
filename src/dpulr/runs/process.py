"""The process of a run: Ctrl-C and SIGTERM, and where the time went."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from dpulr.errors import Interrupted
from dpulr.files import read_lines


class Stop:
    """While entered, both signals set `requested`, or raise where `at_once` is set. A second signal always raises.

    They end a process at once while nothing is at stake, and after the current step while it trains.
    """

    def __init__(self) -> None:
        self.requested = False
        self.at_once = True
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.at_once or self.requested:
            raise Interrupted("interrupted.")
        self.requested = True


class Clock:
    """Adds the time since the last mark to a part: `end("steps")` after the steps."""

    def __init__(self) -> None:
        self._mark = self._begin = time.perf_counter()
        self._parts: dict[str, float] = {}
        self._ended: dict[str, float] = {}

    def end(self, part: str) -> None:
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._mark
        self._mark = self._ended[part] = now

    def since(self, part: str) -> float:
        """Seconds since a part last ended, or since the beginning."""
        return time.perf_counter() - self._ended.get(part, self._begin)

    def total(self) -> float:
        return time.perf_counter() - self._begin

    def seconds(self, **inside: float) -> dict[str, float]:
        """Seconds per part. What happens inside the steps (writing the ledger, communication) is taken out of them."""
        parts = {**self._parts, "steps": max(0.0, self._parts.get("steps", 0.0) - sum(inside.values())), **inside}
        return {name: round(value, 3) for name, value in parts.items() if value or name != "communication"}


def process_seconds(metrics: Path) -> dict[int, dict[str, float]]:
    """For each process of a run, the seconds that it had spent on each part when it last wrote a line of metrics."""
    last: dict[int, dict[str, float]] = {}
    for line in read_lines(metrics):
        process, seconds = line.get("process"), line.get("seconds")
        if isinstance(process, int) and isinstance(seconds, dict):
            last[process] = {str(name): float(value) for name, value in seconds.items() if isinstance(value, int | float)}
    return last


def seconds_before(metrics: Path, process: int) -> float:
    """Seconds that earlier processes of a run have spent, as far as they could tell before they ended."""
    return sum(sum(parts.values()) for number, parts in process_seconds(metrics).items() if number < process)
