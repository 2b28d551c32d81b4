"""What the constants of `dpulr.auto` are fitted to: Fashion-MNIST and synthetic tables, never the data that it is judged on.

Each cell is a model, a budget, a number of epochs and a batch size, and is run with a ladder of learning rates, a factor of two
apart, that goes on until the best one is no longer at its end. All on held-out training records, one seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np

from dpulr import auto
from dpulr.auto import Constants, Layer, Task, batch_size_for, choose
from dpulr.runs.settings import Settings
from reproduction.pages import table
from reproduction.results_file import found
from reproduction.run import Run

FILE = "auto.json"
_LARGEST = (16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0, 384.0)
_MOVEMENT = (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.8, 1.0, 1.4, 2.0)
_STEPS = (1.0, 2.0, 4.0, 8.0, 16.0)
_FEWEST = (60, 90, 125, 180, 250)
_SCATTER = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
_OUTSIDE = 4.0  # points lost per doubling beyond the rates that were tried: more than any that was seen inside
_LADDER = 2.0


@dataclass(frozen=True)
class AutoRun(Run):
    """A run of the studies of "auto": they have a file of their own."""

    @property
    def file(self) -> str:
        return FILE


@dataclass(frozen=True)
class Cell:
    """`data` names one of DATA."""

    data: str
    mechanism: str
    epsilon: float
    epochs: float
    batch_size: int
    repeats: int | None = None

    def run(self, learning_rate: float, **changes: Any) -> AutoRun:
        about = DATA[self.data]
        values = {
            "dataset": about.dataset,
            "features": about.features,
            "model": about.model,
            "holdout": about.holdout,
            "mechanism": self.mechanism,
            "repeats": self.repeats,
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "target_epsilon": self.epsilon,
            "learning_rate": float(f"{learning_rate:.3g}"),
        }
        return AutoRun(Settings(**(values | changes)))

    @property
    def kind(self) -> str:
        """Which constants it is for."""
        if self.mechanism == "hidden-direction":
            return "hidden"
        return "linear" if len(DATA[self.data].layers) == 1 else "deep"

    def scores(self) -> dict[float, float]:
        """Held-out accuracy in per cent by learning rate, as far as it has been run."""
        return {rate: 100 * result["test_accuracy"] for rate in rungs() for result in found([self.run(rate)])}


@dataclass(frozen=True)
class Data:
    dataset: str
    model: str
    holdout: int
    records: int
    layers: tuple[Layer, ...]
    features: str | None = None

    def task(self, cell: Cell) -> Task:
        return Task(cell.mechanism, self.records, self.layers, cell.epsilon, epochs=cell.epochs)


def _linear(*sizes: int) -> tuple[Layer, ...]:
    return tuple(Layer(inputs + 1, (inputs + 1) * outputs) for inputs, outputs in pairwise(sizes))


DATA = {
    "mlp": Data("fashion-mnist", "mlp", 10_000, 50_000, _linear(784, 128, 64, 32, 10)),
    "scattering": Data("fashion-mnist", "auto", 10_000, 50_000, _linear(3_969, 10), "scattering"),
    "table": Data("reproduction.datasets:synthetic", "reproduction.models:tabular", 0, 8_000, _linear(40, 32, 4)),
    "table-linear": Data("reproduction.datasets:synthetic", "reproduction.models:tabular_linear", 0, 8_000, _linear(40, 4)),
}


def rungs() -> list[float]:
    """All learning rates that are tried anywhere."""
    return [0.1 * _LADDER**k for k in range(-10, 11)]


def gradient_cells() -> list[Cell]:
    cells = [
        Cell("mlp", "gradient", epsilon, epochs, batch)
        for epsilon, epochs in ((0.3, 2), (0.3, 10), (1.0, 5), (3.0, 2), (3.0, 10), (8.0, 10))
        for batch in (500, 2_000, 8_000)
    ]
    cells += [
        Cell("scattering", "gradient", epsilon, epochs, batch)
        for epsilon, epochs in ((0.3, 5), (3.0, 5), (3.0, 20))
        for batch in (1_000, 4_000)
    ]
    cells += [
        Cell(data, "gradient", epsilon, epochs, batch)
        for data in ("table", "table-linear")
        for epsilon, epochs in ((0.3, 10), (1.0, 5), (4.0, 20))
        for batch in (125, 500, 2_000)
    ]
    return cells


def hidden_cells() -> list[Cell]:
    """The more budget, the more directions."""
    cells = [
        Cell("mlp", "hidden-direction", epsilon, epochs, batch, repeats)
        for repeats, lengths in ((4, ((0.3, 2), (1.0, 5), (4.0, 2), (0.3, 10))), (16, ((4.0, 2), (1.0, 5), (4.0, 10))))
        for epsilon, epochs in lengths
        for batch in ((250, 1_000) if epochs == 2 else (500, 2_000))
    ]
    cells += [
        Cell("table", "hidden-direction", epsilon, 5, batch, repeats)
        for epsilon in (0.3, 1.0, 4.0)
        for batch in (125, 500)
        for repeats in (4, 16)
    ]
    cells += [Cell("mlp", "hidden-direction", 4.0, 2, 500, 16), Cell("mlp", "hidden-direction", 1.0, 5, 1_000, 16)]
    cells += [Cell("table-linear", "hidden-direction", epsilon, 5, 250, 8) for epsilon in (0.3, 1.0, 4.0)]
    return cells


def stages(cells: Sequence[Cell]) -> Iterator[list[Run]]:
    """Three rates around a guess, then one more at that end at which the best one lies, until none does."""
    yield [cell.run(rate) for cell in cells for rate in _start(cell)]
    for _ in range(6):
        more = [cell.run(rate) for cell in cells for rate in _next(cell)]
        if not more:
            return
        yield list(more)


def _start(cell: Cell) -> list[float]:
    known = cell.scores()
    if known:
        return list(known)
    from dpulr.accounting.small_signal import likely_shift

    about = DATA[cell.data]
    steps = cell.epochs * about.records / cell.batch_size
    movement = likely_shift(cell.epsilon, 1e-5) * about.records
    guess = 32 / math.sqrt(sum(layer.fan_in for layer in about.layers)) / (1 + steps / (0.015 * movement))
    nearest = min(rungs(), key=lambda rate: abs(math.log(rate / guess)))
    return [nearest / _LADDER, nearest, nearest * _LADDER]


def _next(cell: Cell) -> list[float]:
    known = cell.scores()
    if not known:
        return []
    best = max(known, key=lambda rate: known[rate])
    return [rate for rate in (best / _LADDER, best * _LADDER) if min(rungs()) <= rate <= max(rungs()) and not _near(rate, known)]


def _near(rate: float, known: dict[float, float]) -> bool:
    return any(abs(math.log(rate / other)) < 0.1 for other in known)


# --- the fit --------------------------------------------------------------------------------------------------------------
def cells_of(mechanism: str) -> list[Cell]:
    return gradient_cells() if mechanism == "gradient" else hidden_cells()


def fitted(kind: str) -> Constants:
    """The constants that lose least on average, on a coarse grid: first those of the rate, then that of the batch size."""
    own = [cell for cell in (*gradient_cells(), *hidden_cells()) if cell.kind == kind]
    known = [(cell, scores) for cell in own if len(scores := cell.scores()) > 1]

    def lost_by_rate(values: tuple[float, float, float]) -> float:
        largest, movement, scatter = values
        constants = Constants(largest, movement, 1.0, scatter)
        return sum((max(scores.values()) - _at_rule(cell, scores, constants)) ** power for cell, scores in known)

    power = 2 if kind == "hidden" else 1  # there accuracy falls off a cliff above the best rate: one rule far off counts more
    largest, movement, scatter = min(product(_LARGEST, _MOVEMENT, _SCATTER if kind == "hidden" else (0.0,)), key=lost_by_rate)
    rates = Constants(largest, movement, 1.0, scatter)
    groups: dict[Cell, dict[float, float]] = {}
    for cell, scores in known:
        groups.setdefault(replace(cell, batch_size=0), {})[cell.batch_size] = _at_rule(cell, scores, rates)

    def lost_by_size(values: tuple[float, int]) -> float:
        lost, (steps, fewest) = 0.0, values
        for cell, curve in groups.items():
            with patched(kind, replace(rates, steps=steps, fewest=fewest)):
                size = batch_size_for(DATA[cell.data].task(cell), repeats=cell.repeats)
            lost += max(curve.values()) - _interpolated(curve, size, 1.0)
        return lost

    steps, fewest = min(product(_STEPS, _FEWEST if kind == "hidden" else (250,)), key=lost_by_size)
    return replace(rates, steps=steps, fewest=fewest)


@contextmanager
def patched(kind: str, constants: Constants) -> Iterator[None]:
    """`dpulr.auto` with other constants."""
    before, auto.FITTED[kind] = auto.FITTED[kind], constants
    try:
        yield
    finally:
        auto.FITTED[kind] = before


def _at_rule(cell: Cell, scores: dict[float, float], constants: Constants) -> float:
    """The accuracy at the rate that the rule gives with these constants, interpolated."""
    with patched(cell.kind, constants):
        rate = choose(DATA[cell.data].task(cell), batch_size=cell.batch_size, repeats=cell.repeats).learning_rate
    return _interpolated(scores, rate)


def _interpolated(curve: dict[float, float], place: float, outside_loss: float = _OUTSIDE) -> float:
    """Linear in the logarithm; beyond the ends it falls."""
    ends = sorted(curve)
    outside = max(0.0, math.log2(ends[0] / place), math.log2(place / ends[-1]))
    logs = [math.log(value) for value in ends]
    return float(np.interp(math.log(place), logs, [curve[value] for value in ends])) - outside_loss * outside


def markdown() -> str:
    """Each cell: its best rate, what the rule says, and what that loses; then the constants."""
    rows = []
    for mechanism in ("gradient", "hidden-direction"):
        for cell in cells_of(mechanism):
            scores = cell.scores()
            if len(scores) < 2:
                continue
            best, kept = max(scores, key=lambda rate: scores[rate]), _at_rule(cell, scores, auto.FITTED[cell.kind])
            label = f"{cell.repeats}" if cell.repeats else "-"
            about = [cell.data, mechanism, f"{cell.epsilon:g}", f"{cell.epochs:g}", f"{cell.batch_size}", label]
            rows.append([*about, f"{best:.3g}", f"{scores[best]:.1f}", f"{kept:.1f}"])
    heads = ["data", "mechanism", "epsilon", "epochs", "batch", "repeats", "best rate", "its accuracy (%)", "at the rule's rate"]
    lost = [float(row[-2]) - float(row[-1]) for row in rows]
    summary = f"The rule's rate loses {sum(lost) / len(lost):.2f} points on average, {max(lost):.2f} at most."
    constants = "\n".join(f"{kind}: {fitted(kind)}" for kind in auto.FITTED)
    return f"{table(heads, rows)}\n\n{summary}\n\n{constants}"
