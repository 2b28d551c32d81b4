"""One training run from a recipe: settings in, numbers out. All experiments and the command line go through here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Subset, TensorDataset

import dpulr
from dpulr.mechanisms import Mechanism, by_name


@dataclass(frozen=True)
class Recipe:
    """Public settings of a run. `holdout` takes the last so many training records as test set, for tuning."""

    mechanism: str | Mechanism = "hidden-direction"
    dataset: str = "mnist"
    model: str = "mlp"
    batch_size: int = 500
    epochs: float = 5
    target_epsilon: float | None = 1.0
    target_delta: float = 1e-5
    noise_multiplier: float | None = None
    learning_rate: float = 0.1
    momentum: float = 0.9
    average: float = 0.0
    holdout: int = 0
    seed: int = 0
    insecure_noise_seed: int | None = None

    def describe(self) -> dict[str, Any]:
        """The recipe as plain values."""
        mechanism = by_name(self.mechanism)
        return {**asdict(replace(self, mechanism=mechanism.name)), "mechanism": {"name": mechanism.name, **vars(mechanism)}}


Progress = Callable[[int, int, nn.Module], None]


def run(recipe: Recipe, progress: Progress | None = None) -> dict[str, Any]:
    """Train and evaluate. The learning rate falls along half a cosine; `average` > 0 evaluates a moving average of the weights.

    The average of released weights is post-processing: it costs no privacy.
    """
    train, test = split(recipe)
    model = getattr(dpulr.models, recipe.model)(seed=recipe.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum)
    started = time.perf_counter()
    engine = dpulr.PrivacyEngine(
        model,
        optimizer,
        train,
        nn.CrossEntropyLoss(reduction="none"),
        mechanism=recipe.mechanism,
        batch_size=recipe.batch_size,
        epochs=recipe.epochs,
        target_epsilon=recipe.target_epsilon,
        target_delta=recipe.target_delta,
        noise_multiplier=recipe.noise_multiplier,
        seed=recipe.seed,
        insecure_noise_seed=recipe.insecure_noise_seed,
    )
    ready = time.perf_counter()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, engine.planned_steps)
    decay = get_ema_multi_avg_fn(recipe.average)  # type: ignore[no-untyped-call]
    average = AveragedModel(model, multi_avg_fn=decay) if recipe.average else None
    for inputs, targets in engine.batches():
        engine.step(inputs, targets)
        schedule.step()
        if average is not None:
            average.update_parameters(model)
        if progress is not None:
            progress(engine.steps_taken, engine.planned_steps, model)
    seconds = time.perf_counter() - ready
    spent = engine.privacy_spent()
    return {
        "recipe": recipe.describe(),
        "guarantee": spent.guarantee,
        "epsilon": spent.epsilon,
        "delta": spent.delta,
        "statement": str(spent),
        "steps": engine.steps_taken,
        "sample_rate": engine.sample_rate,
        "noise_multiplier": engine.noise_multiplier,
        "test_accuracy": dpulr.evaluate(model if average is None else average.module, test),
        "last_accuracy": dpulr.evaluate(model, test),
        "setup_seconds": round(ready - started, 2),
        "seconds": round(seconds, 2),
        "version": dpulr.__version__,
        "torch": torch.__version__,
    }


def split(recipe: Recipe) -> tuple[TensorDataset | Subset[Any], TensorDataset | Subset[Any]]:
    """Training and test set; with a holdout, both from the training set."""
    train, test = dpulr.data.load(recipe.dataset)
    if not recipe.holdout:
        return train, test
    border = len(train) - recipe.holdout
    return Subset(train, range(border)), Subset(train, range(border, len(train)))
