"""What a run has cost: releases that state their facts, and the accountants that price them. No torch here.

The names stand in `public.py`. They load when the first of them is used: importing the package takes no time.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpulr.accounting.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    path = f"{__name__}.{name}"
    is_module = not name.startswith("_") and find_spec(path) is not None
    value = import_module(path) if is_module else vars(import_module(f"{__name__}.public")).get(name)
    if value is None or name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(name for name in vars(import_module(f"{__name__}.public")) if not name.startswith("_"))
