"""A run is a folder: settings, a ledger written ahead, checkpoints, metrics and a result (docs/cli.md)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpulr.errors import Interrupted, PrivacyRefusal, RunError, UsageError
    from dpulr.runs.loading import TrainedModel, load
    from dpulr.runs.recorder import Recording, record
    from dpulr.runs.run import resume, start
    from dpulr.runs.settings import Settings
    from dpulr.runs.training import train_and_evaluate
    from dpulr.scores import Scores, score

__all__ = [
    "Interrupted",
    "PrivacyRefusal",
    "Recording",
    "RunError",
    "Scores",
    "Settings",
    "TrainedModel",
    "UsageError",
    "load",
    "record",
    "resume",
    "score",
    "start",
    "train_and_evaluate",
]

_HOME = {
    "dpulr.errors": ("Interrupted", "PrivacyRefusal", "RunError", "UsageError"),
    "dpulr.runs.loading": ("TrainedModel", "load"),
    "dpulr.runs.recorder": ("Recording", "record"),
    "dpulr.runs.run": ("resume", "start"),
    "dpulr.runs.settings": ("Settings",),
    "dpulr.runs.training": ("train_and_evaluate",),
    "dpulr.scores": ("Scores", "score"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOME.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
