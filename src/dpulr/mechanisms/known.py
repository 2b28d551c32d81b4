"""The one list of mechanisms. What is registered here is known to the engine and to every command by its name."""

from __future__ import annotations

from importlib import import_module
from typing import TypeVar

from dpulr.errors import InvalidArgument
from dpulr.mechanisms.base import Mechanism
from dpulr.user_code import user_module

Kind = TypeVar("Kind", bound=type[Mechanism])
_REGISTERED: dict[str, type[Mechanism]] = {}
_ON_DEMAND = {"paper": "dpulr.paper.mechanism"}  # registers itself when it is imported


def register(kind: Kind) -> Kind:
    """Make a mechanism known by its name. It works as a decorator."""
    if not (isinstance(kind, type) and issubclass(kind, Mechanism) and isinstance(getattr(kind, "name", None), str)):
        raise InvalidArgument(f"{kind!r} is not a mechanism: it must be a subclass of dpulr.mechanisms.Mechanism with a name.")
    known = _REGISTERED.get(kind.name)
    if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise InvalidArgument(f"there is a mechanism {kind.name!r} already.")
    _REGISTERED[kind.name] = kind
    return kind


def registry() -> dict[str, type[Mechanism]]:
    """All mechanisms by name."""
    for module in _ON_DEMAND.values():
        import_module(module)
    return dict(_REGISTERED)


def kind_of(mechanism: str | Mechanism) -> type[Mechanism]:
    """The class of a mechanism, or the class of this name. "package.module:name" imports the module that registers it."""
    if isinstance(mechanism, Mechanism):
        return type(mechanism)
    if isinstance(mechanism, str) and ":" in mechanism:
        module, _, mechanism = mechanism.partition(":")
        user_module(module)
    known = registry()
    if mechanism not in known:
        raise InvalidArgument(
            f"mechanism is {mechanism!r}; it must be one of {', '.join(map(repr, known))}, or a configured object."
        )
    return known[mechanism]


def by_name(mechanism: str | Mechanism) -> Mechanism:
    """The mechanism itself, or the one of this name with its default settings."""
    return mechanism if isinstance(mechanism, Mechanism) else kind_of(mechanism)()
