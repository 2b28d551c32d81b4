"""Seconds to an accuracy: how long each method trains until it reaches what the paper's table has at that epsilon.

    python -m benchmarks.time_to_accuracy    # about 40 minutes on one core; what has a result is not run again

Each method trains for 1, 2, 4, 8, 16, 25 epochs, a whole private run each time, that spends all of epsilon, until the mean of three
seeds reaches the better of the paper's two columns. Settings are those of docs/results.md (`reproduction.certified`), tuned at 25
epochs on held-out records; `gradient` has those of DP-SGD. Time is CPU time on one thread, setting up and evaluation left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import dpulr
from benchmarks import results
from dpulr.runs import loading
from dpulr.runs.settings import Settings
from dpulr.runs.training import Training
from reproduction.certified import DPSGD, HIDDEN, certified_run, epsilon_of
from reproduction.opacus import plain_steps, plan_of, private_steps
from reproduction.paper_numbers import TABLE1

SETTINGS = ((64, 4.0), (200, 2.0), (500, 1.0), (64, 0.5))
LADDER = (1, 2, 4, 8, 16, 25)
SEEDS = 3
OPACUS, GRADIENT, PLAIN = "Opacus, ghost", "gradient", "plain SGD"
METHODS = (HIDDEN, GRADIENT, OPACUS, PLAIN)
PLAIN_RATE, PLAIN_BATCH = 0.1, 200


def target(batch: int, sigma0: float) -> float:
    """The better of the paper's two columns, as a share."""
    columns = TABLE1[batch][sigma0]
    return max(columns[1::2]) / 100


def settings_of(method: str, epsilon: float, epochs: int, seed: int) -> Settings:
    of_tables = certified_run("mnist", HIDDEN if method == HIDDEN else DPSGD, epsilon, seed, epochs=epochs).settings
    if method == GRADIENT:
        return replace(of_tables, mechanism=GRADIENT, mechanism_options={})
    if method == PLAIN:
        return replace(of_tables, batch_size=PLAIN_BATCH, learning_rate=PLAIN_RATE)
    return of_tables


def one_run(method: str, epsilon: float, epochs: int, seed: int) -> dict[str, Any]:
    """Train once; the CPU seconds of its steps and its accuracy on the test records."""
    settings = settings_of(method, epsilon, epochs, seed)
    train, test = loading.load_data(settings)
    torch.manual_seed(seed)
    model = loading.make_model(settings)
    steps = _our_steps(settings, train, model) if method in (HIDDEN, GRADIENT) else _other_steps(method, settings, train, model)
    next(steps)  # set up
    started = time.process_time()
    for _ in steps:
        pass
    seconds = time.process_time() - started
    return {"accuracy": dpulr.evaluate(model, test), "seconds": round(seconds, 3)}


def _our_steps(settings: Settings, train: Any, model: Any) -> Iterator[None]:
    training = Training(settings, train, model)
    yield
    for _ in training.steps():
        yield


def _other_steps(method: str, settings: Settings, train: Any, model: Any) -> Iterator[None]:
    plan = plan_of(settings, len(train))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.rate, momentum=settings.momentum)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.steps)
    if method == PLAIN:
        each = plain_steps(model, optimizer, train, settings.size)
    else:
        each = private_steps(model, optimizer, train, batch_size=settings.size, noise_multiplier=plan.noise_multiplier)
    yield
    for _ in range(plan.steps):
        next(each)
        schedule.step()
        yield


def measure() -> None:
    torch.set_num_threads(1)
    for batch, sigma0 in SETTINGS:
        epsilon, wanted = epsilon_of(batch, sigma0), target(batch, sigma0)
        for method in METHODS:
            for epochs in LADDER:
                name = key(method, epsilon, epochs)
                known = results.read().get("time_to_accuracy", {})
                if len(known.get(name, [])) < SEEDS:
                    runs = [one_run(method, epsilon, epochs, seed) for seed in range(SEEDS)]
                    results.update(time_to_accuracy={**known, name: runs})
                else:
                    runs = known[name]
                print(name, [f"{run['accuracy']:.4f} {run['seconds']:.1f} s" for run in runs], flush=True)
                if mean(runs, "accuracy") >= wanted:
                    break


def key(method: str, epsilon: float, epochs: int) -> str:
    """Where a result stands. Plain SGD knows no epsilon."""
    return f"{method}, {epochs} epochs" if method == PLAIN else f"{method}, epsilon {epsilon:.3f}, {epochs} epochs"


def mean(runs: list[dict[str, Any]], name: str) -> float:
    return math.fsum(run[name] for run in runs) / len(runs)


def curve(known: dict[str, Any], method: str, epsilon: float) -> list[tuple[int, float, float]]:
    """(epochs, mean seconds, mean accuracy) of all that was run."""
    runs = {epochs: known.get(key(method, epsilon, epochs)) for epochs in LADDER}
    return [(epochs, mean(some, "seconds"), mean(some, "accuracy")) for epochs, some in runs.items() if some]


if __name__ == "__main__":
    measure()
