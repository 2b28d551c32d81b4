"""Starting and resuming a run. The loop itself is `training.Training`; here is what happens around it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpulr import accounting
from dpulr.accounting.disk_ledger import DiskLedger, cut_torn_end, ledger_digest
from dpulr.accounting.events import Charge
from dpulr.distributed.launch import RANK_TIMEOUT, restarted
from dpulr.distributed.ranks import join
from dpulr.engine import PrivacyEngine
from dpulr.errors import Interrupted, PrivacyRefusal, RunError
from dpulr.runs import checkpoint
from dpulr.runs import result as results
from dpulr.runs.evaluation import make_evaluation
from dpulr.runs.folder import RESULT, check_new, check_single, create_folder, forget_result, locked, open_config
from dpulr.runs.loading import load_data, make_model
from dpulr.runs.process import Clock, Stop
from dpulr.runs.session import Session, View
from dpulr.runs.settings import Settings
from dpulr.runs.training import Training


def start(
    settings: Settings, folder: Path, view: View, *, allow_uncertified: bool = False, show_unprotected: bool = False
) -> dict[str, Any]:
    """Train in a new folder and return what result.json holds."""
    ranks = join(timeout=settings.rank_timeout)
    ranks.agree({name: str(value) for name, value in settings.to_dict().items() if name != "device"})
    ranks.shared(lambda: check_new(folder))
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
            lambda: create_folder(folder, settings, training.engine.plan, held, planned_steps=training.planned_charges)
        )
        clock.end("setup")
        return _trained(folder, training, test, view, clock, stop, show_unprotected=show_unprotected)


def resume(
    folder: Path,
    view: View,
    *,
    target_epsilon: float | None = None,
    steps: int | None = None,
    rank_timeout: float | None = None,
    show_unprotected: bool = False,
) -> dict[str, Any]:
    """Go on from the last checkpoint, with fresh entropy. All steps in the ledger count as spent, saved or not."""
    clock, ranks = Clock(), join(timeout=RANK_TIMEOUT if rank_timeout is None else rank_timeout)
    with Stop() as stop, ExitStack() as held:
        ledgers: list[DiskLedger] = []  # on rank 0, one

        def opened() -> tuple[Settings, int]:
            settings, ledger = _open(folder, target_epsilon, held)
            ledgers.append(ledger)
            settings = settings if rank_timeout is None else replace(settings, rank_timeout=rank_timeout)
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
        run = Session(folder, training, evaluation, ledger, view, clock, stop, show_unprotected=show_unprotected)
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
