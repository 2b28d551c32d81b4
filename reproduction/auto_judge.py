"""Settings by "auto", judged on data that its constants have never seen: beside the best of a grid, and beside untuned Opacus.

The whole plan is 7 values of epsilon x 5 numbers of epochs for each data set. `cells` is a random part of it, drawn once with a
fixed seed among the cells of at most ten epochs; what has been run of it is what the table shows. Scores are on held-out training
records, one seed: so the best of a grid is partly luck, and the gap an upper bound.
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


def cells() -> list[Cell]:
    """The random part, in the order in which it is run."""
    drawn = random.Random(20)
    picked: list[Cell] = []
    for data, count in PER_DATA.items():
        every = [Cell(data, epsilon, epochs) for epsilon in EPSILONS for epochs in EPOCHS if epochs <= MOST_EPOCHS]
        picked += drawn.sample(every, count)
    return picked


def stages(labels: Sequence[str]) -> Iterator[list[Run]]:
    for cell in cells():
        if cell.label in labels:
            yield [cell.auto("gradient"), *cell.grid(), cell.opacus(), cell.auto("hidden-direction")]


def markdown() -> str:
    rows, gaps, opacus = [], [], []
    for cell in cells():
        grid = found(cell.grid())
        ours, hidden, theirs = (_score([run]) for run in (cell.auto("gradient"), cell.auto("hidden-direction"), cell.opacus()))
        if ours is None or len(grid) < len(RATES) * len(SHARES):
            continue
        best = max(grid, key=lambda result: float(result["test_accuracy"]))
        top, how = 100 * best["test_accuracy"], best["run"]
        gaps.append(top - ours)
        opacus += [(ours, hidden, theirs)] if theirs is not None and hidden is not None else []
        where = f"batch {how['batch_size']}, rate {how['learning_rate']:g}"
        shown = [f"{value:.2f}" if value is not None else "-" for value in (ours, top)]
        rest = [f"{value:.2f}" if value is not None else "-" for value in (hidden, theirs)]
        rows.append([cell.data, f"{cell.epsilon:g}", f"{cell.epochs}", *shown, where, *rest])
    if not rows:
        return "Not run yet."
    heads = [
        "data",
        "epsilon",
        "epochs",
        "auto, gradient",
        "best of the grid",
        "where",
        "auto, hidden-direction",
        "Opacus, untuned",
    ]
    plan = len(EPSILONS) * len(EPOCHS) * 4
    text = (
        f"{len(rows)} cells of the {plan} of the whole plan (two of its four data sets). `gradient` with auto is below the best of "
        f"the grid by {sum(gaps) / len(gaps):.2f} points on average, {max(gaps):.2f} at worst."
    )
    if opacus:
        above = [sum(pair[i] >= pair[2] for pair in opacus) for i in (0, 1)]
        text += f" At least as good as untuned Opacus: gradient in {above[0]}, hidden-direction in {above[1]} of {len(opacus)}."
    return f"{table(heads, rows)}\n\n{text}"


def _score(runs: list[Run]) -> float | None:
    results = found(runs)
    return 100 * results[0]["test_accuracy"] if results else None
