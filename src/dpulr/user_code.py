"""Modules of the user, by name. The working folder is searched first, as it is where a command is given."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType

from dpulr.errors import UsageError


def user_module(name: str) -> ModuleType:
    """Import it; say in a sentence why that fails, if it does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return import_module(name)
    except Exception as problem:
        raise UsageError(f"{name!r} can't be imported: {named(problem)}") from problem


def named(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".rstrip(": ")
