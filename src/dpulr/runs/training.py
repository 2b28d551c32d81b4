"""One training run from a recipe: settings in, numbers out. All experiments and the command line go through here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from reproduction.opacus import OpacusDPSGD, run_opacus
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, Subset, TensorDataset

import dpulr
from dpulr.mechanisms import Mechanism, by_name


@dataclass(frozen=True)
class Recipe:
    """Public settings of a run. `holdout` takes the last so many training records as test set, for tuning; `rescale` = (a, b) turns
    every input x, as loaded, into a + b x."""

    mechanism: str | Mechanism | OpacusDPSGD = "hidden-direction"
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
    schedule: Literal["cosine", "constant"] = "cosine"
    rescale: tuple[float, float] = (0.0, 1.0)
    holdout: int = 0
    seed: int = 0
    insecure_noise_seed: int | None = None
    steps: int | None = None
    sampling: Literal["poisson", "shuffle"] = "poisson"
    rejection_threshold: int | Literal["auto"] = 0
    min_dataset_size: int | None = None

    def describe(self) -> dict[str, Any]:
        """The recipe as plain values. Fields that older results don't know are left out while they hold their defaults."""
        mechanism = self.mechanism if isinstance(self.mechanism, OpacusDPSGD) else by_name(self.mechanism)
        plain = asdict(replace(self, mechanism=mechanism.name))
        for field in ("schedule", "rescale", "steps", "sampling", "rejection_threshold", "min_dataset_size"):
            if plain[field] == getattr(Recipe, field):
                del plain[field]
        return {**plain, "mechanism": {"name": mechanism.name, **vars(mechanism)}}


class Training:
    """What a run of a recipe holds: model, optimizer, engine, and, if asked for, a moving average of the weights.

    By default the learning rate falls along half a cosine of the steps charged so far, so it depends on nothing that a resumed run
    has lost. The average of released weights is post-processing: it costs no privacy. `round` is how often the run was resumed; it
    varies the public randomness of the steps.
    """

    def __init__(self, recipe: Recipe, train: Dataset[Any], model: nn.Module, *, round: int = 0, open_end: bool = False) -> None:
        if isinstance(recipe.mechanism, OpacusDPSGD):
            raise TypeError("DP-SGD by Opacus is run by `run`, not by the engine.")
        self.recipe, self.model = recipe, model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum)
        self.engine = dpulr.PrivacyEngine(
            model,
            self.optimizer,
            train,
            nn.CrossEntropyLoss(reduction="none"),
            mechanism=recipe.mechanism,
            batch_size=recipe.batch_size,
            epochs=recipe.epochs if recipe.steps is None and not open_end else None,
            steps=None if open_end else recipe.steps,
            target_epsilon=recipe.target_epsilon,
            target_delta=recipe.target_delta,
            noise_multiplier=recipe.noise_multiplier,
            sampling=recipe.sampling,
            rejection_threshold=recipe.rejection_threshold,
            min_dataset_size=recipe.min_dataset_size,
            seed=recipe.seed + 1_000_003 * round,
            insecure_noise_seed=recipe.insecure_noise_seed,
        )
        decay = get_ema_multi_avg_fn(recipe.average)  # type: ignore[no-untyped-call]
        self.average = AveragedModel(model, multi_avg_fn=decay) if recipe.average else None

    @property
    def final_model(self) -> nn.Module:
        """What the run is for: the average if there is one, else the model."""
        return self.model if self.average is None else self.average.module

    def learning_rate(self) -> float:
        if self.recipe.schedule == "constant":
            return self.recipe.learning_rate
        engine = self.engine
        return self.recipe.learning_rate * (1 + math.cos(math.pi * engine.steps_taken / max(engine.planned_steps, 1))) / 2

    def steps(self) -> Iterator[tuple[Any, Any]]:
        """Take the steps that are left, one for each item; what comes out is the batch, which is private."""
        for inputs, targets in self.engine.batches():
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            self.engine.step(inputs, targets)
            if self.average is not None:
                self.average.update_parameters(self.model)
            yield inputs, targets


Progress = Callable[[int, int, nn.Module], None]


def run(recipe: Recipe, progress: Progress | None = None) -> dict[str, Any]:
    """Train and evaluate."""
    train, test = split(recipe.dataset, recipe.holdout, recipe.rescale)
    if isinstance(recipe.mechanism, OpacusDPSGD):
        return {"recipe": recipe.describe(), **run_opacus(recipe, train, test)}
    started = time.perf_counter()
    training = Training(recipe, train, getattr(dpulr.models, recipe.model)(seed=recipe.seed))
    engine, model = training.engine, training.model
    ready = time.perf_counter()
    for _ in training.steps():
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
        "test_accuracy": dpulr.evaluate(training.final_model, test),
        "last_accuracy": dpulr.evaluate(model, test),
        "setup_seconds": round(ready - started, 2),
        "seconds": round(seconds, 2),
        "version": dpulr.__version__,
        "torch": torch.__version__,
    }


Part = TensorDataset | Subset[Any]


def split(dataset: str, holdout: int = 0, rescale: tuple[float, float] = (0.0, 1.0)) -> tuple[Part, Part]:
    """Training and test set, inputs a + b x for x as loaded; with a holdout, both from the training set."""
    train, test = dpulr.data.load(dataset)
    if rescale != (0.0, 1.0):
        offset, factor = rescale
        train, test = (TensorDataset(offset + factor * part.tensors[0], part.tensors[1]) for part in (train, test))
    if not holdout:
        return train, test
    border = len(train) - holdout
    return Subset(train, range(border)), Subset(train, range(border, len(train)))
