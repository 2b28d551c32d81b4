"""`gaussian` on MNIST: the paper's MLP, antithetic, 25 epochs, epsilon 2.6. `python -m reproduction.gaussian_mnist`."""

from __future__ import annotations

import argparse
from pathlib import Path

from dpulr.mechanisms import Gaussian
from dpulr.runs.training import Recipe
from reproduction.sweep import mean_and_spread, sweep


def recipes(seeds: int) -> list[Recipe]:
    """Learning rate and subspace were chosen on the last 10,000 training records."""
    return [
        Recipe(Gaussian(repeats=16, subspace=32), epochs=25, target_epsilon=2.6, learning_rate=0.2, seed=seed)
        for seed in range(seeds)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path("results/gaussian-mnist.json"))
    options = parser.parse_args()
    mean, spread = mean_and_spread(sweep(recipes(options.seeds), options.results))
    print(f"test accuracy {mean:.2%} (standard deviation {spread:.2%} over {options.seeds} seeds)")


if __name__ == "__main__":
    main()
