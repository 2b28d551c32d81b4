"""Training by settings: model, optimizer and engine, and the loop that the command line and all experiments go through."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from dpulr import __version__
from dpulr.accounting.events import Release
from dpulr.engine import PrivacyEngine
from dpulr.errors import UsageError
from dpulr.runs.evaluation import make_evaluation, make_loss, make_optimizer
from dpulr.runs.loading import load_data, make_mechanism, make_model, make_unit
from dpulr.runs.settings import Settings
from dpulr.temperature import check_classifier, fit_temperature, tempered

Progress = Callable[[int, int, nn.Module], None]  # steps taken, steps planned, the model


class Training:
    """What a run holds in memory: the model, its optimizer, the engine.

    The learning rate follows the steps charged so far, so it depends on nothing that a resumed run has lost. `round` is how often
    the run was resumed; it varies the public randomness of the steps. `open_end` takes as many steps as the budget allows.
    """

    def __init__(
        self, settings: Settings, train: Dataset[Any], model: nn.Module, *, round: int = 0, open_end: bool = False
    ) -> None:
        self.settings, self.model = settings, model.to(_device(settings))
        self.optimizer = make_optimizer(settings, model)
        self.engine = PrivacyEngine(
            model,
            self.optimizer,
            train,
            make_loss(settings),
            mechanism=make_mechanism(settings),
            batch_size=settings.batch_size,
            epochs=settings.epochs if settings.steps is None and not open_end else None,
            steps=None if open_end else settings.steps,
            target_epsilon=_share_of_training(settings),
            target_delta=settings.target_delta,
            noise_multiplier=settings.noise_multiplier,
            sampling=settings.sampling,  # type: ignore[arg-type]
            rejection_threshold=settings.rejection_threshold,  # type: ignore[arg-type]
            min_dataset_size=settings.min_dataset_size,
            seed=settings.seed + 1_000_003 * round,
            insecure_noise_seed=settings.insecure_noise_seed,
            unit=make_unit(settings),
            max_per_person=settings.max_per_person,
        )
        if settings.temperature is not None:
            self._check_temperature()

    def _check_temperature(self) -> None:
        """Before anything is charged."""
        if self.engine.ranks.size > 1:
            raise UsageError("a temperature is fitted by one process: leave out --temperature, or train on one.")
        check_classifier(self.engine)

    @property
    def planned_charges(self) -> int:
        """The planned steps, and one for the temperature."""
        return self.engine.planned_steps + (self.settings.temperature is not None)

    def fit_temperature(self) -> float:
        """What the outputs of the trained model are to be divided by."""
        budget = _share_of_training(replace(self.settings, temperature=None))
        assert budget is not None
        return fit_temperature(self.engine, target_epsilon=budget)

    def learning_rate(self) -> float:
        """That of the next step."""
        if self.settings.schedule == "constant":
            return self.settings.learning_rate
        share = self.engine.steps_taken / max(self.engine.planned_steps, 1)
        return self.settings.learning_rate * (1 + math.cos(math.pi * share)) / 2

    def steps(self) -> Iterator[tuple[Any, Any]]:
        """Take the steps that are left, one for each item; what comes out is the batch, which is private."""
        for inputs, targets in self.engine.batches():
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            self.engine.step(inputs, targets)
            yield inputs, targets


def train_and_evaluate(settings: Settings, progress: Progress | None = None) -> dict[str, Any]:
    """A run without a folder, for experiments: the settings and what came of them, as plain values."""
    train, test = load_data(settings)
    started = time.perf_counter()
    training = Training(settings, train, make_model(settings))
    engine, model = training.engine, training.model
    ready, processor = time.perf_counter(), time.process_time()
    for _ in training.steps():
        if progress is not None:
            progress(engine.steps_taken, engine.planned_steps, model)
    seconds, processor = time.perf_counter() - ready, time.process_time() - processor
    temperature = 1.0 if settings.temperature is None else training.fit_temperature()
    spent = engine.privacy_spent()
    return {
        "settings": settings.to_dict(),
        "guarantee": spent.guarantee,
        "epsilon": spent.epsilon,
        "delta": spent.delta,
        "statement": str(spent),
        "steps": engine.steps_taken,
        "temperature": temperature,
        "sample_rate": engine.sample_rate,
        "noise_multiplier": engine.noise_multiplier,
        **make_evaluation(settings, test, engine.ledger).figures(tempered(model, temperature)),
        "setup_seconds": round(ready - started, 2),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(processor, 2),
        "version": __version__,
        "torch": torch.__version__,
    }


def _share_of_training(settings: Settings) -> float | None:
    """What noisy evaluations and a temperature leave of the budget. Epsilon of the former is pure: it adds up (docs/theory.md)."""
    if settings.target_epsilon is None:
        return None
    return settings.target_epsilon * (1 - (settings.temperature or 0.0)) - (settings.evaluation_epsilon or 0.0)


def _device(settings: Settings) -> torch.device:
    try:
        device = torch.device(settings.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        raise UsageError(f"device is {settings.device!r}, which torch can't use here: {str(problem).splitlines()[0]}") from problem
    return device


def release_of(settings: Settings, train: Dataset[Any]) -> Callable[[float], Release]:
    """What a step of these settings releases, for a given noise: as training makes it, with the model's own layers."""
    probe = replace(
        settings,
        batch_size=1,
        steps=1,
        target_epsilon=None,
        noise_multiplier=1.0,
        rejection_threshold=0,
        sampling="poisson",
        temperature=None,
    )
    engine = Training(probe, train, make_model(settings)).engine
    return partial(engine.mechanism.release, engine.forward.sites)
