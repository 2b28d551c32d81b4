"""Estimators for scikit-learn: a linear model, or a small network, on a table of numbers, trained with differential privacy.

What the data must not decide is an argument: the range of each feature (`bounds`), and the classes or the range of the target.
Everything else (noise, steps, learning rate) follows by public arithmetic from these, epsilon and the shape of the table.
"""

from __future__ import annotations

try:
    import sklearn.base  # noqa: F401
except ImportError as problem:
    raise ImportError("dpulr.sklearn needs scikit-learn 1.6 or later: pip install 'dpulr[sklearn]'.") from problem

from dpulr.sklearn.classifier import PrivateClassifier
from dpulr.sklearn.regressor import PrivateRegressor

__all__ = ["PrivateClassifier", "PrivateRegressor"]
