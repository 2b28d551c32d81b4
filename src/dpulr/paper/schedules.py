"""Values that may differ by layer and by step, as the paper allows for its target deviation, repeats, clip bound and threshold."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpulr.errors import InvalidArgument

PerLayer = float | Sequence[float]
Setting = PerLayer | Mapping[Any, PerLayer] | Callable[[int, int], float]
"""A number; a list with one number per layer; a mapping {first step: number or list}; or a function of (step, layer)."""


class Schedule:
    """What a setting is at a step, one number per layer. Each value is checked by `check`, which raises or returns it."""

    def __init__(self, name: str, setting: Setting, layers: int, check: Callable[[object], float]) -> None:
        self.name, self.layers = name, layers
        self._check = check
        self._function = setting if callable(setting) else None
        self._starts: list[int] = []
        self._values: list[tuple[float, ...]] = []
        if not callable(setting):
            given = setting if isinstance(setting, Mapping) else {0: setting}
            for start, value in sorted(((_step(name, key), value) for key, value in given.items()), key=lambda pair: pair[0]):
                self._starts.append(start)
                self._values.append(self._layered(value))
            if not self._starts or self._starts[0] != 0:
                raise InvalidArgument(f"{name} must say what holds from step 0 on.")

    def at(self, step: int) -> tuple[float, ...]:
        """One number a layer. Steps count from 0."""
        if self._function is not None:
            return tuple(self._check(self._function(step, layer)) for layer in range(self.layers))
        return self._values[bisect_right(self._starts, step) - 1]

    def _layered(self, value: PerLayer) -> tuple[float, ...]:
        if isinstance(value, Sequence) and not isinstance(value, str):
            if len(value) != self.layers:
                raise InvalidArgument(f"{self.name} has {len(value)} values, but the model has {self.layers} layers.")
            return tuple(map(self._check, value))
        return (self._check(value),) * self.layers


def _step(name: str, key: object) -> int:
    text = str(key)
    if not text.isdecimal():
        raise InvalidArgument(f"{name} has the key {key!r}; keys are the numbers of the steps from which a value holds.")
    return int(text)
