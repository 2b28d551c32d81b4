"""Hidden-direction beside DP-SGD by Opacus, at the same epsilon, model and number of epochs.

    python -m reproduction.table --dataset mnist --seeds 3

MNIST: the paper's 15 settings, each at the epsilon of the Gaussian mechanism with its noise and batch size. Fashion-MNIST: four
values of epsilon. CIFAR-10: ResNet-5 at two values of epsilon, few epochs. Runs that the results file holds are not repeated.
Learning rates were chosen on the last 10,000 training records (`--holdout 10000`) with one seed, at the values of epsilon that the
methods name; between them they are interpolated. Choosing them is not covered by epsilon.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpulr import accounting
from dpulr.mechanisms import HiddenDirection
from dpulr.runs.training import Recipe
from reproduction.opacus import OpacusDPSGD
from reproduction.paper_numbers import TABLE1
from reproduction.results_file import found
from reproduction.sweep import mean_and_spread, sweep

EPOCHS, DELTA, RECORDS = 25, 1e-5, 60_000


@dataclass(frozen=True)
class Method:
    """How a method is run: mechanisms by the epsilon up to which they are used, batch size, and learning rates by epsilon."""

    mechanisms: dict[float, HiddenDirection | OpacusDPSGD]
    batch_size: int
    rates: dict[float, float]

    def mechanism(self, epsilon: float) -> HiddenDirection | OpacusDPSGD:
        return self.mechanisms[min(limit for limit in self.mechanisms if epsilon <= limit)]

    def learning_rate(self, epsilon: float) -> float:
        logarithm = np.interp(math.log(epsilon), np.log(list(self.rates)), np.log(list(self.rates.values())))
        return float(f"{math.exp(logarithm):.2g}")


@dataclass(frozen=True)
class Study:
    """A data set with its model, the values of epsilon, and the methods."""

    model: str
    epochs: float
    epsilons: tuple[float, ...]
    methods: dict[str, Method]


def epsilon_of(batch: int, sigma0: float, epochs: int = EPOCHS) -> float:
    """What the Gaussian mechanism with this noise and batch size costs on MNIST."""
    steps_an_epoch = math.ceil(RECORDS / batch)
    return accounting.gaussian_epsilon(
        noise_multiplier=sigma0, sample_rate=1 / steps_an_epoch, steps=epochs * steps_an_epoch, delta=DELTA
    )


HIDDEN = Method(
    {  # the smaller the noise, the more it pays to average directions
        0.5: HiddenDirection(repeats=8, antithetic=False, radius=0.03),
        2.0: HiddenDirection(repeats=16, antithetic=False, radius=0.03),
        math.inf: HiddenDirection(repeats=32, subspace=64, antithetic=False),
    },
    2_000,
    {0.06: 0.02, 0.113: 0.03, 0.244: 0.06, 0.8: 0.2, 2.6: 0.4, 7.26: 0.6},
)
DPSGD = Method({math.inf: OpacusDPSGD()}, 1_000, {0.06: 0.01, 0.113: 0.015, 0.244: 0.03, 0.8: 0.1, 2.6: 0.3, 7.26: 0.4, 18.6: 0.5})

CONVOLUTIONS = {  # ResNet-5: one direction a record and layer is what the machine affords
    "hidden-direction": Method({math.inf: HiddenDirection(antithetic=False, last_layer="exact")}, 500, {3.0: 0.5, 8.0: 0.8}),
    "dp-sgd": Method({math.inf: OpacusDPSGD(mode="hooks", physical_batch=32)}, 500, {3.0: 1.0, 8.0: 2.0}),
}


def studies() -> dict[str, Study]:
    methods = {"hidden-direction": HIDDEN, "dp-sgd": DPSGD}
    paper = tuple(epsilon_of(batch, sigma0) for batch, row in TABLE1.items() for sigma0 in row)
    return {
        "mnist": Study("mlp", EPOCHS, paper, methods),
        "fashion-mnist": Study("mlp", EPOCHS, (0.5, 1.0, 3.0, 8.0), methods),
        "cifar10": Study("resnet5", 2, (3.0, 8.0), CONVOLUTIONS),
    }


def recipe(study: str, method: str, epsilon: float, seed: int, holdout: int = 0, **changes: object) -> Recipe:
    chosen = studies()[study]
    how = chosen.methods[method]
    settings: dict[str, object] = {
        "dataset": study,
        "model": chosen.model,
        "batch_size": how.batch_size,
        "epochs": chosen.epochs,
        "target_epsilon": epsilon,
        "target_delta": DELTA,
        "learning_rate": how.learning_rate(epsilon),
        "seed": seed,
        "holdout": holdout,
    }
    return Recipe(how.mechanism(epsilon), **(settings | changes))  # type: ignore[arg-type]


def cells(study: str, method: str, epsilon: float, seeds: int, file: Path, holdout: int = 0) -> str:
    """Mean and spread of what has been run, as text."""
    results = found([recipe(study, method, epsilon, seed, holdout) for seed in range(seeds)], file)
    return "{:.2f} ± {:.2f} ({})".format(*(100 * v for v in mean_and_spread(results)), len(results)) if results else "not run"


def markdown(study: str, seeds: int, file: Path, holdout: int = 0) -> str:
    """The table, as far as it has been run. In brackets: the number of seeds."""
    chosen = studies()[study]
    paper = [(batch, sigma0, *columns[1::2]) for batch, row in TABLE1.items() for sigma0, columns in row.items()]
    head = ["epsilon", *(["batch", "sigma0", "paper: DP-ULR", "paper: DP-SGD"] if study == "mnist" else []), *chosen.methods]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for i, epsilon in enumerate(chosen.epsilons):
        ours = [cells(study, method, epsilon, seeds, file, holdout) for method in chosen.methods]
        lines.append(f"| {' | '.join([f'{epsilon:.4g}', *(map(str, paper[i]) if study == 'mnist' else []), *ours])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=list(studies()), default="mnist")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="*", default=None, help="which to run; none: only print the table")
    parser.add_argument("--epsilons", nargs="+", type=int, default=None, help="which rows of the table to run, counted from 0")
    parser.add_argument("--holdout", type=int, default=0)
    parser.add_argument("--results", type=Path, default=None)
    options = parser.parse_args()
    study = studies()[options.dataset]
    file = options.results or Path(f"results/{options.dataset}-table.json")
    rows = range(len(study.epsilons)) if options.epsilons is None else options.epsilons
    for method in list(study.methods) if options.methods is None else options.methods:
        for seed in range(options.seeds):  # a whole table of one seed before the next one
            sweep([recipe(options.dataset, method, study.epsilons[row], seed, options.holdout) for row in rows], file)
    print(markdown(options.dataset, options.seeds, file, options.holdout))


if __name__ == "__main__":
    main()
