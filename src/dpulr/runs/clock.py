"""Where the time of a process went."""

from __future__ import annotations

import time


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
