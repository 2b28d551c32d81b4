"""Where the time of a process went."""

from __future__ import annotations

import time
from pathlib import Path

from dpulr.runs.files import read_lines


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

    def seconds(self, *, ledger: float) -> dict[str, float]:
        """Seconds a part. Writing the ledger happens inside the steps and is taken out of them."""
        parts = {**self._parts, "steps": max(0.0, self._parts.get("steps", 0.0) - ledger), "ledger": ledger}
        return {name: round(value, 3) for name, value in parts.items()}


def process_seconds(metrics: Path) -> dict[int, dict[str, float]]:
    """For each process of a run, the seconds that it had spent on each part when it last wrote a line."""
    last: dict[int, dict[str, float]] = {}
    for line in read_lines(metrics):
        process, seconds = line.get("process"), line.get("seconds")
        if isinstance(process, int) and isinstance(seconds, dict):
            last[process] = {str(name): float(value) for name, value in seconds.items() if isinstance(value, int | float)}
    return last


def seconds_before(metrics: Path, process: int) -> float:
    """Seconds that earlier processes of a run have spent, as far as they could tell before they ended."""
    return sum(sum(parts.values()) for number, parts in process_seconds(metrics).items() if number < process)
