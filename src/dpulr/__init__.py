"""Differentially private training of PyTorch models by forward passes alone.

Names are loaded when they are first used, so that `dpulr.accounting` starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpulr import accounting, audit, data, models, runs
    from dpulr.accounting import PrivacySpent
    from dpulr.engine import PrivacyEngine
    from dpulr.evaluation import evaluate
    from dpulr.mechanisms import Gaussian, HiddenDirection, Paper, ZerothOrder

__version__ = "0.1.0"
__all__ = [
    "Gaussian",
    "HiddenDirection",
    "Paper",
    "PrivacyEngine",
    "PrivacySpent",
    "ZerothOrder",
    "accounting",
    "audit",
    "data",
    "evaluate",
    "models",
    "runs",
]

_MODULES = {
    "accounting": "accounting",
    "audit": "audit",
    "data": "data",
    "layers": "model.layers",
    "models": "models",
    "runs": "runs",
}
_HOME = {
    "Gaussian": "mechanisms",
    "HiddenDirection": "mechanisms",
    "Paper": "mechanisms",
    "PrivacyEngine": "engine",
    "PrivacySpent": "accounting",
    "ZerothOrder": "mechanisms",
    "evaluate": "evaluation",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"dpulr.{_MODULES[name]}")
    if name in _HOME:
        return getattr(importlib.import_module(f"dpulr.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dpulr' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
