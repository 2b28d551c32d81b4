"""Hidden-direction at the epsilon of each of the paper's 15 MNIST settings, beside DP-SGD by Opacus.

    python -m dpulr.experiments.table --seeds 3 --methods hidden-direction dp-sgd

Runs that the results file holds are not repeated. Learning rates were chosen on the last 10,000 training records (`--holdout`), at
a few values of epsilon; between them they are interpolated. Choosing them is not covered by epsilon.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np

from dpulr import accounting
from dpulr.experiments.baselines import OpacusDPSGD
from dpulr.experiments.sweep import mean_and_spread, sweep
from dpulr.experiments.training import Recipe
from dpulr.mechanisms import HiddenDirection

EPOCHS, DELTA, RECORDS = 25, 1e-5, 60_000
PAPER = {  # batch size: {sigma0: (DP-ULR, DP-SGD)}, validation accuracy in per cent, from the paper's table
    64: {0.5: (86.12, 94.14), 1: (82.73, 91.20), 2: (78.80, 78.32), 4: (72.14, 68.73), 8: (58.65, 32.07)},
    200: {0.5: (91.98, 90.68), 1: (90.11, 90.77), 2: (87.11, 90.95), 4: (84.45, 89.63), 8: (80.05, 79.14)},
    500: {0.5: (94.19, 87.98), 1: (92.04, 87.98), 2: (90.31, 88.00), 4: (87.63, 87.97), 8: (84.53, 88.16)},
}
RATES = {  # epsilon: learning rate
    "hidden-direction": {0.06: 0.02, 0.244: 0.06, 1.0: 0.4, 7.26: 0.6},
    "dp-sgd": {0.06: 0.015, 0.244: 0.05, 1.0: 0.3, 7.26: 0.5},
}


def epsilon_of(batch: int, sigma0: float) -> float:
    """What the Gaussian mechanism with this noise and batch size costs over 25 epochs."""
    steps_an_epoch = math.ceil(RECORDS / batch)
    return accounting.gaussian_epsilon(
        noise_multiplier=sigma0, sample_rate=1 / steps_an_epoch, steps=EPOCHS * steps_an_epoch, delta=DELTA
    )


def learning_rate(method: str, epsilon: float) -> float:
    known = RATES[method]
    logarithm = np.interp(math.log(epsilon), np.log(list(known)), np.log(list(known.values())))
    return float(f"{math.exp(logarithm):.2g}")


def recipe(method: str, batch: int, sigma0: float, seed: int, holdout: int = 0) -> Recipe:
    epsilon = epsilon_of(batch, sigma0)
    mechanism = HiddenDirection(repeats=8) if method == "hidden-direction" else OpacusDPSGD()
    return Recipe(
        mechanism,
        batch_size=2_000 if method == "hidden-direction" else 1_000,
        epochs=EPOCHS,
        target_epsilon=epsilon,
        target_delta=DELTA,
        learning_rate=learning_rate(method, epsilon),
        seed=seed,
        holdout=holdout,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--batches", nargs="+", type=int, choices=list(PAPER), default=list(PAPER))
    parser.add_argument("--holdout", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("results/mnist-table.json"))
    options = parser.parse_args()
    settings = [(batch, sigma0) for batch in options.batches for sigma0 in PAPER[batch]]
    rows = {
        method: {
            setting: sweep([recipe(method, *setting, seed, options.holdout) for seed in range(options.seeds)], options.results)
            for setting in settings
        }
        for method in options.methods
    }
    print(f"| batch | sigma0 | epsilon | paper, DP-ULR | paper, DP-SGD | {' | '.join(options.methods)} |")
    print("|---" * (5 + len(options.methods)) + "|")
    for setting in settings:
        cells = ["{:.2f} ± {:.2f}".format(*(100 * v for v in mean_and_spread(rows[method][setting]))) for method in options.methods]
        batch, sigma0 = setting
        paper = " | ".join(f"{value:.2f}" for value in PAPER[batch][sigma0])
        print(f"| {batch} | {sigma0} | {epsilon_of(*setting):.3f} | {paper} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
