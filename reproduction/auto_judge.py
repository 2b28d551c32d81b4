"""Settings by "auto", judged on data that its constants have never seen: beside untuned Opacus, and beside the best of a grid.

The whole plan is 7 values of epsilon x 5 numbers of epochs for each data set. `every_cell` is what is beside Opacus: all cells of
at most ten epochs, cheapest first; what has been run of it is what the table shows. `grid_cells`, a random part of it drawn once
with a fixed seed, has a grid, too. Scores are on held-out training records, one seed: so the best of a grid is partly luck, and the
gap an upper bound.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dpulr.runs.settings import Settings
from reproduction.auto_fit import AutoRun
from reproduction.pages import table
from reproduction.results_file import found
from reproduction.run import Run

EPSILONS, EPOCHS, MOST_EPOCHS = (0.1, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0), (2, 5, 10, 25, 60), 10
RATES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
SHARES = (120, 30)
"""Batches of the grid: the records over these."""
DATA: dict[str, dict[str, Any]] = {
    "adult": {"dataset": "reproduction.datasets:adult", "model": "reproduction.models:adult_mlp", "holdout": 5_000},
    "mnist": {"dataset": "mnist", "model": "mlp", "holdout": 10_000},
}
RECORDS = {"adult": 21_048, "mnist": 50_000}
PER_DATA = {"adult": 6, "mnist": 2}


@dataclass(frozen=True)
class Cell:
    data: str
    epsilon: float
    epochs: int

    @property
    def label(self) -> str:
        return f"{self.data}:{self.epsilon:g}:{self.epochs}"

    def auto(self, mechanism: str) -> Run:
        return AutoRun(Settings(**self._values(mechanism, {})))

    def grid(self) -> list[Run]:
        return [
            AutoRun(Settings(**self._values("gradient", {"batch_size": RECORDS[self.data] // share, "learning_rate": rate})))
            for share in SHARES
            for rate in RATES
        ]

    def opacus(self) -> Run:
        """Opacus with SGD, a rate of 0.1, momentum 0.9, clip 1 and batches of 500: what a first try looks like."""
        return AutoRun(Settings(**self._values("gradient", {"batch_size": 500, "learning_rate": 0.1})), "opacus")

    def _values(self, mechanism: str, changes: dict[str, Any]) -> dict[str, Any]:
        repeats = "auto" if mechanism == "hidden-direction" else None
        budget = {"target_epsilon": self.epsilon, "epochs": self.epochs, "mechanism": mechanism, "repeats": repeats}
        return DATA[self.data] | budget | changes


def every_cell() -> list[Cell]:
    """All of at most ten epochs, in the order in which they are run: the cheapest first."""
    return [Cell(data, epsilon, epochs) for epochs in EPOCHS if epochs <= MOST_EPOCHS for data in DATA for epsilon in EPSILONS]


def grid_cells() -> list[Cell]:
    """The random part that has a grid."""
    drawn = random.Random(20)
    picked: list[Cell] = []
    for data, count in PER_DATA.items():
        every = [Cell(data, epsilon, epochs) for epsilon in EPSILONS for epochs in EPOCHS if epochs <= MOST_EPOCHS]
        picked += drawn.sample(every, count)
    return picked


def stages(labels: Sequence[str]) -> Iterator[list[Run]]:
    with_grid = grid_cells()
    for cell in every_cell():
        if cell.label in labels:
            grid = cell.grid() if cell in with_grid else []
            yield [cell.auto("hidden-direction"), cell.opacus(), cell.auto("gradient"), *grid]


def markdown() -> str:
    return f"{_beside_opacus()}\n\n{_beside_the_grid()}"


def _beside_opacus() -> str:
    rows, gaps = [], []
    for cell in every_cell():
        hidden, gradient, opacus = (found([run]) for run in (cell.auto("hidden-direction"), cell.auto("gradient"), cell.opacus()))
        if not (hidden and gradient and opacus):
            continue
        scores = [100 * float(results[0]["test_accuracy"]) for results in (hidden, gradient, opacus)]
        gaps.append([score - scores[2] for score in scores[:2]])
        chosen = hidden[0]["chosen"]
        how = f"{chosen['repeats']}, {chosen['batch_size']}, {chosen['learning_rate']:g}"
        seconds = f"{hidden[0]['cpu_seconds']:.1f}"
        rows.append([cell.data, f"{cell.epsilon:g}", f"{cell.epochs}", *(f"{score:.2f}" for score in scores), how, seconds])
    if not rows:
        return "Not run yet."
    heads = ["data", "epsilon", "epochs", "auto, hidden-direction", "auto, gradient", "Opacus, untuned"]
    heads += ["hidden: directions, batch, rate", "seconds"]
    text = f"{len(rows)} cells of the {len(EPSILONS) * len(EPOCHS) * 4} of the whole plan (two of its four data sets)."
    for name, own in zip(("hidden-direction", "gradient"), zip(*gaps, strict=True), strict=True):
        text += (
            f" `{name}` with auto is at least as good as untuned Opacus in {sum(gap >= 0 for gap in own)} of them, at most half a "
            f"point below in {sum(gap >= -0.5 for gap in own)}; {_ahead(sum(own) / len(own))} on average, {_ahead(min(own))} at "
            "worst."
        )
    return f"{table(heads, rows)}\n\n{text}"


def _ahead(gap: float) -> str:
    return f"{abs(gap):.2f} points {'above' if gap >= 0 else 'below'}"


def _beside_the_grid() -> str:
    rows, gaps = [], []
    for cell in grid_cells():
        ours, grid = found([cell.auto("gradient")]), found(cell.grid())
        if not ours or len(grid) < len(RATES) * len(SHARES):
            continue
        best = max(grid, key=lambda result: float(result["test_accuracy"]))
        own, top, how = 100 * ours[0]["test_accuracy"], 100 * best["test_accuracy"], best["run"]
        gaps.append(top - own)
        where = f"batch {how['batch_size']}, rate {how['learning_rate']:g}"
        rows.append([cell.data, f"{cell.epsilon:g}", f"{cell.epochs}", f"{own:.2f}", f"{top:.2f}", where])
    if not rows:
        return "Not run yet."
    heads = ["data", "epsilon", "epochs", "auto, gradient", "best of the grid", "where"]
    lost = f"{sum(gaps) / len(gaps):.2f} points on average, {max(gaps):.2f} at worst"
    text = f"`gradient` with auto is below the best of the grid by {lost}."
    return f"{table(heads, rows)}\n\n{text}"
