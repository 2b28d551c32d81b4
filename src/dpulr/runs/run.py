"""Starting and resuming a run. The loop itself is `training.Training`; here is what happens around it."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from dpulr import accounting
from dpulr.accounting.disk_ledger import DiskLedger, Start, cut_torn_end, ledger_digest, now
from dpulr.accounting.events import Charge
from dpulr.distributed.launch import restarted
from dpulr.distributed.ranks import join
from dpulr.engine import PrivacyEngine
from dpulr.errors import Interrupted, PrivacyRefusal, RunError, UsageError
from dpulr.files import append_line, replace_file, replace_json, sync_folder
from dpulr.model.batches import call_model
from dpulr.runs import checkpoint
from dpulr.runs import result as results
from dpulr.runs.evaluation import Evaluation, make_evaluation, make_loss
from dpulr.runs.folder import CONFIG, LOCK, METRICS, RESULT, UNPROTECTED, check_single, locked, open_config
from dpulr.runs.loading import load_data, make_model
from dpulr.runs.process import Clock, Stop, seconds_before
from dpulr.runs.settings import Settings
from dpulr.runs.training import Training
from dpulr.temperature import is_temperature, tempered

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
    join().shared(lambda: check_new(folder))
    clock = Clock()
    with Stop() as stop, ExitStack() as held:
        view.note("reading the data")
        train, test = load_data(settings)
        view.note("preparing the model and calibrating the noise")
        training = Training(settings, train, make_model(settings))
        if training.engine.guarantee == "none" and not allow_uncertified:
            raise PrivacyRefusal(
                f"this run would have no guarantee ({_why_none(training.engine)}). "
                "If that is what you want, add --allow-uncertified."
            )
        evaluation = make_evaluation(settings, test)
        training.engine.ranks.shared(lambda: evaluation.check(training.model))
        view.note(f"writing to {folder}")
        training.engine.use_ledger(
            lambda: create_folder(folder, settings, training.engine, held, planned_steps=training.planned_charges)
        )
        clock.end("setup")
        return _trained(folder, training, test, view, clock, stop, show_unprotected=show_unprotected)


def resume(
    folder: Path,
    view: View,
    *,
    target_epsilon: float | None = None,
    steps: int | None = None,
    show_unprotected: bool = False,
) -> dict[str, Any]:
    """Go on from the last checkpoint, with fresh entropy. All steps in the ledger count as spent, saved or not."""
    clock, ranks = Clock(), join()
    with Stop() as stop, ExitStack() as held:
        ledgers: list[DiskLedger] = []  # on rank 0, one

        def opened() -> tuple[Settings, int]:
            settings, ledger = _open(folder, target_epsilon, held)
            ledgers.append(ledger)
            return _resumed(settings, ledger, target_epsilon, steps), ledger.resumes

        settings, resumes = ranks.shared(opened)
        view.note("reading the data")
        train, test = load_data(settings)
        view.note("preparing the model")
        open_end = target_epsilon is not None and steps is None
        training = Training(settings, train, make_model(settings), round=resumes + 1, open_end=open_end)
        engine = training.engine
        about = _restore(folder, training, *ledgers)
        engine.use_ledger(lambda: ledgers[0])
        if steps is not None and engine.planned_steps < steps:
            raise PrivacyRefusal(
                f"{steps} steps do not fit into the budget of epsilon {settings.target_epsilon:g}: {engine.planned_steps} do, and "
                f"{engine.ledger.steps} are taken. Raise it with --target-epsilon, or ask for fewer."
            )
        if engine.steps_taken >= engine.planned_steps:
            view.note("all planned steps are taken")
            if not ledgers:
                return {}
            with suppress(RunError):
                return results.stored(folder / RESULT, steps=engine.ledger.steps)
        else:
            ranks.shared(lambda: _go_on(folder, training, test, *ledgers))
        clock.end("setup")
        return _trained(folder, training, test, view, clock, stop, about=about, show_unprotected=show_unprotected)


def check_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        more = " It is a run: go on with 'dpulr resume'." if (folder / CONFIG).exists() else ""
        raise UsageError(f"{folder} exists and is not empty.{more}")


def _open(folder: Path, target_epsilon: float | None, held: ExitStack) -> tuple[Settings, DiskLedger]:
    """The settings and the ledger of a run, which is locked from now on."""
    check_single(folder)
    settings, config = open_config(folder)
    owner = held.enter_context(locked(folder))
    ledger = DiskLedger.open(folder, ledger_digest(config))
    if owner not in ("", ledger.start.run):
        raise PrivacyRefusal(f"the ledger in {folder} belongs to another run.")
    cut_torn_end(folder)
    raised = restarted() and ledger.budget == target_epsilon  # by the processes that failed
    if target_epsilon is not None and not raised and (ledger.budget is None or not ledger.budget < target_epsilon < float("inf")):
        raise PrivacyRefusal(f"the budget is {ledger.budget}; it can be raised, but not set to {target_epsilon}.")
    return settings, ledger


def _restore(folder: Path, training: Training, ledger: DiskLedger | None = None) -> dict[str, Any]:
    """Put the last checkpoint, which rank 0 reads, into the training of every rank. Returns what was saved about it."""
    model, optimizer = training.model, training.optimizer

    def read() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        assert ledger is not None
        about = checkpoint.load_training(folder, run=ledger.start.run, model=model, optimizer=optimizer)
        if int(about.get("entries", 0)) > ledger.entries:
            raise PrivacyRefusal(f"{folder / checkpoint.CHECKPOINT} is newer than the ledger: entries are missing there.")
        return model.state_dict(), optimizer.state_dict(), about

    weights, state, about = training.engine.ranks.shared(read)
    if ledger is None:
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    training.engine.parameters_changed(public=True)  # what a run has saved, it has released
    training.engine.fitted.load_state(about.get("mechanism", {}))
    return about


def _go_on(folder: Path, training: Training, test: Any, ledger: DiskLedger) -> None:
    make_evaluation(training.settings, test).check(training.model)
    forget_result(folder)
    ledger.record_resume(budget=training.settings.target_epsilon, planned_steps=training.planned_charges)


def _trained(
    folder: Path,
    training: Training,
    test: Any,
    view: View,
    clock: Clock,
    stop: Stop,
    *,
    about: Mapping[str, Any] | None = None,
    show_unprotected: bool,
) -> dict[str, Any]:
    """The steps that are left. Rank 0 writes and shows; the others take their part of each step, and end with it."""
    ledger, engine = training.engine.ledger, training.engine
    if isinstance(ledger, DiskLedger):
        evaluation = make_evaluation(training.settings, test, ledger)
        run = _Run(folder, training, evaluation, ledger, view, clock, stop, show_unprotected=show_unprotected)
        run.applied, run.temperature = int((about or {}).get("applied", 0)), float((about or {}).get("temperature", 1.0))
        return run.train()
    stop.at_once = False
    for _ in training.steps():
        if engine.ranks.any(stop.requested):
            raise Interrupted("interrupted.")
    return {}


def _resumed(settings: Settings, ledger: DiskLedger, target_epsilon: float | None, steps: int | None) -> Settings:
    """A run's settings with what its ledger has fixed, and with a raised budget or another number of steps."""
    return replace(
        settings,
        noise_multiplier=ledger.start.noise_multiplier,
        rejection_threshold=ledger.start.rejection_threshold,
        target_epsilon=ledger.budget if target_epsilon is None else target_epsilon,
        steps=ledger.planned_steps - (settings.temperature is not None) if steps is None else steps,
    )


def _why_none(engine: PrivacyEngine) -> str:
    spent = accounting.privacy_spent([Charge(engine.plan.event, engine.planned_steps)], engine.target_delta)
    return "; ".join(spent.reasons)


def create_folder(folder: Path, settings: Settings, engine: PrivacyEngine, held: ExitStack, *, planned_steps: int) -> DiskLedger:
    """The folder appears with its config and its ledger, or not at all. Whoever takes it in that moment has it."""
    config = settings.to_json()
    begin = Start(
        run=secrets.token_hex(8),
        config=ledger_digest(config),
        noise_multiplier=engine.noise_multiplier,
        rejection_threshold=engine.plan.rejection_threshold,
        target_epsilon=settings.target_epsilon,
        target_delta=settings.target_delta,
        planned_steps=planned_steps,
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{begin.run}.part")
    draft.mkdir()
    try:
        replace_file(draft / LOCK, begin.run.encode())
        replace_file(draft / CONFIG, config)
        DiskLedger.create(draft, begin)
        sync_folder(draft)
        if folder.exists():
            folder.rmdir()  # it is empty; Windows renames no folder onto another
        os.replace(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    held.enter_context(locked(folder))  # now: Windows renames no folder in which a file is open
    sync_folder(folder.parent)
    return DiskLedger.open(folder, begin.config)


def forget_result(folder: Path) -> None:
    """An old result.json would state less than is spent from now on."""
    (folder / RESULT).unlink(missing_ok=True)
    sync_folder(folder)


@dataclass
class _Run:
    """One process's part of a run: its steps, evaluations and checkpoints, and the result at its end."""

    folder: Path
    training: Training
    evaluation: Evaluation
    ledger: DiskLedger
    view: View
    clock: Clock
    stop: Stop
    _: KW_ONLY
    show_unprotected: bool = False
    applied: int = 0  # updates that the weights have kept, those of earlier processes included
    temperature: float = 1.0  # what the outputs of these weights are divided by
    _saved_at: int = field(default=-1, init=False)
    _figures: dict[str, Any] = field(default_factory=dict, init=False)

    def train(self) -> dict[str, Any]:
        settings, engine = self.training.settings, self.training.engine
        planned, first = engine.planned_steps, engine.steps_taken
        every = max(1, planned // settings.evaluations) if settings.evaluations else planned
        self.view.begin(results.overview(settings, engine, self.ledger, self.folder, self.training.planned_charges))
        self.stop.at_once = False
        for inputs, targets in self.training.steps():
            self.applied, self.temperature = self.applied + 1, 1.0
            self.clock.end("steps")
            if self.show_unprotected:
                self._unprotected(inputs, targets)
            self.view.step(engine.steps_taken)
            if engine.steps_taken % every == 0 or engine.steps_taken == planned:
                self._evaluate()
                self._checkpoint()
            elif self.clock.since("checkpoint") > _CHECKPOINT_SECONDS:
                self._checkpoint()
            if engine.ranks.any(self.stop.requested):
                break
        if settings.temperature is not None and engine.steps_taken >= engine.planned_steps:
            self._fit_temperature()
        if self._saved_at != engine.steps_taken:
            self._evaluate()
            if engine.steps_taken > first:
                self._checkpoint()
        return self._finish()

    def _fit_temperature(self) -> None:
        """Once: what a process that failed has charged for it is spent, and is not spent again."""
        if not is_temperature(self.ledger.last):
            self.temperature = self.training.fit_temperature()
            self.clock.end("steps")

    def _evaluate(self) -> None:
        engine = self.training.engine
        figures = self.evaluation.figures(tempered(self.training.model, self.temperature))
        self._figures = figures or self._figures
        spent = engine.privacy_spent()
        self.clock.end("evaluation")
        values = {
            "step": engine.steps_taken,
            **figures,
            "epsilon": spent.epsilon,
            "learning_rate": self.training.learning_rate(),
            "process": self.ledger.resumes,
            "at": now(),
            "seconds": self.clock.seconds(ledger=self.ledger.seconds, communication=engine.ranks.seconds),
        }
        append_line(self.folder / METRICS, values)
        self.view.metrics(values)

    def _checkpoint(self) -> None:
        ledger = self.ledger
        about = {
            "run": ledger.start.run,
            "steps": ledger.steps,
            "applied": self.applied,
            "entries": ledger.entries,
            "head": ledger.head,
            "mechanism": self.training.engine.fitted.state(),
            "temperature": self.temperature,
        }
        checkpoint.save_training(self.folder, model=self.training.model, optimizer=self.training.optimizer, about=about)
        self._saved_at = ledger.steps
        self.clock.end("checkpoint")

    def _unprotected(self, inputs: Any, targets: Any) -> None:
        """Not covered by the guarantee: kept apart from everything else, and marked."""
        with torch.no_grad():
            losses = make_loss(self.training.settings)(call_model(self.training.model, inputs), targets)
            loss = losses.mean().item() if len(losses) else None
        values = {"unprotected": True, "step": self.ledger.steps, "batch_size": len(targets), "training_loss": loss}
        append_line(self.folder / UNPROTECTED, values)
        self.view.unprotected(values)
        self.clock.end("unprotected")

    def _finish(self) -> dict[str, Any]:
        settings, engine = self.training.settings, self.training.engine
        done = engine.steps_taken >= engine.planned_steps
        result = results.result(
            settings,
            engine,
            self.ledger,
            self._figures,
            done=done,
            applied=self.applied,
            planned=self.training.planned_charges,
            temperature=self.temperature,
        )
        result.update(self.evaluation.details(tempered(self.training.model, self.temperature)))
        earlier = seconds_before(self.folder / METRICS, self.ledger.resumes)
        result["seconds"] = round(earlier + self.clock.total(), 2)
        result["unprotected_shown"] = (self.folder / UNPROTECTED).exists()
        state = {key: result[key] for key in ("run", "steps", "guarantee", "epsilon", "delta", "version", "temperature")}
        checkpoint.write(self.folder / checkpoint.MODEL, self.training.model.state_dict(), state)
        replace_json(self.folder / RESULT, result)
        if not done:
            spent = accounting.stopped_early(result["epsilon"], result["planned_epsilon"])
            raise Interrupted(
                f"stopped after step {engine.steps_taken} of {engine.planned_steps}; the state is saved. "
                f"{f'So far: {spent}. ' if spent else ''}"
                f"Go on with: dpulr resume {self.folder}"
            )
        return result
