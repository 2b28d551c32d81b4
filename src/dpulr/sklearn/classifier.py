"""`PrivateClassifier`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from torch import nn

from dpulr.errors import InvalidArgument
from dpulr.mechanisms import Mechanism
from dpulr.sklearn.base import FROM_DATA, NEEDED, Auto, Private, column, same_length

_LARGEST_RATE = 8.0


class PrivateClassifier(ClassifierMixin, Private):  # type: ignore[misc]
    """A private classifier: PrivateClassifier(bounds=(0, 100), classes=["no", "yes"]).fit(X, y).

    epsilon, delta       the guarantee; delta "auto" is the smaller of 1e-5 and a tenth of 1 / records
    bounds               (low, high): the public range of the features, numbers or one per feature. Values outside are moved to the
                         bound, missing ones to the middle
    classes              the public list of labels. A record with another label contributes nothing
    hidden_layer_sizes   () is a linear model
    mechanism            as of `PrivacyEngine`
    steps, batch_size, learning_rate   by public arithmetic, if "auto"
    repeated_fits        "refuse": one fit, not of a clone, so no cross-validation. "add up": `privacy_` states the cost of all fits
    seed                 of the initial weights, which are public

    bounds="unsafe-from-data" and classes="unsafe-from-data" take them from the data, and void the guarantee. After `fit`,
    `privacy_` states the guarantee, and `model_` is the torch model. No guarantee covers a score on private data.
    """

    classes_: np.ndarray

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float | Auto = "auto",
        bounds: Any = None,
        classes: Any = None,
        *,
        hidden_layer_sizes: Sequence[int] = (),
        mechanism: str | Mechanism = "gradient",
        steps: int | Auto = "auto",
        batch_size: int | Auto = "auto",
        learning_rate: float | Auto = "auto",
        repeated_fits: str = "refuse",
        seed: int = 0,
    ) -> None:
        self.epsilon, self.delta, self.bounds, self.classes = epsilon, delta, bounds, classes
        self.hidden_layer_sizes, self.mechanism = hidden_layer_sizes, mechanism
        self.steps, self.batch_size, self.learning_rate = steps, batch_size, learning_rate
        self.repeated_fits, self.seed = repeated_fits, seed

    def fit(self, X: Any, y: Any) -> PrivateClassifier:
        """Train privately on X (records, features) and labels y."""
        labels = column(self, y)
        table = self._table(X, fitting=True)
        same_length(table, labels)
        self._find_bounds(table)
        self._find_classes(labels)
        place = {label: float(i) for i, label in enumerate(self.classes_.tolist())}
        targets = np.array([_found(place, label) for label in labels.tolist()])
        taken = f"the ranges of the features, and the {len(place)} classes"
        self._fit(table, targets, len(place), nn.CrossEntropyLoss(reduction="none"), np.int64(0), taken)
        return self

    def _find_classes(self, labels: np.ndarray) -> None:
        if isinstance(self.classes, str) and self.classes == FROM_DATA:
            check_classification_targets(labels)
            self.classes_ = np.unique(labels)
        elif self.classes is None:
            raise InvalidArgument(NEEDED.format("classes", "the list of labels", '["no", "yes"]'))
        else:
            self.classes_ = np.unique(np.asarray(self.classes))
        if len(self.classes_) < 2:
            raise InvalidArgument(f"a classifier needs at least two classes; classes has {len(self.classes_)} class.")

    def _largest_rate(self, features: int) -> float:
        return _LARGEST_RATE

    def _unsafe(self) -> list[str]:
        unsafe = isinstance(self.classes, str) and self.classes == FROM_DATA
        return super()._unsafe() + (["the classes were taken from the data"] if unsafe else [])

    def decision_function(self, X: Any) -> np.ndarray:
        """One score per class; for two classes the second one's lead over the first."""
        scores = self._outputs(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities. Clipping and noise make them less sure than those of an ordinary model."""
        scores = self._outputs(X)
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(odds / odds.sum(axis=1, keepdims=True))

    def predict(self, X: Any) -> np.ndarray:
        best = self._outputs(X).argmax(axis=1)
        return np.asarray(self.classes_[best])


def _found(place: dict[Any, float], label: Any) -> float:
    """The place of a label; NaN, which no whole number holds, if it has none."""
    try:
        return place.get(label, math.nan)
    except TypeError:
        return math.nan
