"""The registry of events, and events as plain JSON values. It is open: `register` takes a class from anywhere.

An event is a frozen dataclass with a class attribute `kind`, the name that a ledger knows it by. What is written must be readable
for years: a kind keeps its meaning, and an unknown kind or field is an error, never a cheaper event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from numbers import Integral, Real
from typing import Any, TypeVar

from dpulr.errors import InvalidArgument

Class = TypeVar("Class", bound=type[Any])

_CLASSES: dict[str, type[Any]] = {}
_ELSEWHERE = {
    "paper": "dpulr.paper.nominal",
    "laplace": "dpulr.accounting.laplace",
}  # kinds whose home is loaded when a ledger names them


def register(cls: Class) -> Class:
    """Make a class of events known by its `kind`. It can be used as a decorator."""
    kind = cls.__dict__.get("kind")
    if not isinstance(kind, str) or not is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise InvalidArgument(f"{cls.__name__} can't be registered: it must be a frozen dataclass with a name, `kind`, of its own.")
    known = _class_of(kind)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise InvalidArgument(f"kind is {kind!r}, which {known.__module__}.{known.__qualname__} has already.")
    _CLASSES[kind] = cls
    return cls


def to_dict(event: Any) -> dict[str, Any]:
    """The event as plain JSON values."""
    if not _is_known(event):
        raise InvalidArgument(f"{type(event).__name__} is not an event this version knows.")
    return {"kind": event.kind, **{item.name: _plain(getattr(event, item.name)) for item in fields(event)}}


def from_dict(data: Mapping[str, Any]) -> Any:
    """The event written by `to_dict`, of this version or an older one."""
    kind = data.get("kind") if isinstance(data, Mapping) else None
    cls = _class_of(kind) if isinstance(kind, str) else None
    if cls is None:
        raise InvalidArgument(f"Unknown event kind {kind!r}: its cost cannot be stated. Was it written by a newer version?")
    values = {name: _revived(value) for name, value in data.items() if name != "kind"}
    if hasattr(cls, "from_older"):
        values = cls.from_older(values)
    unknown = set(values) - {item.name for item in fields(cls)}
    if unknown:
        raise InvalidArgument(f"Unknown field {sorted(unknown)[0]!r} in an event of kind {kind!r}.")
    try:
        return cls(**values)
    except TypeError as error:
        raise InvalidArgument(f"Event of kind {kind!r} is incomplete or malformed: {error}.") from error


def _class_of(kind: str) -> type[Any] | None:
    home = _ELSEWHERE.get(kind)
    if kind not in _CLASSES and home is not None:
        _ELSEWHERE.pop(kind)  # it registers itself, which asks here again
        import_module(home)
    return _CLASSES.get(kind)


def _is_known(event: Any) -> bool:
    return _CLASSES.get(getattr(event, "kind", "")) is type(event)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else to_dict(value)


def _revived(value: Any) -> Any:
    if isinstance(value, Mapping):
        return from_dict(value)
    return tuple(_revived(item) for item in value) if isinstance(value, list | tuple) else value
