"""From all but one of {epsilon, noise, batch size, epochs, data set size} to the missing one, or to delta. No torch.

Every candidate becomes a `Plan`, as an engine would make it, and is priced as one: what is found is what a run would do and cost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from dpulr import search, validate
from dpulr.accounting import calibration, privacy_cost
from dpulr.accounting.events import Charge, SampledStep
from dpulr.accounting.shortcuts import MakeRelease, release_maker
from dpulr.errors import BudgetError, InvalidArgument
from dpulr.plan import Plan, Request, certified_plan, epochs_of

PAPER_MLP = (128, 64, 32, 10)
LARGEST_DATASET = 1 << 40


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
    if len(missing) > 1:
        raise InvalidArgument(f"Too little is given: {', '.join(missing)} are missing, and only one of them can be computed.")
    if not missing and delta is not None:
        raise InvalidArgument("Everything is given, delta included: leave out what is to be computed.")
    _check(given)
    if mechanism == "hidden-direction":
        layers.setdefault("dims", PAPER_MLP)
    solved = missing[0] if missing else "delta"
    delta = Request.target_delta if delta is None else validate.delta(delta)
    task = _Task(release_maker(mechanism, **layers), given, delta, rejection_threshold)
    return _solution(_SOLVERS[solved](task), solved)


@dataclass(frozen=True)
class _Task:
    """What is given; what is missing is None in `given`."""

    release: MakeRelease
    given: dict[str, Any]
    delta: float
    threshold: int | str

    def at(self, **change: Any) -> _Task:
        return replace(self, given={**self.given, **change})

    def plan(self) -> Plan:
        """As an engine would make it. Where the noise is missing, it is calibrated to epsilon."""
        given = self.given
        request = Request(
            records=given["dataset_size"],
            batch_size=given["batch_size"],
            epochs=given["epochs"],
            noise_multiplier=given["noise_multiplier"],
            target_epsilon=given["epsilon"] if given["noise_multiplier"] is None else None,
            target_delta=self.delta,
            rejection_threshold=self.threshold,  # type: ignore[arg-type]
        )
        return certified_plan(request, self.release)

    def fits(self, **change: Any) -> bool:
        return privacy_cost.epsilon(_charges(self.at(**change).plan()), self.delta) <= float(self.given["epsilon"])


def _step(plan: Plan) -> SampledStep:
    assert plan.step is not None  # there is noise
    return plan.step


def _charges(plan: Plan) -> list[Charge]:
    return [Charge(_step(plan), plan.steps)]


def _solution(task: _Task, solved: str) -> Solution:
    """With everything filled in; epsilon is priced once more, whatever a cache says."""
    plan = task.plan()
    release = task.release(plan.noise_multiplier)
    return Solution(
        mechanism=release.mechanism,
        epsilon=task.given["epsilon"] if solved == "delta" else privacy_cost.epsilon(_charges(plan), task.delta, fresh=True),
        delta=task.delta,
        noise_multiplier=plan.noise_multiplier,
        batch_size=task.given["batch_size"],
        epochs=task.given["epochs"],
        dataset_size=task.given["dataset_size"],
        sample_rate=plan.sample_rate,
        steps=plan.steps,
        rejection_threshold=plan.rejection_threshold,
        equivalent_noise=release.equivalent_noise(),
        solved_for=solved,
    )


def _solve_noise(task: _Task) -> _Task:
    plan = task.plan()
    return replace(task.at(noise_multiplier=plan.noise_multiplier), threshold=plan.rejection_threshold)


def _solve_epochs(task: _Task) -> _Task:
    """As many as fit. An automatic threshold is that of the epochs without rejection."""
    if task.threshold == "auto":
        plain = _solve_epochs(replace(task, threshold=0))
        task = replace(task, threshold=task.at(epochs=plain.given["epochs"]).plan().rejection_threshold)
    plan = task.at(epochs=1.0).plan()
    most = calibration.max_steps(_step(plan), target_epsilon=task.given["epsilon"], delta=task.delta)
    if most == 0:
        raise BudgetError("Not even one step fits into this epsilon at this noise and batch size.")
    return task.at(epochs=epochs_of(most, plan.sample_rate))


def _solve_batch(task: _Task) -> _Task:
    """The largest batch: epsilon grows with the rate at a fixed number of epochs."""
    if not task.fits(batch_size=1):
        raise BudgetError("Not even batches of one record fit into this epsilon at this noise and number of epochs.")
    return task.at(batch_size=search.last_true(lambda size: task.fits(batch_size=size), 1, task.given["dataset_size"] + 1))


def _solve_dataset(task: _Task) -> _Task:
    """The smallest data set, between one batch and 2^40 records."""
    low = high = task.given["batch_size"]
    while not task.fits(dataset_size=high):
        low, high = high, high * 4
        if high > LARGEST_DATASET:
            raise BudgetError("No data set is large enough for this epsilon, noise, batch size and number of epochs.")
    size = high if low == high else 1 + search.last_true(lambda size: not task.fits(dataset_size=size), low, high)
    return task.at(dataset_size=size)


def _solve_delta(task: _Task) -> _Task:
    plan = task.plan()
    return replace(task, delta=privacy_cost.delta_at(_charges(plan), task.given["epsilon"]), threshold=plan.rejection_threshold)


_SOLVERS: dict[str, Callable[[_Task], _Task]] = {
    "epsilon": lambda task: task,
    "noise_multiplier": _solve_noise,
    "batch_size": _solve_batch,
    "epochs": _solve_epochs,
    "dataset_size": _solve_dataset,
    "delta": _solve_delta,
}


def _check(given: dict[str, Any]) -> None:
    """What every plan needs, before one is made. The rest is checked by `Request`."""
    for name in ("epsilon", "noise_multiplier", "epochs"):
        if given[name] is not None:
            validate.positive(name, given[name])
    for name in ("batch_size", "dataset_size"):
        if given[name] is not None:
            validate.whole_number(name, given[name])


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else "infinite"
    return str(value)
