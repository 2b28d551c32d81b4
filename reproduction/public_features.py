"""A private linear layer on features from public models, beside what others have published: which runs, and their table.

Settings are those of "auto" (`dpulr.auto`); only the number of epochs is fixed here. Nothing was tuned on these data sets but on
Fashion-MNIST's held-out training records, which the constants of "auto" are fitted to.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpulr.runs.settings import Settings
from reproduction.auto_fit import AutoRun
from reproduction.certified import accuracy
from reproduction.pages import table
from reproduction.results_file import found, mean_and_spread
from reproduction.run import Run

SEEDS = 3


@dataclass(frozen=True)
class Row:
    """One line of the table. `published`: by whom, and how much; `goal`: what was aimed at, in per cent."""

    title: str
    public_data: str
    epsilon: float
    epochs: float
    goal: float
    published: str
    settings: tuple[tuple[str, Any], ...]

    def run(self, seed: int) -> Run:
        values: dict[str, Any] = {
            "mechanism": "gradient",
            "epochs": self.epochs,
            "target_epsilon": self.epsilon,
            "seed": seed,
            "repeats": None,
        }
        return AutoRun(Settings(**(values | dict(self.settings))))

    def results(self, seeds: int = SEEDS) -> list[dict[str, Any]]:
        return found(self.run(seed) for seed in range(seeds))


def _features(dataset: str, features: str) -> tuple[tuple[str, Any], ...]:
    return (("dataset", dataset), ("features", features))


_SCATTERING, _IMAGENET = "none", "ImageNet"
_TRAMER = "Tramer and Boneh 2021, scattering + linear: {}"
ROWS = {
    "mnist:1.2": Row("MNIST, scattering", _SCATTERING, 1.2, 12, 98.0, _TRAMER.format("98.1"), _features("mnist", "scattering")),
    "mnist:2.93": Row("MNIST, scattering", _SCATTERING, 2.93, 12, 98.6, _TRAMER.format("98.7"), _features("mnist", "scattering")),
    "fashion-mnist:2.7": Row(
        "Fashion-MNIST, scattering", _SCATTERING, 2.7, 12, 89.5, _TRAMER.format("89.5"), _features("fashion-mnist", "scattering")
    ),
    "cifar10:3": Row(
        "CIFAR-10, scattering", _SCATTERING, 3.0, 12, 66.5, _TRAMER.format("67.0"), _features("cifar10", "scattering")
    ),
    "cifar10-imagenet:1": Row(
        "CIFAR-10, EfficientNet-Lite0", _IMAGENET, 1.0, 15, 85.0, "-", _features("cifar10", "efficientnet-lite0")
    ),
    "cifar10-imagenet:3": Row(
        "CIFAR-10, EfficientNet-Lite0", _IMAGENET, 3.0, 15, 88.0, "-", _features("cifar10", "efficientnet-lite0")
    ),
    "adult:1": Row(
        "Adult census, one-hot",
        _SCATTERING,
        1.0,
        15,
        0.0,
        "-",
        (("dataset", "reproduction.datasets:adult"), ("model", "reproduction.models:adult_linear")),
    ),
}


def markdown(seeds: int = SEEDS) -> str:
    rows = []
    for row in ROWS.values():
        results = row.results(seeds)
        chosen = results[0]["chosen"] if results else {}
        how = f"{row.epochs:g}, {chosen['batch_size']:,}, {chosen['learning_rate']:g}" if chosen else "-"
        goal = f"{row.goal:g}" if row.goal else "-"
        rows.append([row.title, row.public_data, f"{row.epsilon:g}", accuracy(results), goal, row.published, how])
    heads = ["data, features", "public data", "epsilon", "accuracy (%)", "aimed at", "published (%)", "epochs, batch, rate"]
    return table(heads, rows)


def logistic() -> str:
    """Adult census without privacy, by scikit-learn's logistic regression on the same columns. Newton's steps end at the optimum:
    where others stop depends on last bits of the machine's sums, and moved the second decimal."""
    from sklearn.linear_model import LogisticRegression

    from reproduction.datasets import adult

    train, test = adult()
    model = LogisticRegression(solver="newton-cholesky", tol=1e-9).fit(train.tensors[0].numpy(), train.tensors[1].numpy())
    score = 100 * model.score(test.tensors[0].numpy(), test.tensors[1].numpy())
    return f"Adult census without privacy, scikit-learn's logistic regression on the same columns: {score:.2f} %."


def draw(path: Path) -> None:
    """Accuracy beside what was published, a line for each row."""
    from reproduction.paper_figures import GREY, OURS, _pyplot

    plt = _pyplot()
    known = [(row, row.results()) for row in ROWS.values() if row.results()]
    figure, axis = plt.subplots(figsize=(7.5, 0.55 * len(known) + 1.2), layout="constrained")
    for i, (row, results) in enumerate(known):
        mean, spread = mean_and_spread(results)
        axis.errorbar(mean, -i, xerr=spread, fmt="o", color=OURS, label="here, by auto" if i == 0 else None)
        axis.annotate(f"{mean:.1f}", (mean, -i), xytext=(-8, 0), textcoords="offset points", va="center", ha="right")
        last = row.published.rpartition(" ")[2]
        if last.replace(".", "").isdigit():
            axis.plot([float(last)], [-i], "x", color=GREY, label="published" if i == 0 else None)
    axis.set_yticks([-i for i in range(len(known))], [f"{row.title}, epsilon {row.epsilon:g}" for row, _ in known])
    axis.set_xlim(60, 101)
    axis.set_xlabel("test accuracy (%)")
    axis.legend(frameon=False, loc="center left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
