"""How good a model, or anything that returns scores, is on public held-out data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpulr.model.batches import call_model
from dpulr.sampling import Records


@dataclass(frozen=True)
class Scores:
    """confusion[i][j]: how many records of class i were given class j."""

    accuracy: float
    loss: float
    confusion: tuple[tuple[int, ...], ...]

    def classes(self) -> list[dict[str, float | int | None]]:
        """Per class: number of records, recall, precision (None where nothing can be said)."""
        table = np.array(self.confusion)
        rows: list[dict[str, float | int | None]] = []
        for i, (of_class, given) in enumerate(zip(table.sum(1), table.sum(0), strict=True)):
            hits = int(table[i, i])
            rows.append(
                {
                    "class": i,
                    "records": int(of_class),
                    "recall": hits / int(of_class) if of_class else None,
                    "precision": hits / int(given) if given else None,
                }
            )
        return rows


def score(model: nn.Module | Callable[[Any], Any], dataset: Dataset[Any], *, batch_size: int = 2_000) -> Scores:
    """Accuracy, mean cross-entropy and confusion. A callable that is no module gets and returns numpy arrays (a black box)."""
    records = Records(dataset, _device(model))
    was_training = isinstance(model, nn.Module) and model.training
    if isinstance(model, nn.Module):
        model.eval()
    right, loss, pairs = 0, 0.0, []
    try:
        with torch.inference_mode():
            for start in range(0, records.size, batch_size):
                inputs, targets = records.take(np.arange(start, min(start + batch_size, records.size)))
                outputs = _outputs(model, inputs)
                guesses = outputs.argmax(1)
                right += int((guesses == targets).sum())
                loss += float(nn.functional.cross_entropy(outputs.double(), targets, reduction="sum"))
                pairs.append(torch.stack([targets, guesses]).cpu().numpy())
    finally:
        if isinstance(model, nn.Module):
            model.train(was_training)
    targets_all, guesses_all = np.concatenate(pairs, axis=1)
    size = int(max(targets_all.max(), guesses_all.max())) + 1
    table = np.zeros((size, size), dtype=np.int64)
    np.add.at(table, (targets_all, guesses_all), 1)
    return Scores(right / records.size, loss / records.size, tuple(tuple(int(n) for n in row) for row in table))


def _outputs(model: nn.Module | Callable[[Any], Any], inputs: Any) -> Tensor:
    if isinstance(model, nn.Module):
        return torch.as_tensor(call_model(model, inputs))
    return torch.as_tensor(np.asarray(model(inputs.numpy())))


def _device(model: object) -> torch.device:
    if isinstance(model, nn.Module):
        return next((p.device for p in model.parameters()), torch.device("cpu"))
    return torch.device("cpu")
