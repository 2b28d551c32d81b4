"""Planning: from all but one of {epsilon, noise, batch size, epochs, data set size} to the missing one, or to delta.

python -m dpulr.accounting.planning --epsilon 1 --batch-size 500 --epochs 5 --dataset-size 60000 --json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dpulr import validate
from dpulr.accounting.calibration import calibrate_release, max_steps
from dpulr.accounting.events import Charge, GaussianRelease, Release, SampledStep
from dpulr.accounting.privacy_cost import delta_at, epsilon
from dpulr.accounting.shortcuts import auto_rejection_threshold, hidden_direction_release
from dpulr.accounting.small_signal import equivalent_noise

PAPER_MLP = (128, 64, 32, 10)
DEFAULT_DELTA = 1e-5


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete setting. `solved_for` names what was computed from the rest."""

    mechanism: str
    epsilon: float
    delta: float
    noise_multiplier: float
    batch_size: int
    epochs: float
    dataset_size: int
    sample_rate: float
    steps: int
    rejection_threshold: int
    equivalent_noise: float
    solved_for: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def table(self) -> str:
        """Two columns, the solved row marked."""
        rows = [(name.replace("_", " "), _shown(value), name) for name, value in asdict(self).items()]
        rows = [row for row in rows if row[2] != "solved_for"]
        left, right = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
        mark = {self.solved_for: "  <- computed"}
        return "\n".join(f"{label:<{left}}  {text:>{right}}{mark.get(name, '')}" for label, text, name in rows)


def plan(
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    batch_size: int | None = None,
    epochs: float | None = None,
    dataset_size: int | None = None,
    mechanism: str = "gaussian",
    rejection_threshold: int | str = 0,
    **layers: Any,
) -> Plan:
    """Solve for the one quantity left out; with none left out, for delta. delta is 1e-5 unless given.

    layers: dims, layer_weights, repeats, frames, gaussian_weights of the hidden-direction mechanism.
    """
    given = {
        "epsilon": epsilon,
        "noise_multiplier": noise_multiplier,
        "batch_size": batch_size,
        "epochs": epochs,
        "dataset_size": dataset_size,
    }
    missing = [name for name, value in given.items() if value is None]
    _check(given, delta, missing)
    make = _maker(mechanism, layers)
    task = _Task(make, given, DEFAULT_DELTA if delta is None else delta, rejection_threshold)
    if not missing:
        if delta is not None:
            raise ValueError("Everything is given, delta included: leave out what is to be computed.")
        return task.finish(mechanism, delta_at([task.charge()], given["epsilon"] or 0.0), "delta")
    solved = missing[0]
    if solved == "noise_multiplier" and rejection_threshold == "auto":
        # The threshold for the noise without rejection; the noise is then found for that threshold.
        plain = _solve_noise(replace(task, threshold=0))
        task = replace(task, threshold=task.at(noise_multiplier=plain).resolved_threshold())
    return replace(task, given={**given, solved: _SOLVERS[solved](task)}).finish(mechanism, task.delta, solved)


@dataclass(frozen=True)
class _Task:
    make: Callable[[float], Release]
    given: dict[str, Any]
    delta: float
    threshold: int | str

    def at(self, **change: Any) -> _Task:
        return replace(self, given={**self.given, **change})

    @property
    def rate(self) -> float:
        return min(1.0, int(self.given["batch_size"]) / int(self.given["dataset_size"]))

    @property
    def steps(self) -> int:
        return max(1, round(float(self.given["epochs"]) / self.rate))

    def resolved_threshold(self) -> int:
        if self.threshold != "auto":
            return validate.whole("rejection_threshold", self.threshold, 0)
        return auto_rejection_threshold(
            self.make(self.given["noise_multiplier"]),
            sample_rate=self.rate,
            steps=self.steps,
            delta=self.delta,
            min_dataset_size=max(1, self.given["dataset_size"] - 1),
        )

    def step(self) -> SampledStep:
        threshold = self.resolved_threshold()
        size = max(1, self.given["dataset_size"] - 1) if threshold else None
        return SampledStep(self.make(self.given["noise_multiplier"]), self.rate, threshold, size)

    def charge(self) -> Charge:
        return Charge(self.step(), self.steps)

    def price(self) -> float:
        return epsilon([self.charge()], self.delta)

    def finish(self, mechanism: str, delta: float, solved: str) -> Plan:
        task = replace(self, delta=delta)
        release = self.make(self.given["noise_multiplier"])
        value = self.given["epsilon"] if solved == "delta" else task.price()
        return Plan(
            mechanism=mechanism,
            epsilon=value,
            delta=delta,
            noise_multiplier=self.given["noise_multiplier"],
            batch_size=self.given["batch_size"],
            epochs=self.given["epochs"],
            dataset_size=self.given["dataset_size"],
            sample_rate=self.rate,
            steps=self.steps,
            rejection_threshold=task.resolved_threshold(),
            equivalent_noise=equivalent_noise(release),
            solved_for=solved,
        )


def _solve_noise(task: _Task) -> float:
    threshold = task.resolved_threshold()
    return calibrate_release(
        task.make,
        target_epsilon=task.given["epsilon"],
        delta=task.delta,
        sample_rate=task.rate,
        steps=task.steps,
        rejection_threshold=threshold,
        min_dataset_size=max(1, task.given["dataset_size"] - 1) if threshold else None,
    )


def _solve_epochs(task: _Task) -> float:
    most = max_steps(task.at(epochs=1.0).step(), target_epsilon=task.given["epsilon"], delta=task.delta)
    if most == 0:
        raise ValueError("Not even one step fits into this epsilon at this noise and batch size.")
    return most * task.rate


def _solve_batch(task: _Task) -> int:
    """The largest batch: epsilon grows with the rate at a fixed number of epochs."""
    return _extreme(lambda size: task.at(batch_size=size).price() <= task.given["epsilon"], task.given["dataset_size"])


def _solve_dataset(task: _Task) -> int:
    """The smallest data set, between one batch and 2^40 records."""
    low, high = task.given["batch_size"], task.given["batch_size"]
    while task.at(dataset_size=high).price() > task.given["epsilon"]:
        low, high = high, high * 4
        if high > 1 << 40:
            raise ValueError("No data set is large enough for this epsilon, noise, batch size and number of epochs.")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if task.at(dataset_size=middle).price() <= task.given["epsilon"] else (middle, high)
    return int(high)


def _extreme(fits: Callable[[int], bool], limit: int) -> int:
    if not fits(1):
        raise ValueError("Not even batches of one record fit into this epsilon at this noise and number of epochs.")
    low, high = 1, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


_SOLVERS: dict[str, Callable[[_Task], Any]] = {
    "epsilon": lambda task: task.price(),
    "noise_multiplier": _solve_noise,
    "batch_size": _solve_batch,
    "epochs": _solve_epochs,
    "dataset_size": _solve_dataset,
}


def _check(given: dict[str, Any], delta: float | None, missing: Sequence[str]) -> None:
    if len(missing) > 1:
        raise ValueError(f"Too little is given: {', '.join(missing)} are missing, and only one of them can be computed.")
    for name in ("epsilon", "noise_multiplier", "epochs"):
        if given[name] is not None:
            validate.positive(name, given[name])
    for name in ("batch_size", "dataset_size"):
        if given[name] is not None:
            validate.whole(name, given[name], 1)
    if delta is not None:
        validate.delta(delta)
    if given["batch_size"] and given["dataset_size"] and given["batch_size"] > given["dataset_size"]:
        raise ValueError("batch_size exceeds dataset_size; a batch cannot be larger than the data.")


def _maker(mechanism: str, layers: dict[str, Any]) -> Callable[[float], Release]:
    if mechanism == "gaussian":
        if layers:
            raise ValueError(f"{sorted(layers)[0]} means nothing to the gaussian mechanism.")
        return GaussianRelease
    if mechanism == "hidden-direction":
        dims = layers.pop("dims", None)
        return lambda noise: hidden_direction_release(noise, PAPER_MLP if dims is None else dims, **layers)
    raise ValueError(f"mechanism is {mechanism!r}; it must be 'gaussian' or 'hidden-direction'.")


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else "infinite"
    return str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dpulr plan", description="Leave out one quantity; it is computed.")
    parser.add_argument("--epsilon", type=float)
    parser.add_argument("--delta", type=float)
    parser.add_argument("--noise-multiplier", type=float)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--dataset-size", type=int)
    parser.add_argument("--mechanism", choices=["gaussian", "hidden-direction"], default="gaussian")
    parser.add_argument("--rejection-threshold", default="0", help="a number, or auto")
    parser.add_argument("--dims", type=int, nargs="+", help="hidden-direction: dimensions of the layers")
    parser.add_argument("--repeats", type=int, help="hidden-direction: directions per record and layer")
    parser.add_argument("--json", action="store_true")
    given = vars(parser.parse_args(arguments))
    as_json, threshold = given.pop("json"), given.pop("rejection_threshold")
    layers = {name: given.pop(name) for name in ("dims", "repeats") if given[name] is not None or given.pop(name)}
    try:
        result = plan(**given, rejection_threshold=threshold if threshold == "auto" else int(threshold), **layers)
    except ValueError as error:
        parser.error(str(error))
    print(result.to_json() if as_json else result.table())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
