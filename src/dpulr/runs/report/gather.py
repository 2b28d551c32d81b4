"""Everything a report shows of a run. What was spent is always computed from the ledger, never taken from a stored number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpulr import accounting
from dpulr.accounting.disk_ledger import DiskLedger, ledger_digest
from dpulr.errors import RunError
from dpulr.files import read_json, read_lines
from dpulr.runs.folder import METRICS, RESULT, UNPROTECTED, check_single, open_config
from dpulr.runs.process import process_seconds
from dpulr.runs.settings import Settings

Points = list[tuple[float, float]]
_CURVE_POINTS = 24
_DELTAS = tuple(10.0**-k for k in range(2, 11))


@dataclass(frozen=True)
class RunData:
    """A run as a reader sees it."""

    name: str
    folder: Path
    settings: Settings
    ledger: DiskLedger
    spent: accounting.PrivacySpent
    planned_epsilon: float | None
    result: dict[str, Any]
    accuracy: Points
    loss: Points
    brier: Points
    calibration_error: Points
    epsilon: Points
    profile: Points
    seconds: dict[str, float]
    unprotected: Points

    @property
    def last_accuracy(self) -> float | None:
        return self.accuracy[-1][1] if self.accuracy else None

    @property
    def status(self) -> str:
        """Said from the ledger: a killed run leaves no result."""
        if self.ledger.steps >= self.ledger.planned_steps:
            return "done"
        return "interrupted" if self.result else "not finished"


def gather(folder: Path, name: str) -> RunData:
    check_single(folder)
    settings, config = open_config(folder)
    ledger = DiskLedger.open(folder, ledger_digest(config), growing=True)
    result = _result(folder, ledger)
    spent = accounting.privacy_spent(
        ledger.charges, ledger.start.target_delta, **_public(result), evaluation_epsilon=ledger.evaluation_epsilon
    )
    metrics = read_lines(folder / METRICS)
    return RunData(
        name=name,
        folder=folder,
        settings=settings,
        ledger=ledger,
        spent=spent,
        planned_epsilon=_planned(ledger, settings),
        result=result,
        accuracy=_points(metrics, "test_accuracy"),
        loss=_points(metrics, "test_loss"),
        brier=_points(metrics, "test_brier"),
        calibration_error=_points(metrics, "test_calibration_error"),
        epsilon=_epsilon_curve(ledger, spent.epsilon) if spent.epsilon is not None else [],
        profile=_profile(ledger) if spent.epsilon is not None else [],
        seconds=_seconds(folder / METRICS),
        unprotected=_points(read_lines(folder / UNPROTECTED), "training_loss"),
    )


def _result(folder: Path, ledger: DiskLedger) -> dict[str, Any]:
    """result.json, if it speaks of the state that the ledger is in."""
    try:
        value = read_json(folder / RESULT)
    except (RunError, OSError):
        return {}
    return value if isinstance(value, dict) and value.get("steps") == ledger.steps else {}


def _public(result: dict[str, Any]) -> dict[str, Any]:
    """What the run took as public, as far as the result says so."""
    size, schema = result.get("public_size"), result.get("schema")
    return {"public_size": size if isinstance(size, int) else None, "schema": schema if isinstance(schema, str) else None}


def _planned(ledger: DiskLedger, settings: Settings) -> float | None:
    """Epsilon of the planned steps, those to come being like the newest of those taken."""
    charges = ledger.charges
    if not charges:
        return None
    planned = accounting.planned_epsilon(charges, charges[-1].step, ledger.planned_steps, ledger.start.target_delta)
    return None if planned is None else planned + max(settings.evaluation_epsilon or 0.0, ledger.evaluation_epsilon)


def _points(lines: Sequence[dict[str, Any]], key: str) -> Points:
    found = []
    for line in lines:
        step, value = line.get("step"), line.get(key)
        if _finite(step) and _finite(value):
            found.append((float(step), float(value)))  # type: ignore[arg-type]
    return sorted(found)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12 and math.isfinite(value)


def _epsilon_curve(ledger: DiskLedger, end: float) -> Points:
    last = ledger.steps
    steps = sorted({round(last * k / _CURVE_POINTS) for k in range(_CURVE_POINTS + 1)} | ({1} if last else set()))
    delta = ledger.start.target_delta
    evaluations = ledger.evaluation_epsilon  # counted from the start: when they were made does not matter
    return [(float(k), end if k == last else accounting.epsilon(ledger.charges_after(k), delta) + evaluations) for k in steps]


def _profile(ledger: DiskLedger) -> Points:
    """(delta, epsilon), where epsilon is finite."""
    deltas = sorted({*_DELTAS, ledger.start.target_delta})
    profile = accounting.privacy_profile(ledger.charges, deltas)
    return [(d, e + ledger.evaluation_epsilon) for d, e in profile if math.isfinite(e)]


def _seconds(metrics: Path) -> dict[str, float]:
    total: dict[str, float] = {}
    for parts in process_seconds(metrics).values():
        for name, value in parts.items():
            if _finite(value) and value > 0:
                total[name] = total.get(name, 0.0) + value
    return total
