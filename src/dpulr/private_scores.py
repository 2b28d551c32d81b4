"""Accuracy on held-out records that are private: a count with noise, for an epsilon of its own.

One record changes the number of right answers by at most 1. Discrete Laplace noise of scale 1 / epsilon makes that number
epsilon-differentially private, with delta 0. So its epsilon adds to that of training, whatever records the two have in common
(docs/theory.md). The noise is drawn in whole numbers from the operating system: no floating point is involved.

That a record changes no other answer than its own takes what a step takes: records are read alone, a model that reads values sees
them one by one, one that mixes them is refused, and its randomness is secret.
"""

from __future__ import annotations

import math
import secrets
import warnings
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpulr import validate
from dpulr.errors import InvalidArgument
from dpulr.model.batches import call_model, described, synthetic
from dpulr.model.black_box import stand_ins
from dpulr.model.each_record import EachRecord
from dpulr.model.opaque import uncompiled, without_compiling
from dpulr.parts.computing import exact_arithmetic
from dpulr.randomness import RandomSource
from dpulr.records import Records
from dpulr.scores import device_of, evaluating

_GRID = 1 << 20


class HeldOut:
    """Private records that a model is evaluated on. Whether they fit is tried on synthetic ones, so no record is looked at."""

    def __init__(self, model: nn.Module, dataset: Dataset[Any], *, batch_size: int = 2_000) -> None:
        model = uncompiled(model)
        self._model, self._records, self._batch_size = model, Records(dataset, device_of(model)), batch_size
        self._device, self._source = self._records.device, RandomSource()
        inputs, targets = synthetic(self._records.example, 1, torch.Generator().manual_seed(0), self._device)
        with evaluating(model), torch.inference_mode():
            outputs = call_model(model, inputs)
        fits = isinstance(outputs, Tensor) and outputs.dim() == 2 and outputs.shape[1] > 1
        if not fits or not isinstance(targets, Tensor) or targets.dim() != 1 or targets.is_floating_point():
            raise InvalidArgument(
                "an accuracy needs one output per class, of shape (records, classes), and one label per record, a whole number; "
                f"the model gives {described(outputs)} for targets that are {described(targets)}."
            )
        with (
            evaluating(model),
            warnings.catch_warnings(action="ignore"),
            without_compiling(model),
            stand_ins(model),
            exact_arithmetic(self._device),
        ):
            self._each = EachRecord(model, self._records.example, self._device)

    def noisy_accuracy(self, epsilon: float) -> float:
        """0 to 1. Noise may lead outside; what lies outside is moved to the end."""
        validate.positive("epsilon", epsilon)
        noisy = self.right_answers() + discrete_laplace(Fraction(math.ceil(_GRID / epsilon), _GRID))
        return min(1.0, max(0.0, noisy / self._records.size))

    def right_answers(self) -> int:
        """A record that can't be read, or whose pass raises, is a wrong answer, without a word."""
        right = 0
        with evaluating(self._model), exact_arithmetic(self._device), warnings.catch_warnings(action="ignore"):
            for start in range(0, self._records.size, self._batch_size):
                rows = np.arange(start, min(start + self._batch_size, self._records.size))
                with self._source.reading_randomness() if self._records.runs_user_code else nullcontext():
                    batch = self._records.take(rows)
                with self._source.model_randomness(self._device), without_compiling(self._model):
                    right += self._right(batch)
        return right

    def _right(self, batch: Any) -> int:
        found = self._each.rows(_answers, batch, torch.full((1,), -1, device=self._device))
        return int(((found == batch[1]) & (found >= 0)).sum())


def _answers(outputs: Tensor) -> Tensor:
    """The class of each record; -1 where outputs are not finite."""
    return torch.where(torch.isfinite(outputs).all(1), outputs.argmax(1), -1)


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
