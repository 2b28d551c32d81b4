"""Many runs with one results file: what is there already is not run again, so a sweep resumes where it stopped."""

from __future__ import annotations

import fcntl
import gc
import json
import platform
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dpulr.experiments.baselines import OpacusDPSGD
from dpulr.experiments.training import Recipe, run
from dpulr.mechanisms import Gaussian, HiddenDirection


def sweep(recipes: Iterable[Recipe], file: Path) -> list[dict[str, Any]]:
    """Run each recipe that `file` (a JSON list) has no result of, and return the results of all, in order."""
    wanted = []
    for recipe in recipes:
        key = _key(recipe.describe())
        if key not in _known(file):
            result = {**run(recipe), "machine": platform.machine(), "python": platform.python_version()}
            _add(file, key, result)
            gc.collect()  # a run's tensors hang in cycles
        wanted.append(_known(file)[key])
        print(line(wanted[-1]), flush=True)
    return wanted


def found(recipes: Iterable[Recipe], file: Path) -> list[dict[str, Any]]:
    """The results of those recipes that have been run."""
    known, keys = _known(file), [_key(recipe.describe()) for recipe in recipes]
    return [known[key] for key in keys if key in known]


def _known(file: Path) -> dict[str, dict[str, Any]]:
    return {_key(result["recipe"]): result for result in json.loads(file.read_text())} if file.exists() else {}


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


def _key(recipe: dict[str, Any]) -> str:
    """What tells runs apart: settings of the mechanism count where they differ from its defaults, so that options may be added.

    Epsilon counts to six digits: a computed one differs in the last bit from machine to machine.
    """
    mechanism = recipe["mechanism"]
    defaults = DEFAULTS.get(mechanism["name"], {})
    own = {name: value for name, value in mechanism.items() if name not in defaults or value != defaults[name]}
    epsilon = recipe["target_epsilon"]
    return json.dumps(
        {**recipe, "mechanism": own, "target_epsilon": epsilon and float(f"{epsilon:.6g}")}, sort_keys=True, default=str
    )


DEFAULTS: dict[str, dict[str, Any]] = {kind.name: vars(kind()) for kind in (HiddenDirection, Gaussian, OpacusDPSGD)}


def _add(file: Path, key: str, result: dict[str, Any]) -> None:
    """Add a result to what the file holds now: another process may be at work on it. A reader never sees half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        draft = file.with_suffix(".part")
        draft.write_text(json.dumps(list((_known(file) | {key: result}).values()), indent=1) + "\n")
        draft.replace(file)
