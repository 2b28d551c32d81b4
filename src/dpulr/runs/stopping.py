"""Ctrl-C and SIGTERM: end at once while nothing is at stake, after the current step while training."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from dpulr.runs.errors import Interrupted


class Stop:
    """While entered, both signals set `requested`, or raise where `at_once` is set. A second signal always raises."""

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
