"""What the parts of a step take, as CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import dpulr


def timed(owner: Any, name: str, label: str, spent: dict[str, float]) -> None:
    """Count what a method takes, without what timed methods inside it take."""
    inner: Callable[..., Any] = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        before, start = spent["all timed"], time.thread_time()
        result = inner(*args, **kwargs)
        own = time.thread_time() - start - (spent["all timed"] - before)
        spent[label] += own
        spent["all timed"] += own
        return result

    setattr(owner, name, method)


def stepped(engine: dpulr.PrivacyEngine, warm: int, clock: Callable[[], float], spent: dict[str, float]) -> float:
    """Take all steps, and return what they took without the first `warm` ones, which `spent` forgets."""
    start = 0.0
    for inputs, targets in engine.batches():
        if engine.steps_taken == warm:
            spent.clear()
            start = clock()
        engine.step(inputs, targets)
    return clock() - start
