"""The paper's tables and its CIFAR-10 figure: which runs they need, the paper's numbers, and ours beside them as Markdown.

K and the standard deviation of the injected noise are ours: chosen on the last 10,000 training records, never on the test set.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpulr.experiments import sweep, table
from dpulr.experiments.paper_runs import PaperRun
from dpulr.experiments.reproduction import found
from dpulr.experiments.table import epsilon_of

REPEATS = 16
SIGMAS = {0.5: 3.0, 1.0: 2.0, 2.0: 2.0, 4.0: 1.0, 8.0: 1.0}
"""Injected noise by sigma0: the less noise for privacy, the more the spread of the proxies themselves must be held down."""
EPOCHS = 25

# batch size: {sigma0: (DP-ULR training, DP-ULR validation, DP-SGD training, DP-SGD validation)}, in per cent
TABLE1: dict[int, dict[float, tuple[float, float, float, float]]] = {
    64: {
        0.5: (85.43, 86.12, 93.94, 94.14),
        1: (81.81, 82.73, 90.90, 91.20),
        2: (78.04, 78.80, 78.61, 78.32),
        4: (70.71, 72.14, 67.33, 68.73),
        8: (57.88, 58.65, 33.63, 32.07),
    },
    200: {
        0.5: (91.55, 91.98, 90.47, 90.68),
        1: (89.24, 90.11, 90.54, 90.77),
        2: (86.15, 87.11, 90.63, 90.95),
        4: (83.20, 84.45, 89.07, 89.63),
        8: (78.91, 80.05, 78.50, 79.14),
    },
    500: {
        0.5: (93.92, 94.19, 87.56, 87.98),
        1: (91.73, 92.04, 87.56, 87.98),
        2: (89.33, 90.31, 87.59, 88.00),
        4: (86.56, 87.63, 87.66, 87.97),
        8: (82.87, 84.53, 87.68, 88.16),
    },
}
# batch size: {model: the same four}
MODEL_SIZE: dict[int, dict[str, tuple[float, float, float, float]]] = {
    64: {
        "small": (57.88, 58.65, 33.63, 32.07),
        "medium": (58.58, 59.53, 42.98, 43.81),
        "large": (40.10, 41.42, 28.75, 24.78),
    },
    128: {
        "small": (73.04, 74.24, 69.49, 70.53),
        "medium": (67.25, 69.00, 66.22, 67.98),
        "large": (66.48, 67.75, 65.87, 66.15),
    },
    256: {
        "small": (79.27, 80.94, 85.11, 86.03),
        "medium": (76.45, 78.48, 83.93, 84.96),
        "large": (76.25, 78.28, 84.29, 85.13),
    },
}
CIFAR = {"50:5": (1_000, 5.0), "25:8": (2_000, 8.0), "25:4": (2_000, 4.0)}  # 1/q : sigma0, as the paper names its panels
CIFAR_REPEATS = 4
REPEAT_STUDY = (4, 16, 64)


def table1_runs(batch: int, sigma0: float, seed: int, epochs: int = EPOCHS, **more: Any) -> list[PaperRun]:
    """DP-ULR and the paper's DP-SGD for one setting."""
    own = {"repeats": REPEATS, "sigma": SIGMAS[sigma0]} | more
    return [
        PaperRun("dp-ulr", batch, sigma0, epochs, seed, **own),
        PaperRun("dp-sgd", batch, sigma0, epochs, seed, holdout=own.get("holdout", 0)),
    ]


def model_size_runs(batch: int, model: str, seed: int, epochs: int = EPOCHS, **more: Any) -> list[PaperRun]:
    return [replace(setting, model=model) for setting in table1_runs(batch, 8.0, seed, epochs, **more)]


def cifar_runs(label: str, seed: int, epochs: int, **more: Any) -> list[PaperRun]:
    common: dict[str, Any] = {"dataset": "cifar10", "model": "resnet5", "epochs": epochs, "seed": seed}
    if label == "dp-sgd":
        return [PaperRun("dp-sgd", 64, 1.0, **common)]
    batch, sigma0 = CIFAR[label]
    return [PaperRun("dp-ulr", batch, sigma0, **common, **({"repeats": CIFAR_REPEATS, "sigma": 1.0} | more))]


def repeats_runs(batch: int, sigma0: float, seed: int, epochs: int = EPOCHS, **more: Any) -> list[PaperRun]:
    return [table1_runs(batch, sigma0, seed, epochs, **(more | {"repeats": repeats}))[0] for repeats in REPEAT_STUDY]


# --- as Markdown ----------------------------------------------------------------------------------------------------------
def table1(settings: Sequence[tuple[int, float]], file: Path, certified: Path, seeds: int, epochs: int, **more: Any) -> str:
    """The paper's numbers, ours of the same methods, and certified ones at the epsilon of the Gaussian mechanism at sigma0."""
    heads = ["batch", "sigma0", "DP-ULR, paper", "DP-ULR, ours", "DP-SGD, paper", "DP-SGD as in the paper, ours"]
    heads += ["epsilon", "hidden-direction (certified)", "DP-SGD tuned (certified)"]
    rows = []
    for batch, sigma0 in settings:
        runs = [table1_runs(batch, sigma0, seed, epochs, **more) for seed in range(seeds)]
        ours = [found([pair[i] for pair in runs], file) for i in (0, 1)]
        paper = TABLE1[batch][sigma0]
        row = [f"{batch}", f"{sigma0:g}", f"{paper[0]:.2f} / {paper[1]:.2f}", both(ours[0])]
        row += [f"{paper[2]:.2f} / {paper[3]:.2f}", both(ours[1], best=True), f"{epsilon_of(batch, sigma0):.3f}"]
        row += [_certified(certified, name, epsilon_of(batch, sigma0), seeds) for name in ("hidden-direction", "dp-sgd")]
        rows.append(row)
    return _markdown(heads, rows)


def model_size(settings: Sequence[tuple[int, str]], file: Path, seeds: int, epochs: int, **more: Any) -> str:
    heads = ["batch", "model", "DP-ULR, paper", "DP-ULR, ours", "DP-SGD, paper", "DP-SGD as in the paper, ours"]
    rows = []
    for batch, model in settings:
        runs = [model_size_runs(batch, model, seed, epochs, **more) for seed in range(seeds)]
        paper = MODEL_SIZE[batch][model]
        ours = [found([pair[i] for pair in runs], file) for i in (0, 1)]
        row = [f"{batch}", model, f"{paper[0]:.2f} / {paper[1]:.2f}", both(ours[0])]
        rows.append([*row, f"{paper[2]:.2f} / {paper[3]:.2f}", both(ours[1], best=True)])
    return _markdown(heads, rows)


def listing(runs: Sequence[PaperRun], file: Path) -> str:
    """One line a run: for figures whose numbers the paper does not print."""
    rows = []
    for result in found(runs, file):
        setting = result["setting"]
        curve = ", ".join(f"{100 * point['test_accuracy']:.1f}" for point in result["curve"])
        rows.append(
            [
                setting["method"],
                f"{setting['batch_size']}",
                f"{setting['target_std']:g}",
                f"{setting.get('repeats', '')}",
                f"{setting['seed']}",
                both([result]),
                curve,
                f"{result['nominal_epsilon']:.3f}",
                f"{result['seconds']:.0f}",
            ]
        )
    heads = ["method", "batch", "sigma0", "K", "seed", "training / validation", "validation by epoch", "nominal epsilon", "seconds"]
    return _markdown(heads, rows)


def both(results: Sequence[dict[str, Any]], *, best: bool = False) -> str:
    """Training / validation accuracy with the spread over seeds and their number. `best`: the best epoch's, as the paper has it."""
    if not results:
        return "-"
    if best:
        points = [max(result["curve"], key=lambda point: point["test_accuracy"]) for result in results]
    else:
        points = [result["curve"][-1] for result in results]
    train, test = (_spread([100 * point[name] for point in points]) for name in ("train_accuracy", "test_accuracy"))
    return f"{train} / {test} ({len(results)})"


def _spread(values: Sequence[float]) -> str:
    text = f"{statistics.mean(values):.2f}"
    return f"{text} ± {statistics.stdev(values):.2f}" if len(values) > 1 else text


def _certified(file: Path, method: str, epsilon: float, seeds: int) -> str:
    """Test accuracies of the certified runs at this epsilon, from the table of `dpulr.experiments.table`."""
    results = sweep.found([table.recipe("mnist", method, epsilon, seed) for seed in range(seeds)], file)
    values = [100 * result["test_accuracy"] for result in results]
    return f"{_spread(values)} ({len(values)})" if values else "-"


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
