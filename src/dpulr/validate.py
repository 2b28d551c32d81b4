"""Input checks. Each raises ValueError with a plain sentence that says what was given and what was expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real


def number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise ValueError(f"{name} is {value!r}; it must be a number.")
    return float(value)


def positive(name: str, value: object) -> float:
    given = number(name, value)
    if not 0 < given < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be positive and finite.")
    return given


def whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} is {value!r}; it must be a whole number.")
    if value < least:
        raise ValueError(f"{name} is {value!r}; it must be at least {least}.")
    return int(value)


def rate(value: object) -> float:
    given = number("sample_rate", value)
    if not 0 < given <= 1:
        raise ValueError(f"sample_rate is {value!r}; it must lie in (0, 1].")
    return given


def delta(value: object) -> float:
    given = number("delta", value)
    if not 0 < given < 1:
        raise ValueError(f"delta is {value!r}; it must lie strictly between 0 and 1.")
    return given


def method(value: object) -> str:
    if value not in ("pld", "rdp"):
        raise ValueError(f"method is {value!r}; it must be 'pld' or 'rdp'.")
    return str(value)


def per_layer(name: str, value: float | int | Sequence[float] | None, layers: int, default: float | int) -> list[float | int]:
    """One value per layer from None, a scalar or a list."""
    if value is None:
        return [default] * layers
    if isinstance(value, Real):
        return [value] * layers  # type: ignore[list-item]
    values = list(value)  # type: ignore[arg-type]
    if len(values) != layers:
        raise ValueError(f"{name} has {len(values)} entries for {layers} layers; give one each.")
    return values
