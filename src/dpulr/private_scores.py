"""Accuracy on held-out records that are private: a count with noise, for an epsilon of its own.

One record changes the number of right answers by at most 1. Discrete Laplace noise of scale 1 / epsilon makes that number
epsilon-differentially private, with delta 0. So its epsilon adds to that of training, whatever records the two have in common
(docs/theory.md). The noise is drawn in whole numbers from the operating system: no floating point is involved.
"""

from __future__ import annotations

import math
import secrets
import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset

from dpulr import validate
from dpulr.errors import InvalidArgument
from dpulr.model.batches import call_model, described
from dpulr.records import Records
from dpulr.scores import device_of, evaluating

_GRID = 1 << 20


class HeldOut:
    """Private records that a model is evaluated on. Whether they fit is tried on a record of zeros, so no record is looked at."""

    def __init__(self, model: nn.Module, dataset: Dataset[Any], *, batch_size: int = 2_000) -> None:
        self._model, self._records, self._batch_size = model, Records(dataset, device_of(model)), batch_size
        inputs, targets = tree_map_only(Tensor, lambda leaf: leaf.to(device_of(model)), self._records.example)
        with evaluating(model), torch.inference_mode():
            outputs = call_model(model, inputs)
        fits = isinstance(outputs, Tensor) and outputs.dim() == 2 and outputs.shape[1] > 1
        if not fits or not isinstance(targets, Tensor) or targets.dim() != 1 or targets.is_floating_point():
            raise InvalidArgument(
                "an accuracy needs one output per class, of shape (records, classes), and one label per record, a whole number; "
                f"the model gives {described(outputs)} for targets that are {described(targets)}."
            )

    def noisy_accuracy(self, epsilon: float) -> float:
        """0 to 1. Noise may lead outside; what lies outside is moved to the end."""
        validate.positive("epsilon", epsilon)
        noisy = self.right_answers() + discrete_laplace(Fraction(math.ceil(_GRID / epsilon), _GRID))
        return min(1.0, max(0.0, noisy / self._records.size))

    def right_answers(self) -> int:
        """A record that can't be read, or whose pass raises, is a wrong answer, without a word."""
        right = 0
        with evaluating(self._model), torch.inference_mode(), warnings.catch_warnings(action="ignore"):
            for start in range(0, self._records.size, self._batch_size):
                rows = np.arange(start, min(start + self._batch_size, self._records.size))
                try:
                    right += self._right(rows)
                except Exception:
                    right += sum(self._right_alone(row) for row in rows.tolist())
        return right

    def _right(self, rows: np.ndarray) -> int:
        inputs, targets = self._records.take(rows)
        if len(targets) == 0:
            return 0
        outputs = call_model(self._model, inputs)
        answers = torch.where(torch.isfinite(outputs).all(1), outputs.argmax(1), -1)
        return int(((answers == targets) & (answers >= 0)).sum())

    def _right_alone(self, row: int) -> int:
        try:
            return self._right(np.array([row]))
        except Exception:
            return 0


# --- noise ------------------------------------------------------------------------------------------------------------------
def discrete_laplace(scale: Fraction) -> int:
    """A whole number z with probability proportional to exp(-|z| / scale), exactly (Canonne, Kamath and Steinke, 2020)."""
    t, s = scale.numerator, scale.denominator
    while True:
        part = secrets.randbelow(t)
        if not _happens(Fraction(part, t)):
            continue
        whole = 0
        while _happens(Fraction(1)):
            whole += 1
        size, negative = (part + t * whole) // s, secrets.randbelow(2) == 1
        if not (negative and size == 0):
            return -size if negative else size


def _happens(gamma: Fraction) -> bool:
    """With probability exp(-gamma), for gamma from 0 to 1."""
    k = 1
    while secrets.randbelow(gamma.denominator * k) < gamma.numerator:
        k += 1
    return k % 2 == 1
