"""`PrivateRegressor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from torch import Tensor

from dpulr.mechanisms import Mechanism
from dpulr.sklearn.base import FROM_DATA, Auto, Private, as_number, as_range, column, same_length


class PrivateRegressor(RegressorMixin, Private):  # type: ignore[misc]
    """A private regression: PrivateRegressor(bounds=(0, 100), target_bounds=(0, 1)).fit(X, y).

    `target_bounds` is the public range of the target; values outside are moved to the bound, and a record without one contributes
    nothing. All else is as in `PrivateClassifier`.
    """

    _momentum = 0.9

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float | Auto = "auto",
        bounds: Any = None,
        target_bounds: Any = None,
        *,
        hidden_layer_sizes: Sequence[int] = (),
        mechanism: str | Mechanism = "gradient",
        steps: int | Auto = "auto",
        batch_size: int | Auto = "auto",
        learning_rate: float | Auto = "auto",
        repeated_fits: str = "refuse",
        seed: int = 0,
    ) -> None:
        self.epsilon, self.delta, self.bounds, self.target_bounds = epsilon, delta, bounds, target_bounds
        self.hidden_layer_sizes, self.mechanism = hidden_layer_sizes, mechanism
        self.steps, self.batch_size, self.learning_rate = steps, batch_size, learning_rate
        self.repeated_fits, self.seed = repeated_fits, seed

    def fit(self, X: Any, y: Any) -> PrivateRegressor:
        """Train privately on X (records, features) and numbers y."""
        raw = column(self, y)
        values = np.array([as_number(value) for value in raw.tolist()])
        table = self._table(X, fitting=True)
        same_length(table, values)
        self._find_bounds(table)
        if self._target_from_data():
            finite = values[np.isfinite(values)]
            self.target_bounds_ = np.array([finite.min(), finite.max()] if len(finite) else [0.0, 1.0])
        else:
            self.target_bounds_ = as_range("target_bounds", self.target_bounds, 1)[:, 0]
        low, high = self.target_bounds_
        targets = (2 * (np.clip(values, low, high) - low) / ((high - low) or 1) - 1).astype(np.float32)
        taken = f"the ranges of the features, and that of the target, {low:g} to {high:g}"
        self._fit(table, targets, 1, _half_squares, np.float32(0), taken)
        return self

    def _target_from_data(self) -> bool:
        return isinstance(self.target_bounds, str) and self.target_bounds == FROM_DATA

    def _largest_rate(self, features: int) -> float:
        """The loss has a curvature of at most the squared length of the features, bias included."""
        return 1 / (1 + features)

    def _unsafe(self) -> list[str]:
        return super()._unsafe() + (["the range of the target was taken from the data"] if self._target_from_data() else [])

    def predict(self, X: Any) -> np.ndarray:
        """Numbers within the target's bounds."""
        place = (np.clip(self._outputs(X)[:, 0], -1, 1) + 1) / 2
        low, high = self.target_bounds_
        return np.asarray(low + place * (high - low))


def _half_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, 0] - target).square() / 2
