"""The folder of a run that is a program's own loop: `dpulr.runs.record(engine, folder)`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from dpulr.accounting.disk_ledger import DiskLedger, cut_torn_end, ledger_digest, now
from dpulr.engine import PrivacyEngine
from dpulr.errors import PrivacyRefusal, UsageError
from dpulr.files import append_line, replace_json
from dpulr.runs import checkpoint, report
from dpulr.runs import result as results
from dpulr.runs.folder import CONFIG, METRICS, RESULT, check_new, create_folder, forget_result, locked, open_config
from dpulr.runs.process import Clock
from dpulr.runs.settings import IN_PROGRAM, Settings
from dpulr.scores import score


def record(engine: PrivacyEngine, folder: Path | str) -> Recording:
    """Keep a run's ledger, metrics, weights and result in a folder, as `dpulr train` does. Call it before the first step.

    Every step is on disk before it is computed. On a folder that exists already, the run goes on: what it has spent counts, and the
    weights and the optimizer's state of its last `save` are put into place.
    """
    return Recording(engine, Path(folder))


class Recording:
    """The folder of a run. `evaluate` and `finish` take public test data, with one label per record."""

    def __init__(self, engine: PrivacyEngine, folder: Path) -> None:
        if engine.steps_taken:
            raise UsageError(f"record() comes before the first step; this engine has taken {engine.steps_taken}.")
        self.engine, self.folder = engine, folder
        self._clock, self._held = Clock(), ExitStack()
        self._figures: dict[str, Any] = {}
        engine.use_ledger(self._resumed if (folder / CONFIG).exists() else self._created)
        self._clock.end("setup")

    def _created(self) -> DiskLedger:
        check_new(self.folder)
        self.settings, self.applied = _settings(self.engine), 0
        return create_folder(self.folder, self.settings, self.engine.plan, self._held, planned_steps=self.engine.planned_steps)

    def _resumed(self) -> DiskLedger:
        self.settings, config = open_config(self.folder)
        if not self.settings.dataset.startswith(IN_PROGRAM):
            raise UsageError(f"{self.folder} is a run of 'dpulr train': it goes on with 'dpulr resume'.")
        self._held.enter_context(locked(self.folder))
        cut_torn_end(self.folder)
        ledger = DiskLedger.open(self.folder, ledger_digest(config))
        engine = self.engine
        if engine.noise_multiplier != ledger.start.noise_multiplier:
            raise PrivacyRefusal(
                f"the run in {self.folder} has noise_multiplier={ledger.start.noise_multiplier!r}; go on with that, instead of "
                f"{engine.noise_multiplier!r}, and with the same target_epsilon."
            )
        about = checkpoint.load_training(self.folder, run=ledger.start.run, model=engine.model, optimizer=engine.optimizer)
        engine.parameters_changed(public=True)  # what a run has saved, it has released
        self.applied = int(about.get("applied", 0)) - ledger.steps
        ledger.record_resume(budget=ledger.budget, planned_steps=engine.planned_steps)
        forget_result(self.folder)
        return ledger

    @property
    def _ledger(self) -> DiskLedger:
        assert isinstance(self.engine.ledger, DiskLedger)
        return self.engine.ledger

    def evaluate(self, test: Dataset[Any]) -> dict[str, Any]:
        """A line of metrics: accuracy, loss and calibration on public data, and epsilon."""
        self._clock.end("steps")
        self._figures = dict(score(self.engine.model, test).figures())
        spent = self.engine.privacy_spent()
        self._clock.end("evaluation")
        values = {"step": self.engine.steps_taken, **self._figures, "epsilon": spent.epsilon, "process": self._ledger.resumes}
        append_line(self.folder / METRICS, {**values, "at": now(), "seconds": self._clock.seconds(ledger=self._ledger.seconds)})
        return values

    def save(self) -> None:
        """A checkpoint, from which the run goes on after a crash."""
        ledger = self._ledger
        about = {
            "run": ledger.start.run,
            "steps": ledger.steps,
            "applied": self.applied + self.engine.steps_taken,
            "entries": ledger.entries,
        }
        checkpoint.save_training(self.folder, model=self.engine.model, optimizer=self.engine.optimizer, about=about)

    def finish(self, test: Dataset[Any] | None = None) -> dict[str, Any]:
        """Write weights, result.json and report.html, and let go of the folder. Returns the result."""
        engine = self.engine
        details = {}
        if test is not None:
            self.evaluate(test)
            details = {"test_classes": score(engine.model, test).classes()}
        self.save()
        done, applied = engine.steps_taken >= engine.planned_steps, self.applied + engine.steps_taken
        result = results.result(
            self.settings,
            engine,
            self._ledger,
            self._figures,
            done=done,
            applied=applied,
            planned=engine.planned_steps,
            temperature=1.0,
        )
        result |= {"seconds": round(self._clock.total(), 2), "unprotected_shown": False, **details}
        state = {key: result[key] for key in ("run", "steps", "guarantee", "epsilon", "delta", "version")}
        checkpoint.write(self.folder / checkpoint.MODEL, engine.model.state_dict(), state)
        replace_json(self.folder / RESULT, result)
        report.write([self.folder])
        self._held.close()
        return result


def _settings(engine: PrivacyEngine) -> Settings:
    """What can be said of a program's own loop in the words of settings."""
    return Settings(
        dataset=f"{IN_PROGRAM}:{type(engine.records.dataset).__name__}",
        model=f"{IN_PROGRAM}:{type(engine.model).__name__}",
        mechanism=engine.mechanism.name,
        repeats=getattr(engine.mechanism, "repeats", None),
        batch_size=max(1, round(engine.expected_batch_size)),
        steps=engine.planned_steps,
        target_epsilon=engine.target_epsilon,
        target_delta=engine.target_delta,
        noise_multiplier=engine.noise_multiplier,
        learning_rate=float(engine.optimizer.param_groups[0]["lr"]) or 1.0,
        evaluations=0,
    )
