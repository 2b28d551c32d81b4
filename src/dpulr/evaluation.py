"""How good a model is on data that is not private."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from dpulr.model.batches import call_model
from dpulr.sampling import Records


def evaluate(model: nn.Module, dataset: Dataset[Any], *, batch_size: int = 2_000) -> float:
    """Accuracy, 0 to 1: how often the largest output is the target. The model's mode is put back afterwards."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    records = Records(dataset, device)
    was_training = model.training
    model.eval()
    try:
        correct = 0
        with torch.inference_mode():
            for start in range(0, records.size, batch_size):
                inputs, targets = records.take(np.arange(start, min(start + batch_size, records.size)))
                output = call_model(model, inputs)
                if output.dim() != 2 or output.shape[1] < 2 or targets.shape != output.shape[:1]:
                    raise ValueError(
                        "evaluate() compares one output a class, of shape (records, classes), with one label a record; "
                        f"got outputs of shape {tuple(output.shape)} and targets of shape {tuple(targets.shape)}."
                    )
                correct += int((output.argmax(1) == targets).sum())
    finally:
        model.train(was_training)
    return correct / records.size
