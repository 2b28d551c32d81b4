"""A trained model as a black box: arrays in, scores out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dpulr.runs import building, checkpoint
from dpulr.runs.errors import RunError, UsageError
from dpulr.runs.opening import open_config
from dpulr.runs.scoring import Scores, score
from dpulr.runs.settings import Settings


class BlackBox:
    """Call it with inputs as a numpy array, scaled as the data set is; it returns one row of scores a record."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model, self.settings = model.eval(), settings

    def __call__(self, inputs: Any) -> np.ndarray:
        with torch.inference_mode():
            return np.asarray(self.model(torch.as_tensor(np.asarray(inputs))))

    def classes(self, inputs: Any) -> np.ndarray:
        """The class with the highest score, for each record."""
        return np.asarray(self(inputs).argmax(1))

    def score(self, dataset: str | None = None) -> Scores:
        """How good it is on the test part of its own data set, or of another one."""
        settings = self.settings if dataset is None else replace(self.settings, dataset=dataset)
        _, test = building.load_data(settings)
        try:
            return score(self.model, test)
        except (RuntimeError, IndexError, ValueError) as problem:
            raise UsageError(f"the model does not fit the data set {settings.dataset}: {problem}") from problem


def load(run: Path | str) -> BlackBox:
    """The model of a run: the finished one, or that of the last checkpoint."""
    folder = Path(run)
    settings, _ = open_config(folder)
    if not any((folder / name).exists() for name in (checkpoint.MODEL, checkpoint.CHECKPOINT)):
        raise RunError(f"{folder} has no model yet.")
    model = building.make_model(settings)
    checkpoint.load_model(folder, model)
    return BlackBox(model, settings)
