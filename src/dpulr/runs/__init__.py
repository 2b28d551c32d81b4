"""A run is a folder: settings, a ledger written ahead, checkpoints, metrics and a result (docs/cli.md)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpulr.runs.blackbox import BlackBox, load
    from dpulr.runs.errors import Interrupted, PrivacyRefusal, RunError, UsageError
    from dpulr.runs.run import resume, start
    from dpulr.runs.scoring import Scores, score
    from dpulr.runs.settings import Settings

__all__ = [
    "BlackBox",
    "Interrupted",
    "PrivacyRefusal",
    "RunError",
    "Scores",
    "Settings",
    "UsageError",
    "load",
    "resume",
    "score",
    "start",
]

_HOME = {
    "BlackBox": "blackbox",
    "Interrupted": "errors",
    "PrivacyRefusal": "errors",
    "RunError": "errors",
    "Scores": "scoring",
    "Settings": "settings",
    "UsageError": "errors",
    "load": "blackbox",
    "resume": "run",
    "score": "scoring",
    "start": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
