"""The model of costs in docs/scale.md: fitted to what benchmarks/ranks.py has measured, and what it predicts; its tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks import ranks
from reproduction.pages import table

NETWORK = 10e9 / 8
LATENCY = 50e-6
WORKERS = (10, 32, 100, 256, 1_000)
NOT_YET = "Not measured yet: `python -m benchmarks.ranks` on a quiet machine, then `python -m reproduction pages`."


@dataclass(frozen=True)
class Costs:
    """Of one job: seconds per step and process whatever the batch, per record, and per message that waits for another."""

    fixed: float
    record: float
    wait: float

    @classmethod
    def fitted(cls, rows: list[dict[str, Any]], cores: int) -> Costs:
        """Least squares of relative errors, no cost below 0. Processes beyond the cores take turns."""
        seconds = np.array([row["seconds"] for row in rows])
        terms = np.array([cls._terms(row["ranks"], row["batch"], cores) for row in rows])
        found, _ = nnls(terms / seconds[:, None], np.ones(len(rows)))
        return cls(*found.tolist())

    @staticmethod
    def _terms(workers: int, batch: float, cores: int) -> list[float]:
        at_once = min(workers, cores)
        return [workers / at_once, batch / at_once, messages_in_turn(workers)]

    def locally(self, workers: int, batch: float, cores: int) -> float:
        """Seconds per step on one machine."""
        return float(np.dot([self.fixed, self.record, self.wait], self._terms(workers, batch, cores)))

    def on_network(self, workers: int, batch: float, numbers: int) -> dict[str, float]:
        """Seconds per step on 10 Gbit/s, by cause; each worker has a core of its own."""
        wire = 2 * (workers - 1) / workers * 4 * numbers / NETWORK
        return {
            "fixed": self.fixed,
            "records": self.record * batch / workers,
            "latency": LATENCY * messages_in_turn(workers),
            "bandwidth": wire,
        }


def messages_in_turn(workers: int) -> int:
    """Messages of a step that wait for each other: before it, one from each rank to rank 0, and a tree for its answer (that the
    step is charged); then a ring for the release.
    """
    return (workers - 1) + (workers - 1).bit_length() + 2 * (workers - 1)


# --- tables ---------------------------------------------------------------------------------------------------------------
def parts() -> dict[str, str]:
    """The parts of docs/scale.md."""
    found = ranks.read()
    timed, cores = found.get("seconds", {}), found.get("cores", 1)
    return {
        "bytes": sizes(found["bytes"]),
        "speed": speed(timed) if timed else NOT_YET,
        "costs": costs(timed, cores) if timed else NOT_YET,
        "prediction": prediction(timed, cores) if timed else NOT_YET,
        "bottleneck": bottleneck(timed, cores) if timed else NOT_YET,
    }


def sizes(found: dict[str, Any]) -> str:
    rows = []
    for model, one in found.items():
        opacus = one["sent"]["Opacus DPDDP"]["bytes"]
        for name, sent in one["sent"].items():
            ratio = sent["bytes"] / opacus
            beside = f"{ratio:.2f}" if ratio > 0.01 else f"{ratio:.1g}"
            rows.append([f"{model}, {one['parameters']:,} parameters", name, f"{sent['messages']}", f"{sent['bytes']:,}", beside])
    return table(["model", "method", "messages per step", "bytes reduced per step", "over Opacus"], rows)


def speed(timed: dict[str, Any]) -> str:
    rows = []
    for job, found in timed.items():
        whole = max(row["batch"] for row in found)
        measured = [row for row in found if row["batch"] == whole]
        one = next(row["seconds"] for row in measured if row["ranks"] == 1)
        for row in measured:
            waiting = f"{row['communication'] / row['seconds']:.1%}"
            cores = f"{row['ranks'] * row['processor'] / row['seconds']:.2f}" if "processor" in row else "not counted"
            rows.append([job, f"{row['ranks']}", f"{1 / row['seconds']:.3g}", f"{one / row['seconds']:.2f}", cores, waiting])
    return table(["job", "processes", "steps per second", "times one process", "cores computing", "communication, waiting"], rows)


def costs(timed: dict[str, Any], cores: int) -> str:
    rows = []
    for job, found in timed.items():
        own = Costs.fitted(found, cores)
        errors = [own.locally(row["ranks"], row["batch"], cores) / row["seconds"] - 1 for row in found]
        worst = max(errors, key=abs)
        figures = [f"{1e3 * own.fixed:.2f}", f"{1e6 * own.record:.2f}", f"{1e6 * own.wait:.0f}"]
        rows.append([job, *figures, f"{worst:+.0%}"])
    return table(["job", "fixed, ms", "per record, us", "per message, us (here)", "worst error of the fit"], rows)


def prediction(timed: dict[str, Any], cores: int) -> str:
    rows = []
    for job, found in timed.items():
        own, batch, numbers = Costs.fitted(found, cores), max(row["batch"] for row in found), found[0]["numbers"]
        for label, size in (("as it is", batch), ("100 times the batch", 100 * batch)):
            alone = own.fixed + own.record * size
            cells = []
            for workers in WORKERS:
                step = sum(own.on_network(workers, size, numbers).values())
                cells.append(f"{1 / step:.3g} ({alone / (workers * step):.0%})")
            rows.append([f"{job}; {label}", *cells])
    return table(["steps per second (efficiency), predicted", *(f"{workers:,} workers" for workers in WORKERS)], rows)


def bottleneck(timed: dict[str, Any], cores: int) -> str:
    """The largest cost beside the records' own, where it first exceeds that."""
    rows = []
    for job, found in timed.items():
        own, batch, numbers = Costs.fitted(found, cores), max(row["batch"] for row in found), found[0]["numbers"]
        for workers in range(2, 1_001):
            causes = own.on_network(workers, batch, numbers)
            name = max(causes, key=lambda cause: causes[cause])
            if name != "records":
                break
        shares = ", ".join(f"{cause} {1e3 * value:.2f} ms" for cause, value in own.on_network(1_000, batch, numbers).items())
        rows.append([job, f"{name}, from {workers} workers on" if name != "records" else "none up to 1,000", shares])
    return table(["job", "first cost above that of the records", "a step on 1,000 workers"], rows)
