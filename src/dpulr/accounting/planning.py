"""Planning: from all but one of {epsilon, noise, batch size, epochs, data set size} to the missing one, or to delta."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dpulr import search, validate
from dpulr.accounting.calibration import calibrate_release, max_steps
from dpulr.accounting.events import Charge, SampledStep
from dpulr.accounting.privacy_cost import delta_at, epsilon
from dpulr.accounting.shortcuts import MakeRelease, auto_rejection_threshold, release_maker
from dpulr.errors import BudgetError, InvalidArgument

PAPER_MLP = (128, 64, 32, 10)
DEFAULT_DELTA = 1e-5
LARGEST_DATASET = 1 << 40


def steps_of(epochs: float, sample_rate: float) -> int:
    """Steps in which a record is seen `epochs` times on average: never fewer. The only place that turns epochs into steps."""
    return max(1, math.ceil(epochs / sample_rate - 1e-9))


def epochs_of(steps: int, sample_rate: float) -> float:
    """The epochs that `steps_of` turns into so many steps."""
    epochs = steps * sample_rate
    while steps_of(epochs, sample_rate) > steps:  # rounding, with very many steps
        epochs = math.nextafter(epochs, 0.0)
    return epochs


@dataclass(frozen=True, slots=True)
class Solution:
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
        rows = [(name, name.replace("_", " "), _shown(value)) for name, value in asdict(self).items() if name != "solved_for"]
        left, right = max(len(label) for _, label, _ in rows), max(len(text) for _, _, text in rows)
        mark = {self.solved_for: "  <- computed"}
        return "\n".join(f"{label:<{left}}  {text:>{right}}{mark.get(name, '')}" for name, label, text in rows)


def plan(
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    batch_size: int | None = None,
    epochs: float | None = None,
    dataset_size: int | None = None,
    mechanism: str | MakeRelease = "gaussian",
    rejection_threshold: int | str = 0,
    **layers: Any,
) -> Solution:
    """Solve for the one quantity left out; with none left out, for delta. delta is 1e-5 unless given.

    mechanism: "gaussian", "hidden-direction", or a function from a noise multiplier to a release.
    layers: dims, layer_weights, repeats, gaussian_weights of the hidden-direction mechanism.
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
    if mechanism == "hidden-direction":
        layers.setdefault("dims", PAPER_MLP)
    task = _Task(release_maker(mechanism, **layers), given, DEFAULT_DELTA if delta is None else delta, rejection_threshold)
    if not missing:
        if delta is not None:
            raise InvalidArgument("Everything is given, delta included: leave out what is to be computed.")
        return task.finish(delta_at([task.charge()], given["epsilon"] or 0.0), "delta")
    solved = missing[0]
    if solved == "noise_multiplier" and rejection_threshold == "auto":
        # The threshold for the noise without rejection; the noise is then found for that threshold.
        plain = _solve_noise(replace(task, threshold=0))
        task = replace(task, threshold=task.at(noise_multiplier=plain).resolved_threshold())
    return task.at(**{solved: _SOLVERS[solved](task)}).finish(task.delta, solved)


@dataclass(frozen=True)
class _Task:
    """What is given; what is missing is None in `given`."""

    make: MakeRelease
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
        return steps_of(float(self.given["epochs"]), self.rate)

    @property
    def smaller_neighbour(self) -> int:
        return max(1, int(self.given["dataset_size"]) - 1)

    def resolved_threshold(self) -> int:
        if self.threshold != "auto":
            return validate.whole_number("rejection_threshold", self.threshold, 0)
        return auto_rejection_threshold(
            self.make(self.given["noise_multiplier"]),
            sample_rate=self.rate,
            steps=self.steps,
            delta=self.delta,
            min_dataset_size=self.smaller_neighbour,
        )

    def step(self) -> SampledStep:
        threshold = self.resolved_threshold()
        size = self.smaller_neighbour if threshold else None
        return SampledStep(self.make(self.given["noise_multiplier"]), self.rate, threshold, size)

    def charge(self) -> Charge:
        return Charge(self.step(), self.steps)

    def price(self, *, fresh: bool = False) -> float:
        return epsilon([self.charge()], self.delta, fresh=fresh)

    def fits(self, **change: Any) -> bool:
        return self.at(**change).price() <= float(self.given["epsilon"])

    def finish(self, delta: float, solved: str) -> Solution:
        task = replace(self, delta=delta)
        release = self.make(self.given["noise_multiplier"])
        value = self.given["epsilon"] if solved == "delta" else task.price(fresh=True)
        return Solution(
            mechanism=release.mechanism,
            epsilon=value,
            delta=delta,
            noise_multiplier=self.given["noise_multiplier"],
            batch_size=self.given["batch_size"],
            epochs=self.given["epochs"],
            dataset_size=self.given["dataset_size"],
            sample_rate=self.rate,
            steps=self.steps,
            rejection_threshold=task.resolved_threshold(),
            equivalent_noise=release.equivalent_noise(),
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
        min_dataset_size=task.smaller_neighbour if threshold else None,
    )


def _solve_epochs(task: _Task) -> float:
    most = max_steps(task.at(epochs=1.0).step(), target_epsilon=task.given["epsilon"], delta=task.delta)
    if most == 0:
        raise BudgetError("Not even one step fits into this epsilon at this noise and batch size.")
    return epochs_of(most, task.rate)


def _solve_batch(task: _Task) -> int:
    """The largest batch: epsilon grows with the rate at a fixed number of epochs."""
    if not task.fits(batch_size=1):
        raise BudgetError("Not even batches of one record fit into this epsilon at this noise and number of epochs.")
    return search.last_true(lambda size: task.fits(batch_size=size), 1, task.given["dataset_size"] + 1)


def _solve_dataset(task: _Task) -> int:
    """The smallest data set, between one batch and 2^40 records."""
    low = high = task.given["batch_size"]
    while not task.fits(dataset_size=high):
        low, high = high, high * 4
        if high > LARGEST_DATASET:
            raise BudgetError("No data set is large enough for this epsilon, noise, batch size and number of epochs.")
    return high if low == high else 1 + search.last_true(lambda size: not task.fits(dataset_size=size), low, high)


_SOLVERS: dict[str, Callable[[_Task], Any]] = {
    "epsilon": lambda task: task.price(),
    "noise_multiplier": _solve_noise,
    "batch_size": _solve_batch,
    "epochs": _solve_epochs,
    "dataset_size": _solve_dataset,
}


def _check(given: dict[str, Any], delta: float | None, missing: Sequence[str]) -> None:
    if len(missing) > 1:
        raise InvalidArgument(f"Too little is given: {', '.join(missing)} are missing, and only one of them can be computed.")
    for name in ("epsilon", "noise_multiplier", "epochs"):
        if given[name] is not None:
            validate.positive(name, given[name])
    for name in ("batch_size", "dataset_size"):
        if given[name] is not None:
            validate.whole_number(name, given[name])
    if delta is not None:
        validate.delta(delta)
    if given["batch_size"] and given["dataset_size"] and given["batch_size"] > given["dataset_size"]:
        raise InvalidArgument("batch_size exceeds dataset_size; a batch cannot be larger than the data.")


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else "infinite"
    return str(value)
