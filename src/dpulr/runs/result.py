"""What a run says about itself: the overview at its start and result.json at its end. Public quantities only."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dpulr import __version__, accounting
from dpulr.accounting.disk_ledger import DiskLedger, now
from dpulr.engine import PrivacyEngine
from dpulr.errors import RunError
from dpulr.files import read_json
from dpulr.runs.settings import Settings
from dpulr.temperature import is_temperature


def overview(settings: Settings, engine: PrivacyEngine, ledger: DiskLedger, folder: Path, planned: int) -> dict[str, Any]:
    """What is known when the first step begins."""
    return {
        "folder": str(folder),
        "dataset": settings.dataset,
        "model": settings.model,
        "mechanism": settings.mechanism,
        "parameters": sum(p.numel() for p in engine.model.parameters()),
        "steps_taken": engine.steps_taken,
        "planned_steps": planned,
        "noise_multiplier": engine.noise_multiplier,
        "sample_rate": engine.sample_rate,
        "target_epsilon": ledger.budget,
        "delta": engine.target_delta,
        "guarantee": engine.guarantee,
        "notes": engine.notes,
    }


def result(
    settings: Settings,
    engine: PrivacyEngine,
    ledger: DiskLedger,
    figures: Mapping[str, Any],
    *,
    done: bool,
    applied: int,
    planned: int,
    temperature: float,
) -> dict[str, Any]:
    """The content of result.json, without the time."""
    spent = engine.privacy_spent()
    total = accounting.planned_epsilon(ledger.charges, engine.plan.event, engine.planned_steps, spent.delta)
    return {
        "run": ledger.start.run,
        "status": "done" if done else "interrupted",
        "mechanism": settings.mechanism,
        "guarantee": spent.guarantee,
        "epsilon": spent.epsilon if spent.guarantee == "certified" else None,
        "planned_epsilon": None if total is None else total + max(settings.evaluation_epsilon or 0.0, spent.evaluation_epsilon),
        "nominal_epsilon": spent.nominal_epsilon,
        "delta": spent.delta,
        "target_epsilon": ledger.budget,
        "statement": str(spent),
        "public_size": spent.public_size,
        "unit": spent.unit,
        "schema": spent.schema,
        "steps": ledger.steps,
        "updates_kept": applied,
        "planned_steps": planned,
        "temperature": temperature,
        "resumes": ledger.resumes,
        "sample_rate": engine.sample_rate,
        "batch_size": engine.expected_batch_size,
        "noise_multiplier": engine.noise_multiplier,
        "evaluation_epsilon": spent.evaluation_epsilon,
        "finished": now(),
        **figures,
        "forward_passes": forward_passes(engine),
        "ranks": engine.ranks.size,
        "bytes_per_step": engine.ranks.bytes_sent(engine.fitted.size, engine.spacing),
        "dataset": settings.dataset,
        "model": settings.model,
        "parameters": sum(p.numel() for p in engine.model.parameters()),
        "seed": settings.seed,
        "version": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def forward_passes(engine: PrivacyEngine) -> int | None:
    """Passes of a batch, from public settings. Passes of records would tell the realised sizes of the batches."""
    per_step = engine.mechanism.passes(engine.forward.sites)
    steps = engine.steps_taken - sum(charge.count for charge in engine.ledger.charges if is_temperature(charge.step))
    return None if per_step is None else steps * per_step


def stored(path: Path, *, steps: int) -> dict[str, Any]:
    """result.json, if it speaks of this many steps."""
    value = read_json(path)
    if not isinstance(value, dict) or value.get("steps") != steps:
        raise RunError(f"{path} does not belong to the state of the ledger.")
    return value
