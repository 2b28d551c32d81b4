"""Starting and resuming a run. The loop itself is `experiments.training.Training`; here is what happens around it."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn.functional import cross_entropy

from dpulr.model.batches import call_model
from dpulr.runs import building, checkpoint
from dpulr.runs import result as results
from dpulr.runs.clock import Clock, seconds_before
from dpulr.runs.errors import Interrupted, PrivacyRefusal, RunError, UsageError
from dpulr.runs.files import append_line, locked, replace_file, replace_json, sync_folder
from dpulr.runs.ledger import DiskLedger, Start, cut_torn_end, ledger_digest, now
from dpulr.runs.opening import CONFIG, METRICS, RESULT, UNPROTECTED, open_config
from dpulr.runs.scoring import Scores, score
from dpulr.runs.settings import Settings
from dpulr.runs.stopping import Stop
from dpulr.runs.training import Training

_CHECKPOINT_SECONDS = 60.0


class View(Protocol):
    """Whoever watches a run."""

    def note(self, text: str) -> None: ...
    def begin(self, about: Mapping[str, Any]) -> None: ...
    def step(self, step: int) -> None: ...
    def metrics(self, values: Mapping[str, Any]) -> None: ...
    def unprotected(self, values: Mapping[str, Any]) -> None: ...


def start(
    settings: Settings, folder: Path, view: View, *, allow_uncertified: bool = False, show_unprotected: bool = False
) -> dict[str, Any]:
    """Train in a new folder and return what result.json holds."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        more = " It is a run: go on with 'dpulr resume'." if (folder / CONFIG).exists() else ""
        raise UsageError(f"{folder} exists and is not empty.{more}")
    with Stop() as stop, ExitStack() as held:
        clock = Clock()
        view.note("reading the data")
        train, test = building.load_data(settings)
        view.note("preparing the model and calibrating the noise")
        training = _training(settings, train)
        engine = training.engine
        if engine.guarantee != "certified" and not allow_uncertified:
            reason = getattr(engine.step_event, "reason", "its epsilon is a formula without a proof")
            raise PrivacyRefusal(
                f"this run would have no certified guarantee ({reason}). If that is what you want, add --allow-uncertified."
            )
        view.note(f"writing to {folder}")
        config = settings.to_json()
        begin = Start(
            run=secrets.token_hex(8),
            config=ledger_digest(config),
            noise_multiplier=engine.noise_multiplier,
            rejection_threshold=getattr(engine.sampler, "rejection_threshold", 0),
            target_epsilon=settings.target_epsilon,
            target_delta=settings.target_delta,
            planned_steps=engine.planned_steps,
        )
        ledger = _create(folder, config, begin, held)
        engine.use_ledger(ledger)
        clock.end("setup")
        return _Run(folder, settings, training, test, ledger, view, clock, stop, show_unprotected).train({})


def resume(
    folder: Path,
    view: View,
    *,
    target_epsilon: float | None = None,
    steps: int | None = None,
    show_unprotected: bool = False,
) -> dict[str, Any]:
    """Go on from the last checkpoint, with fresh entropy. All steps in the ledger count as spent, saved or not."""
    settings, config = open_config(folder)
    with Stop() as stop, locked(folder) as owner:
        clock = Clock()
        ledger = DiskLedger.open(folder, ledger_digest(config))
        if owner not in ("", ledger.start.run):
            raise PrivacyRefusal(f"the ledger in {folder} belongs to another run.")
        cut_torn_end(folder)
        budget = ledger.budget if target_epsilon is None else target_epsilon
        if target_epsilon is not None and (ledger.budget is None or not ledger.budget < target_epsilon < float("inf")):
            raise PrivacyRefusal(f"the budget is {ledger.budget}; it can be raised, but not set to {target_epsilon}.")
        open_end = target_epsilon is not None and steps is None
        view.note("reading the data")
        train, test = building.load_data(settings)
        view.note("preparing the model")
        planned = ledger.planned_steps if steps is None else steps
        training = _training(settings, train, ledger=ledger, budget=budget, steps=planned, open_end=open_end)
        engine = training.engine
        about = checkpoint.load_training(
            folder, run=ledger.start.run, model=training.model, optimizer=training.optimizer, average=training.average
        )
        if int(about.get("entries", 0)) > ledger.entries:
            raise PrivacyRefusal(f"{folder / checkpoint.CHECKPOINT} is newer than the ledger: entries are missing there.")
        engine.use_ledger(ledger)
        if steps is not None and engine.planned_steps < steps:
            raise PrivacyRefusal(
                f"{steps} steps do not fit into the budget of epsilon {budget:g}: {engine.planned_steps} do, and "
                f"{ledger.steps} are taken. Raise it with --target-epsilon, or ask for fewer."
            )
        if engine.steps_taken >= engine.planned_steps:
            view.note("all planned steps are taken")
            with suppress(RunError):
                return results.stored(folder / RESULT, steps=ledger.steps)
        else:
            _forget_result(folder)
            ledger.record_resume(budget=budget, planned_steps=engine.planned_steps)
        clock.end("setup")
        return _Run(folder, settings, training, test, ledger, view, clock, stop, show_unprotected).train(about)


def _training(
    settings: Settings,
    train: Any,
    *,
    ledger: DiskLedger | None = None,
    budget: float | None = None,
    steps: int | None = None,
    open_end: bool = False,
) -> Training:
    recipe = building.recipe(settings)
    rounds = 0
    if ledger is not None:
        recipe = replace(
            recipe,
            noise_multiplier=ledger.start.noise_multiplier,
            rejection_threshold=ledger.start.rejection_threshold,
            target_epsilon=budget,
            steps=steps,
        )
        rounds = ledger.resumes + 1
    try:
        return Training(recipe, train, building.make_model(settings), round=rounds, open_end=open_end)
    except ValueError as problem:
        if "not one step fits" in str(problem) or "No noise reaches" in str(problem):
            raise PrivacyRefusal(str(problem)) from problem
        raise UsageError(str(problem)) from problem


def _create(folder: Path, config: bytes, begin: Start, held: ExitStack) -> DiskLedger:
    """The folder appears with its config, its ledger and its lock, or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{begin.run}.part")
    draft.mkdir()
    try:
        held.enter_context(locked(draft, begin.run))
        replace_file(draft / CONFIG, config)
        ledger = DiskLedger.create(draft, begin)
        sync_folder(draft)
        os.replace(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    sync_folder(folder.parent)
    ledger.folder = folder
    return ledger


def _forget_result(folder: Path) -> None:
    """An old result.json would state less than is spent from now on."""
    (folder / RESULT).unlink(missing_ok=True)
    sync_folder(folder)


class _Run:
    """One process's part of a run."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        training: Training,
        test: Any,
        ledger: DiskLedger,
        view: View,
        clock: Clock,
        stop: Stop,
        show_unprotected: bool,
    ) -> None:
        self.folder, self.settings, self.training, self.test = folder, settings, training, test
        self.ledger, self.view, self.clock, self.stop = ledger, view, clock, stop
        self.show_unprotected = show_unprotected
        self.saved_at = -1
        self.scores: Scores | None = None

    def train(self, about: Mapping[str, Any]) -> dict[str, Any]:
        engine = self.training.engine
        planned = engine.planned_steps
        every = max(1, planned // self.settings.evaluations)
        self.view.begin(results.overview(self.settings, engine, self.ledger, self.folder))
        self.applied = int(about.get("applied", 0))
        first = engine.steps_taken
        self.stop.at_once = False
        for inputs, targets in self.training.steps():
            self.applied += 1
            self.clock.end("steps")
            if self.show_unprotected:
                self._unprotected(inputs, targets)
            self.view.step(engine.steps_taken)
            if engine.steps_taken % every == 0 or engine.steps_taken == planned:
                self._evaluate()
                self._checkpoint()
            elif self.clock.since("checkpoint") > _CHECKPOINT_SECONDS:
                self._checkpoint()
            if self.stop.requested:
                break
        if self.scores is None or self.saved_at != engine.steps_taken:
            self._evaluate()
            if engine.steps_taken > first:
                self._checkpoint()
        return self._finish()

    def _evaluate(self) -> None:
        engine = self.training.engine
        self.scores = score(self.training.final_model, self.test)
        spent = engine.privacy_spent()
        self.clock.end("evaluation")
        values = {
            "step": engine.steps_taken,
            "test_accuracy": self.scores.accuracy,
            "test_loss": self.scores.loss,
            "epsilon": spent.epsilon,
            "learning_rate": self.training.learning_rate(),
            "process": self.ledger.resumes,
            "at": now(),
            "seconds": self.clock.seconds(ledger=self.ledger.seconds),
        }
        append_line(self.folder / METRICS, values)
        self.view.metrics(values)

    def _checkpoint(self) -> None:
        training = self.training
        about = {
            "run": self.ledger.start.run,
            "steps": self.ledger.steps,
            "applied": self.applied,
            "entries": self.ledger.entries,
            "head": self.ledger.head,
        }
        checkpoint.save_training(
            self.folder, model=training.model, optimizer=training.optimizer, average=training.average, about=about
        )
        self.saved_at = self.ledger.steps
        self.clock.end("checkpoint")

    def _unprotected(self, inputs: Any, targets: Any) -> None:
        """Not covered by the guarantee: kept apart from everything else, and marked."""
        with torch.no_grad():
            loss = cross_entropy(call_model(self.training.model, inputs), targets).item() if len(targets) else None
        values = {"unprotected": True, "step": self.ledger.steps, "batch_size": len(targets), "training_loss": loss}
        append_line(self.folder / UNPROTECTED, values)
        self.view.unprotected(values)
        self.clock.end("unprotected")

    def _finish(self) -> dict[str, Any]:
        assert self.scores is not None
        engine = self.training.engine
        done = engine.steps_taken >= engine.planned_steps
        result = results.result(self.settings, engine, self.ledger, self.scores, done=done, applied=self.applied)
        result["seconds"] = round(self._earlier_seconds() + self.clock.total(), 2)
        result["unprotected_shown"] = (self.folder / UNPROTECTED).exists()
        state = {key: result[key] for key in ("run", "steps", "guarantee", "epsilon", "delta", "version")}
        checkpoint.write(self.folder / checkpoint.MODEL, self.training.final_model.state_dict(), state)
        replace_json(self.folder / RESULT, result)
        if not done:
            raise Interrupted(
                f"stopped after step {engine.steps_taken} of {engine.planned_steps}; the state is saved. "
                f"Go on with: dpulr resume {self.folder}"
            )
        return result

    def _earlier_seconds(self) -> float:
        return seconds_before(self.folder / METRICS, self.ledger.resumes)
