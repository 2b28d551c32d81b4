"""One process's part of a run: its steps, evaluations and checkpoints, and the result at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from dpulr import accounting
from dpulr.accounting.disk_ledger import DiskLedger, now
from dpulr.errors import Interrupted
from dpulr.files import append_line, replace_json
from dpulr.model.batches import call_model
from dpulr.runs import checkpoint
from dpulr.runs import result as results
from dpulr.runs.evaluation import Evaluation, make_loss
from dpulr.runs.folder import METRICS, RESULT, UNPROTECTED
from dpulr.runs.process import Clock, Stop, seconds_before
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


@dataclass
class Session:
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
            losses = make_loss(self.training.settings)(call_model(self.training.engine.model, inputs), targets)
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
