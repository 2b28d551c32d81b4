"""Mechanisms: how a step turns records into a private gradient. `by_name` finds one; each is also a configurable object."""

from __future__ import annotations

from dpulr.mechanisms.base import Bound, Mechanism
from dpulr.mechanisms.gaussian import Gaussian
from dpulr.mechanisms.hidden_direction import HiddenDirection
from dpulr.mechanisms.zeroth_order import ZerothOrder
from dpulr.paper.mechanism import Paper

__all__ = ["Bound", "Gaussian", "HiddenDirection", "Mechanism", "Paper", "ZerothOrder", "by_name"]

_KINDS: dict[str, type[Mechanism]] = {kind.name: kind for kind in (HiddenDirection, Gaussian, ZerothOrder, Paper)}


def by_name(mechanism: str | Mechanism) -> Mechanism:
    """The mechanism itself, or the one of this name with its default settings."""
    if isinstance(mechanism, Mechanism):
        return mechanism
    if mechanism not in _KINDS:
        raise ValueError(f"mechanism is {mechanism!r}; it must be one of {', '.join(map(repr, _KINDS))}, or a configured object.")
    return _KINDS[mechanism]()
