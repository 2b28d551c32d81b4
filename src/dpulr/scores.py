"""How good a model, or anything that returns scores, is on data that is not private."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from dpulr.data.checking import problem
from dpulr.errors import DataError, InvalidArgument
from dpulr.model.batches import call_model, described
from dpulr.records import Records

Scorer = nn.Module | Callable[[Any], Any]


_BINS = 15


@dataclass(frozen=True)
class Scores:
    """How good the answers are, and the probabilities beside them.

    loss               mean cross-entropy
    brier              mean squared distance of the probabilities from the true class (0 to 2)
    calibration_error  how far confidence and accuracy lie apart: the mean over 15 bins of confidence, weighted by their records
    confusion          row i, column j: how many records of class i were given class j
    """

    accuracy: float
    loss: float
    brier: float
    calibration_error: float
    confusion: tuple[tuple[int, ...], ...]

    def figures(self) -> dict[str, float]:
        """The single numbers, under the names that results of runs have for them."""
        return {f"test_{name}": getattr(self, name) for name in ("accuracy", "loss", "brier", "calibration_error")}

    def classes(self, names: Sequence[str] | None = None) -> list[dict[str, str | float | int | None]]:
        """Per class: its number or name, number of records, recall, precision (None where nothing can be said)."""
        table = np.array(self.confusion)
        rows: list[dict[str, str | float | int | None]] = []
        for i, (of_class, given) in enumerate(zip(table.sum(1), table.sum(0), strict=True)):
            hits = int(table[i, i])
            recall = hits / int(of_class) if of_class else None
            precision = hits / int(given) if given else None
            rows.append({"class": names[i] if names else i, "records": int(of_class), "recall": recall, "precision": precision})
        return rows


def evaluate(model: nn.Module, dataset: Dataset[Any], *, batch_size: int = 2_000) -> float:
    """Accuracy, 0 to 1: how often the largest output is the target. The model's mode is put back afterwards."""
    return score(model, dataset, batch_size=batch_size).accuracy


def score(model: Scorer, dataset: Dataset[Any], *, batch_size: int = 2_000) -> Scores:
    """Accuracy, loss, calibration and confusion. A callable that is no module gets and returns numpy arrays."""
    records = Records(dataset, device_of(model))
    loss, brier, table, bins = 0.0, 0.0, np.zeros((0, 0), dtype=np.int64), np.zeros(_BINS)
    with evaluating(model), torch.inference_mode():
        for start in range(0, records.size, batch_size):
            inputs, targets = _read(records, np.arange(start, min(start + batch_size, records.size)))
            outputs = _outputs(model, inputs)
            _check(outputs, targets)
            _check_finite(inputs, outputs, records.size)
            table = _grown(table, outputs.shape[1])
            np.add.at(table, (targets.cpu().numpy(), outputs.argmax(1).cpu().numpy()), 1)
            outputs, targets = outputs.double(), targets.long()
            loss += float(nn.functional.cross_entropy(outputs, targets, reduction="sum"))
            brier += _squared_distance(outputs, targets)
            bins += _overconfidence(outputs, targets)
    confusion = tuple(tuple(int(n) for n in row) for row in table)
    right, size = int(table.trace()), records.size
    return Scores(right / size, loss / size, brier / size, float(np.abs(bins).sum()) / size, confusion)


def mean_loss(model: nn.Module, dataset: Dataset[Any], loss_fn: Callable[[Any, Any], Tensor], *, batch_size: int = 2_000) -> float:
    """The mean of a loss with one value per record, such as the squared error of a regression."""
    records, total = Records(dataset, device_of(model)), 0.0
    with evaluating(model), torch.inference_mode():
        for start in range(0, records.size, batch_size):
            inputs, targets = _read(records, np.arange(start, min(start + batch_size, records.size)))
            outputs = call_model(model, inputs)
            if isinstance(outputs, Tensor):
                _check_finite(inputs, outputs, records.size)
            total += float(loss_fn(outputs, targets).double().sum())
    return total / records.size


def _squared_distance(outputs: Tensor, targets: Tensor) -> float:
    truth = nn.functional.one_hot(targets, outputs.shape[1])
    return float((outputs.softmax(1) - truth).square().sum())


def _overconfidence(outputs: Tensor, targets: Tensor) -> np.ndarray:
    """For each bin of confidence: the sum over its records of confidence less 1 if right, 0 if wrong."""
    confidence, answer = outputs.softmax(1).max(1)
    which = (confidence * _BINS).ceil().clamp(1, _BINS).long() - 1
    gap = confidence - (answer == targets).double()
    return np.asarray(torch.zeros(_BINS, dtype=torch.float64, device=gap.device).index_add_(0, which, gap).cpu())


def _read(records: Records, rows: np.ndarray) -> tuple[Any, Any]:
    """All of these rows: an accuracy on those that happen to be readable would say nothing."""
    batch, kept = records.read(rows)
    if len(kept) < len(rows):
        row = int(np.setdiff1d(rows, kept)[0])
        raise DataError(f"record {row} of the data to evaluate on can't be used: {problem(records, row)[1]}.")
    return batch


def _check_finite(inputs: Any, outputs: Tensor, size: int) -> None:
    """The largest of NaN is the first: an accuracy that says nothing."""
    odd = int((~torch.isfinite(outputs)).flatten(1).any(1).sum())
    if odd:
        values = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        clean = all(bool(torch.isfinite(leaf).all()) for leaf in values)
        why = "The model has diverged: try a lower learning rate" if clean else "So are inputs: dpulr.data.check tells which"
        raise DataError(f"the model's outputs for at least {odd:,} of {size:,} records are not finite. {why}.")


def _check(outputs: Tensor, targets: Tensor) -> None:
    """The largest of one output is always the first: an accuracy that says nothing."""
    if (
        not isinstance(targets, Tensor)
        or outputs.dim() != 2
        or outputs.shape[1] < 2
        or targets.shape != outputs.shape[:1]
        or targets.is_floating_point()
    ):
        raise InvalidArgument(
            "evaluate() and score() compare one output per class, of shape (records, classes), with one label per record, a whole "
            f"number; got outputs of shape {tuple(outputs.shape)} and targets that are {described(targets)}. For a regression, or "
            "several labels per record, take dpulr.scores.mean_loss(model, dataset, loss_fn)."
        )
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= outputs.shape[1]:
        raise InvalidArgument(f"the data set has labels from {low} to {high}, but the model has {outputs.shape[1]} outputs.")


def _grown(table: np.ndarray, classes: int) -> np.ndarray:
    return np.pad(table, (0, max(0, classes - len(table))))


@contextmanager
def evaluating(model: Scorer) -> Iterator[None]:
    if not isinstance(model, nn.Module):
        yield
        return
    training = [module for module in model.modules() if module.training]  # parts of it may be frozen in eval mode
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _outputs(model: Scorer, inputs: Any) -> Tensor:
    if isinstance(model, nn.Module):
        return torch.as_tensor(call_model(model, inputs))
    return torch.as_tensor(np.asarray(model(inputs.numpy())))


def device_of(model: object) -> torch.device:
    if isinstance(model, nn.Module):
        return next((p.device for p in model.parameters()), torch.device("cpu"))
    return torch.device("cpu")
