"""Training by settings: model, optimizer and engine, and the loop that the command line and all experiments go through."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from dpulr import __version__
from dpulr.accounting.events import Release
from dpulr.auto import Choice, Task, choose, scheduled
from dpulr.engine import PrivacyEngine
from dpulr.errors import UsageError
from dpulr.kept import keep_frozen
from dpulr.model.batches import synthetic
from dpulr.parts.computing import computing
from dpulr.randomness import RandomSource
from dpulr.runs.evaluation import make_evaluation, make_loss, make_optimizer
from dpulr.runs.loading import load_data, make_mechanism, make_model, make_unit
from dpulr.runs.settings import Settings
from dpulr.temperature import check_classifier, fit_temperature, tempered

MOST_EPOCHS = 100.0
_TIMED_RECORDS = 256
Progress = Callable[[int, int, nn.Module], None]  # steps taken, steps planned, the model


class Training:
    """What a run holds in memory: the model, its optimizer, the engine (of the model, or of what lies behind its frozen layers).

    The learning rate follows the steps charged so far, so it depends on nothing that a resumed run has lost. `round` is how often
    the run was resumed; it varies the public randomness of the steps. `open_end` takes as many steps as the budget allows.
    `settings` has what was left to "auto" as numbers, so that a resumed run goes on with them.
    """

    def __init__(
        self, settings: Settings, train: Dataset[Any], model: nn.Module, *, round: int = 0, open_end: bool = False
    ) -> None:
        self.model = model.to(_device(settings))
        if settings.keep_frozen is not None:
            model, train = _behind_frozen(settings, model, train)
        if settings.seconds is not None and settings.steps is None and not open_end:
            settings = _within_seconds(settings, train, model)
        self.optimizer = make_optimizer(settings, model)  # the rate is set in each step
        self.engine = PrivacyEngine(
            model,
            self.optimizer,
            train,
            make_loss(settings),
            mechanism=make_mechanism(settings),
            batch_size=None if settings.batch_size == "auto" else settings.size,
            epochs=settings.epochs if settings.steps is None and not open_end else None,
            steps=None if open_end else settings.steps,
            target_epsilon=settings.epsilon_of_steps,
            target_delta=settings.target_delta,
            noise_multiplier=settings.noise_multiplier,
            sampling=settings.sampling,  # type: ignore[arg-type]
            rejection_threshold=settings.rejection_threshold,  # type: ignore[arg-type]
            min_dataset_size=settings.min_dataset_size,
            seed=settings.seed + 1_000_003 * round,
            insecure_noise_seed=settings.insecure_noise_seed,
            unit=make_unit(settings),
            max_per_person=settings.max_per_person,
            rank_timeout=settings.rank_timeout,
        )
        self.engine.advises = False  # a run shows the engine's notes itself
        self.settings = _settled(settings, self.engine)
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
        budget = replace(self.settings, temperature=None).epsilon_of_steps
        assert budget is not None
        return fit_temperature(self.engine, target_epsilon=budget)

    def learning_rate(self) -> float:
        """That of the next step."""
        share = self.engine.steps_taken / max(self.engine.planned_steps, 1)
        return scheduled(self.settings.rate, self.settings.schedule, share)

    def steps(self) -> Iterator[tuple[Any, Any]]:
        """Take the steps that are left, one for each item; what comes out is the batch, which is private."""
        for inputs, targets in self.engine.batches():
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            self.engine.step(inputs, targets)
            yield inputs, targets


def _behind_frozen(settings: Settings, model: nn.Module, train: Dataset[Any]) -> tuple[nn.Module, Any]:
    """What is trained, and the records as they leave the frozen layers."""
    if settings.unit is not None:
        raise UsageError("--keep-frozen keeps no column that names people: leave it out, or --unit.")
    kept = keep_frozen(model, train, path=None if settings.keep_frozen == "memory" else settings.keep_frozen)
    return kept.model, kept.dataset


def _settled(settings: Settings, engine: PrivacyEngine) -> Settings:
    """With what was left to "auto" as numbers."""
    choice = engine.choice
    found: dict[str, Any] = {"batch_size": choice.batch_size, "learning_rate": choice.learning_rate, "repeats": choice.repeats}
    return replace(settings, **{name: value for name, value in found.items() if getattr(settings, name) == "auto"})


def _within_seconds(settings: Settings, train: Dataset[Any], model: nn.Module) -> Settings:
    """As many epochs as fit, at most `MOST_EPOCHS`. A step is timed with the settings of ten epochs, on synthetic records."""
    assert settings.seconds is not None
    engine = Training(replace(settings, seconds=None, keep_frozen=None), train, model).engine
    passes = settings.seconds / max(seconds_per_step(engine), 1e-9) * engine.sample_rate
    return replace(settings, seconds=None, epochs=float(f"{min(max(passes, engine.sample_rate), MOST_EPOCHS):.3g}"))


def seconds_per_step(engine: PrivacyEngine) -> float:
    """About what a step takes here: passes of synthetic records, and the noise. Reading records is not in it."""
    forward, size = engine.forward, engine.expected_batch_size
    records = max(1, min(_TIMED_RECORDS, round(size)))
    generator = torch.Generator().manual_seed(0)
    batch = synthetic(engine.records.example, records, generator, forward.device)
    source = RandomSource(0)
    directions, noise = source.directions(forward.device, forward.dtype), source.noise(engine.fitted.size)
    with computing(forward, source):
        public = engine.fitted.draw_public(0)
        spent = []
        for _ in range(2):  # the first time, programs are made
            started = time.perf_counter()
            total = engine.fitted.sum_of_bounded_signals(batch, public, directions)
            passed = time.perf_counter()
            engine.fitted.privatise(total, noise.draw().to(forward.device))
            spent.append(((passed - started) * size / records, time.perf_counter() - passed))
    return sum(spent[-1])


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
        "chosen": {name: getattr(training.settings, name) for name in ("batch_size", "repeats", "learning_rate", "epochs")},
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


def _device(settings: Settings) -> torch.device:
    try:
        device = torch.device(settings.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        raise UsageError(f"device is {settings.device!r}, which torch can't use here: {str(problem).splitlines()[0]}") from problem
    return device


@dataclass(frozen=True)
class Outline:
    """What a run would be, for a planner: its task, and what a step releases for a given noise, with the model's own layers."""

    task: Task
    choice: Choice
    release: Callable[[float], Release]


def outline_of(settings: Settings, train: Dataset[Any], records: int | None = None) -> Outline:
    """As training would have it, on so many records. What is left to "auto" is chosen; no noise is calibrated."""
    engine = Training(_cheap(settings, batch_size=1, steps=1), train, make_model(settings)).engine
    length: dict[str, Any] = {"epochs": settings.epochs if settings.steps is None else None, "steps": settings.steps}
    task = replace(
        engine.task,
        records=records or engine.task.records,
        epsilon=settings.epsilon_of_steps,
        delta=settings.target_delta,
        **length,
        noise_multiplier=settings.noise_multiplier,
    )
    mechanism = make_mechanism(settings)
    repeats = getattr(mechanism, "repeats", None)
    choice = choose(
        task,
        batch_size=settings.batch_size if isinstance(settings.batch_size, int) else None,
        repeats=repeats if isinstance(repeats, int) else None,
    )
    mechanism = mechanism.with_repeats(choice.repeats).settled(engine.forward)
    return Outline(task, choice, partial(mechanism.release, engine.forward.sites))


def expected_seconds(settings: Settings, train: Dataset[Any], *, batch_size: int, steps: int, noise_multiplier: float) -> float:
    """About what so many steps take here, by two steps on synthetic records; reading records comes on top."""
    cheap = _cheap(settings, batch_size=batch_size, steps=steps, noise_multiplier=noise_multiplier)
    return steps * seconds_per_step(Training(cheap, train, make_model(settings)).engine)


def _cheap(settings: Settings, **changes: Any) -> Settings:
    """With the noise given, and nothing to search for."""
    plain: dict[str, Any] = {"target_epsilon": None, "noise_multiplier": 1.0, "rejection_threshold": 0, "sampling": "poisson"}
    return replace(settings, **(plain | {"temperature": None, "seconds": None, "keep_frozen": None} | changes))
