"""Differentially private training of PyTorch models by forward passes alone.

Names are loaded when they are first used, so that `dpulr.accounting` starts without torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpulr import accounting, audit, data, errors, features, mechanisms, models, runs, scores, sklearn
    from dpulr.accounting import PrivacySpent
    from dpulr.engine import PrivacyEngine
    from dpulr.kept import keep_frozen
    from dpulr.mechanisms import Gaussian, Gradient, HiddenDirection, ZerothOrder
    from dpulr.model import layers, losses
    from dpulr.model.black_box import BlackBox
    from dpulr.model.weights import class_weights
    from dpulr.paper.mechanism import Paper
    from dpulr.runs.tuning import tune
    from dpulr.scores import evaluate

__version__ = "0.2.0"

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
"""MKL, which reads this when it is first used, must round a row alike wherever it lies in memory (model/row_sizes.py)."""

_HOME = {
    "BlackBox": "dpulr.model.black_box",
    "Gaussian": "dpulr.mechanisms",
    "Gradient": "dpulr.mechanisms",
    "HiddenDirection": "dpulr.mechanisms",
    "Paper": "dpulr.paper.mechanism",
    "PrivacyEngine": "dpulr.engine",
    "PrivacySpent": "dpulr.accounting",
    "ZerothOrder": "dpulr.mechanisms",
    "accounting": "dpulr.accounting",
    "audit": "dpulr.audit",
    "class_weights": "dpulr.model.weights",
    "data": "dpulr.data",
    "errors": "dpulr.errors",
    "evaluate": "dpulr.scores",
    "features": "dpulr.features",
    "keep_frozen": "dpulr.kept",
    "layers": "dpulr.model.layers",
    "losses": "dpulr.model.losses",
    "mechanisms": "dpulr.mechanisms",
    "models": "dpulr.models",
    "runs": "dpulr.runs",
    "scores": "dpulr.scores",
    "sklearn": "dpulr.sklearn",
    "tune": "dpulr.runs.tuning",
}
__all__ = [
    "BlackBox",
    "Gaussian",
    "Gradient",
    "HiddenDirection",
    "Paper",
    "PrivacyEngine",
    "PrivacySpent",
    "ZerothOrder",
    "accounting",
    "audit",
    "class_weights",
    "data",
    "errors",
    "evaluate",
    "features",
    "keep_frozen",
    "layers",
    "losses",
    "mechanisms",
    "models",
    "runs",
    "scores",
    "sklearn",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dpulr' has no attribute {name!r}")
    home = import_module(_HOME[name])
    return home if name[0].islower() and name not in ("class_weights", "evaluate", "keep_frozen", "tune") else getattr(home, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
