"""Many runs one after the other, with one results file."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dpulr.runs.training import Recipe, run
from reproduction.results_file import add, found


def sweep(recipes: Iterable[Recipe], file: Path) -> list[dict[str, Any]]:
    """Run each recipe that `file` (a JSON list) has no result of, and return the results of all, in order."""
    wanted: list[dict[str, Any]] = []
    for recipe in recipes:
        if not found([recipe], file):
            add(file, run(recipe))
            gc.collect()  # a run's tensors hang in cycles
        wanted += found([recipe], file)
        print(line(wanted[-1]), flush=True)
    return wanted


def line(result: dict[str, Any]) -> str:
    recipe = result["recipe"]
    epsilon = "none" if result["epsilon"] is None else f"{result['epsilon']:.3f}"
    return (
        f"{recipe['mechanism']['name']:16}  epsilon {epsilon:>7}  seed {recipe['seed']}  batch {recipe['batch_size']:5}  "
        f"accuracy {result['test_accuracy']:.2%}  {result['seconds']:.0f} s"
    )


def mean_and_spread(results: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean accuracy and its standard deviation over the seeds."""
    accuracies = [result["test_accuracy"] for result in results]
    return statistics.mean(accuracies), statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
