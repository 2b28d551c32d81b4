"""A network with a box in its middle: hidden directions for all layers, or for the one before the box only.

MNIST, `models.stepped`, epsilon 3, 2 epochs, one direction per record and layer. Each way is tried with the learning rates of RATES
on the last 10,000 training records with seed 0; its best rate is run with all seeds on the test set. Choosing rates is not covered
by epsilon.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dpulr.runs.settings import Settings
from reproduction.certified import SEEDS, accuracy
from reproduction.pages import table
from reproduction.results_file import found, mean_and_spread
from reproduction.run import Result, Run

RATES = (0.25, 0.5, 1.0, 2.0)
WAYS = {"hidden-direction": "none", "hidden-direction, exact behind the box": "auto"}


def run(exact: str, rate: float, seed: int, *, holdout: int = 0) -> Run:
    return Run(
        Settings(
            dataset="mnist",
            model="reproduction.models:stepped",
            mechanism="hidden-direction",
            repeats=1,
            batch_size=1_000,
            epochs=2,
            target_epsilon=3.0,
            learning_rate=rate,
            momentum=0.9,
            holdout=holdout,
            seed=seed,
            mechanism_options={"exact": exact} if exact != "none" else {},
        )
    )


def tried(exact: str) -> list[Run]:
    """What the learning rate is chosen by."""
    return [run(exact, rate, 0, holdout=10_000) for rate in RATES]


def best_rate(exact: str) -> float | None:
    results = found(tried(exact))
    return max(results, key=lambda result: result["test_accuracy"])["run"]["learning_rate"] if results else None


def runs(exact: str, seeds: int) -> list[Run]:
    rate = best_rate(exact)
    return [] if rate is None else [run(exact, rate, seed) for seed in range(seeds)]


def stages(seeds: int) -> Iterator[list[Run]]:
    yield [one for exact in WAYS.values() for one in tried(exact)]
    yield [one for seed in range(seeds) for exact in WAYS.values() for one in runs(exact, seeds)[seed : seed + 1]]


def markdown(seeds: int = SEEDS) -> str:
    """The table, as far as it has been run, and the difference in one sentence."""
    rows, means = [], []
    for name, exact in WAYS.items():
        results = found(runs(exact, seeds))
        rate = best_rate(exact)
        rows.append([name, accuracy(results), "-" if rate is None else f"{rate:g}", seconds(results)])
        means += [mean_and_spread(results)[0]] if results else []
    text = table(["mechanism", "accuracy (%)", "learning rate", "seconds of a processor"], rows)
    if len(means) < len(WAYS):
        return f"{text}\n\nNot run yet."
    return f"{text}\n\nExact gradients behind the box gain {means[1] - means[0]:.1f} points."


def seconds(results: Sequence[Result]) -> str:
    """Of a whole run, set-up left out: mean over the seeds."""
    return f"{sum(result['cpu_seconds'] for result in results) / len(results):.0f}" if results else "-"
