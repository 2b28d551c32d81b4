"""The only input checks of the project. Each returns the value, or raises InvalidArgument: what was given, what was expected."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from numbers import Integral, Real
from typing import NoReturn, TypeVar

from dpulr.errors import InvalidArgument

Choice = TypeVar("Choice")
_LONGEST = 2_592_000


def refuse(name: str, value: object, wanted: str) -> NoReturn:
    """The sentence of every check here."""
    raise InvalidArgument(f"{name} is {value!r}; it must be {wanted}.")


def number(name: str, value: object, wanted: str = "a number") -> float:
    """A real number; infinity is one, NaN and True are not."""
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        refuse(name, value, wanted)
    return float(value)


def positive(name: str, value: object) -> float:
    wanted = "a positive, finite number"
    if not 0 < number(name, value, wanted) < math.inf:
        refuse(name, value, wanted)
    return number(name, value)


def timeout(name: str, value: object) -> float:
    """Seconds, as many as torch.distributed can wait."""
    if positive(name, value) > _LONGEST:
        refuse(name, value, f"at most {_LONGEST:,} seconds, which is a month")
    return number(name, value)


def at_least(name: str, value: object, least: float) -> float:
    wanted = f"a finite number of at least {least:g}"
    if not least <= number(name, value, wanted) < math.inf:
        refuse(name, value, wanted)
    return number(name, value)


def whole_number(name: str, value: object, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        refuse(name, value, f"a whole number of at least {least}")
    return int(value)


def fraction(name: str, value: object) -> float:
    """Strictly between 0 and 1."""
    wanted = "a number strictly between 0 and 1"
    if not 0 < number(name, value, wanted) < 1:
        refuse(name, value, wanted)
    return number(name, value)


def rate(value: object, name: str = "sample_rate") -> float:
    wanted = "a number above 0 and at most 1"
    if not 0 < number(name, value, wanted) <= 1:
        refuse(name, value, wanted)
    return number(name, value)


def delta(value: object, name: str = "delta") -> float:
    wanted = "a number strictly between 0 and 1, well below 1 / (size of the data set)"
    if not 0 < number(name, value, wanted) < 1:
        refuse(name, value, wanted)
    return number(name, value)


def delta_or_zero(value: object, name: str = "delta") -> float:
    """0 asks for pure epsilon."""
    return 0.0 if value == 0 and not isinstance(value, bool) else delta(value, name)


def one_of(name: str, value: Choice, options: Collection[Choice]) -> Choice:
    if not any(type(value) is type(option) and value == option for option in options):
        listed = [repr(option) for option in options]
        refuse(name, value, " or ".join(filter(None, [", ".join(listed[:-1]), *listed[-1:]])))
    return value


def boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        refuse(name, value, "True or False")
    return value


def method(value: str) -> str:
    return one_of("method", value, ("pld", "rdp"))


def per_layer(name: str, value: float | Iterable[float] | None, layers: int, default: float) -> list[float]:
    """One value per layer, from None, one number for all or a list."""
    if value is None:
        return [default] * layers
    if isinstance(value, int | float):
        return [value] * layers
    if isinstance(value, str) or not isinstance(value, Iterable):
        refuse(name, value, "a number, or a list with one number per layer")
    values = list(value)
    if len(values) != layers:
        raise InvalidArgument(f"{name} has {len(values)} entries for {layers} layers; give one per layer.")
    return values
