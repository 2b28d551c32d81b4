"""What the parts of a step take, as CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import dpulr

Spent = dict[str, float]


def timed(parts: Mapping[str, Sequence[str]], spent: Spent) -> None:
    """Count what methods, named "module:Class.method", take under the label of their part, without timed methods inside them."""
    for label, names in parts.items():
        for path in names:
            module, _, inside = path.partition(":")
            owner, _, name = inside.partition(".")
            _count(getattr(import_module(module), owner), name, label, spent)


def _count(owner: Any, name: str, label: str, spent: Spent) -> None:
    inner: Callable[..., Any] = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        before, start = spent["all timed"], time.thread_time()
        result = inner(*args, **kwargs)
        own = time.thread_time() - start - (spent["all timed"] - before)
        spent[label] += own
        spent["all timed"] += own
        return result

    setattr(owner, name, method)


def stepped(engine: dpulr.PrivacyEngine, warm: int, clock: Callable[[], float], spent: Spent) -> float:
    """Take all steps, and return what they took without the first `warm` ones, which `spent` forgets."""
    start = 0.0
    for inputs, targets in engine.batches():
        if engine.steps_taken == warm:
            spent.clear()
            start = clock()
        engine.step(inputs, targets)
    return clock() - start
