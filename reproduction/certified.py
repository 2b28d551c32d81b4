"""Hidden-direction beside DP-SGD by Opacus, at the same epsilon, model and number of epochs: which runs, and their tables.

MNIST: the paper's 15 settings, each at the epsilon of the Gaussian mechanism with its noise and batch size. Fashion-MNIST: four
values of epsilon. CIFAR-10: ResNet-5 at two values of epsilon, few epochs. Learning rates were chosen on the last 10,000 training
records with one seed, at the values of epsilon that the methods name; between them they are interpolated. Choosing them is not
covered by epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dpulr import accounting
from dpulr.runs.settings import Settings
from reproduction.pages import table
from reproduction.paper_numbers import TABLE1
from reproduction.results_file import found, mean_and_spread
from reproduction.run import Result, Run

EPOCHS, DELTA, RECORDS = 25, 1e-5, 60_000
SEEDS = 3
HIDDEN, HYBRID, GRADIENT, DPSGD = "hidden-direction", "hybrid", "gradient", "opacus"
NAMES = {HIDDEN: "hidden-direction", HYBRID: "hybrid", GRADIENT: "gradient", DPSGD: "DP-SGD (Opacus)"}


@dataclass(frozen=True)
class Method:
    """How a method is run: its options by the epsilon up to which they are used, its batch size, learning rates by epsilon."""

    options: dict[float, dict[str, Any]]
    batch_size: int
    rates: dict[float, float]

    def options_at(self, epsilon: float) -> dict[str, Any]:
        return self.options[min(limit for limit in self.options if epsilon <= limit)]

    def learning_rate(self, epsilon: float) -> float:
        logarithm = np.interp(math.log(epsilon), np.log(list(self.rates)), np.log(list(self.rates.values())))
        return float(f"{math.exp(logarithm):.2g}")


@dataclass(frozen=True)
class Comparison:
    """A data set with its model, the values of epsilon, and the methods."""

    model: str
    epochs: int
    epsilons: tuple[float, ...]
    methods: dict[str, Method]


_ONE_SIDED = {"antithetic": False}
_MLP = {
    HIDDEN: Method(
        {  # the smaller the noise, the more it pays to average directions
            0.5: {"repeats": 8, "radius": 0.03, **_ONE_SIDED},
            2.0: {"repeats": 16, "radius": 0.03, **_ONE_SIDED},
            math.inf: {"repeats": 32, "subspace": 64, "radius": 0.1, **_ONE_SIDED},
        },
        2_000,
        {0.06: 0.02, 0.113: 0.03, 0.244: 0.06, 0.8: 0.2, 2.6: 0.4, 7.26: 0.6},
    ),
    GRADIENT: Method({math.inf: {}}, 1_000, {0.06: 0.01, 0.113: 0.015, 0.244: 0.03, 0.8: 0.1, 2.6: 0.3, 7.26: 0.4, 18.6: 0.5}),
    DPSGD: Method({math.inf: {}}, 1_000, {0.06: 0.01, 0.113: 0.015, 0.244: 0.03, 0.8: 0.1, 2.6: 0.3, 7.26: 0.4, 18.6: 0.5}),
}
_RESNET = {  # one direction per record and layer is what a processor affords
    HIDDEN: Method({math.inf: {"repeats": 1, "radius": 0.1, "last_layer": "exact", **_ONE_SIDED}}, 500, {3.0: 0.5, 8.0: 0.8}),
    HYBRID: Method(
        {math.inf: {"repeats": 1, "radius": 0.1, "exact": ["conv2", "conv3", "conv4", "linear"], **_ONE_SIDED}},
        500,
        {3.0: 1.0, 8.0: 2.0},
    ),
    GRADIENT: Method({math.inf: {}}, 500, {3.0: 1.0, 8.0: 2.0}),
    DPSGD: Method({math.inf: {"mode": "hooks", "physical_batch": 32}}, 500, {3.0: 1.0, 8.0: 2.0}),
}


@cache
def epsilon_of(batch: int, sigma0: float, epochs: int = EPOCHS) -> float:
    """What the Gaussian mechanism with this noise and batch size costs on MNIST, where the last batch of an epoch is smaller."""
    per_epoch = math.ceil(RECORDS / batch)
    return accounting.gaussian_epsilon(noise_multiplier=sigma0, sample_rate=1 / per_epoch, steps=epochs * per_epoch, delta=DELTA)


@cache
def comparisons() -> dict[str, Comparison]:
    paper = tuple(epsilon_of(batch, sigma0) for batch, row in TABLE1.items() for sigma0 in row)
    return {
        "mnist": Comparison("mlp", EPOCHS, paper, _MLP),
        "fashion-mnist": Comparison("mlp", EPOCHS, (0.5, 1.0, 3.0, 8.0), _MLP),
        "cifar10": Comparison("resnet5", 2, (3.0, 8.0), _RESNET),
    }


def certified_run(dataset: str, method: str, epsilon: float, seed: int, **changes: Any) -> Run:
    chosen = comparisons()[dataset]
    how = chosen.methods[method]
    options = dict(how.options_at(epsilon))
    values: dict[str, Any] = {
        "dataset": dataset,
        "model": chosen.model,
        "mechanism": HIDDEN if method == HYBRID else method,
        "repeats": options.pop("repeats", None),
        "batch_size": how.batch_size,
        "epochs": chosen.epochs,
        "target_epsilon": epsilon,
        "target_delta": DELTA,
        "learning_rate": how.learning_rate(epsilon),
        "momentum": 0.9,
        "seed": seed,
        "mechanism_options": options,
    }
    return Run(Settings(**(values | changes)), "opacus" if method == DPSGD else "dpulr")


def results_of(dataset: str, method: str, epsilon: float, seeds: int = SEEDS, **changes: Any) -> list[Result]:
    return found(certified_run(dataset, method, epsilon, seed, **changes) for seed in range(seeds))


# --- as Markdown ----------------------------------------------------------------------------------------------------------
def markdown(dataset: str, seeds: int = SEEDS) -> str:
    """The table, as far as it has been run, and how hidden-direction and DP-SGD compare. In brackets: the number of seeds."""
    chosen = comparisons()[dataset]
    settings = [(f"{batch}", f"{sigma0:g}") for batch, row in TABLE1.items() for sigma0 in row] if dataset == "mnist" else []
    runs = {method: [results_of(dataset, method, epsilon, seeds) for epsilon in chosen.epsilons] for method in chosen.methods}
    methods = [method for method in chosen.methods if any(runs[method])]
    heads = [*(["batch", "sigma0"] if settings else []), "epsilon", *(NAMES[method] for method in methods)]
    rows = []
    for i, epsilon in enumerate(chosen.epsilons):
        ours = [accuracy(runs[method][i]) for method in methods]
        rows.append([*(settings[i] if settings else ()), f"{epsilon:.4g}", *ours])
    return f"{table(heads, rows)}\n\n{comparison(dataset, seeds)}"


def accuracy(results: Sequence[Result]) -> str:
    """Mean and spread of the test accuracy over the seeds, in per cent."""
    if not results:
        return "-"
    mean, spread = mean_and_spread(results)
    return f"{mean:.2f} ± {spread:.2f} ({len(results)})" if len(results) > 1 else f"{mean:.2f} (1)"


def comparison(dataset: str, seeds: int = SEEDS) -> str:
    """How the means compare, in one sentence each."""
    chosen = comparisons()[dataset]
    paper = [max(columns[1::2]) for row in TABLE1.values() for columns in row.values()]
    gaps: list[float] = []
    above = 0
    for i, epsilon in enumerate(chosen.epsilons):
        found_both = [results_of(dataset, method, epsilon, seeds) for method in (HIDDEN, DPSGD)]
        if all(found_both):
            ours, theirs = (mean_and_spread(results)[0] for results in found_both)
            gaps.append(theirs - ours)
            above += dataset == "mnist" and ours >= paper[i]
    if not gaps:
        return "Not run yet."
    lines = [f"At least the better of the paper's two columns in {above} of {len(gaps)} settings."] if dataset == "mnist" else []
    lines.append(
        f"Within 1 point of DP-SGD in {sum(gap <= 1 for gap in gaps)} of {len(gaps)}; DP-SGD leads by "
        f"{sum(gaps) / len(gaps):.2f} points on average, by {max(gaps):.2f} at most, by {min(gaps):.2f} at least (negative: "
        "hidden-direction leads)."
    )
    return " ".join(lines)


GAUSSIAN = {"mechanism": "gaussian", "repeats": 16, "batch_size": 500, "learning_rate": 0.2, "mechanism_options": {"subspace": 32}}


def gaussian_runs(seed: int) -> list[Run]:
    """`gaussian`, antithetic, on MNIST at epsilon 2.6. Rate and subspace were chosen on the last 10,000 training records."""
    return [certified_run("mnist", HIDDEN, 2.6, seed, **GAUSSIAN)]
