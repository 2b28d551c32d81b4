"""The paper's tables and its CIFAR-10 figure: which runs they need, and our numbers beside the paper's, as Markdown.

K and the standard deviation of the injected noise are ours: chosen on the last 10,000 training records, never on the test set.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpulr.mechanisms import ZerothOrder
from dpulr.runs.training import Recipe
from reproduction.paper_numbers import MODEL_SIZE, TABLE1
from reproduction.paper_runs import AS_LOADED, PaperRun
from reproduction.results_file import found
from reproduction.table import epsilon_of, recipe

SETTINGS = {f"{batch}:{sigma0:g}": (batch, sigma0) for batch, row in TABLE1.items() for sigma0 in row}  # of table 1
SIZES = {f"{batch}:{model}": (batch, model) for batch, row in MODEL_SIZE.items() for model in row}
METHODS = ("dp-ulr", "dp-sgd", "hidden-direction", "dp-sgd-tuned")  # of table 1: the paper's two, and two certified ones
REPEATS, SIGMA = 16, 1.0
EPOCHS = 25

CIFAR = {"50:5": (1_000, 5.0), "25:8": (2_000, 8.0), "25:4": (2_000, 4.0)}  # 1/q : sigma0, as the paper names its panels
CIFAR_REPEATS = 2
REPEAT_STUDY = (4, 16, 64)
ZEROTH_ORDER_RATE = 30.0  # held-out accuracy after 3 epochs: 34, 58, 77 and 80 % at 1, 3, 10 and 30


def table1_runs(batch: int, sigma0: float, seed: int, epochs: int = EPOCHS, **more: Any) -> list[PaperRun]:
    """DP-ULR and the paper's DP-SGD for one setting."""
    own = {"repeats": REPEATS, "sigma": SIGMA} | more
    shared = {name: value for name, value in own.items() if name not in ("repeats", "sigma")}
    return [PaperRun("dp-ulr", batch, sigma0, epochs, seed, **own), PaperRun("dp-sgd", batch, sigma0, epochs, seed, **shared)]


def certified_runs(batch: int, sigma0: float, seed: int, epochs: int = EPOCHS) -> list[Recipe]:
    """Hidden-direction and tuned DP-SGD at what the Gaussian mechanism with noise sigma0 costs: both certified."""
    epsilon = epsilon_of(batch, sigma0, epochs)
    return [recipe("mnist", method, epsilon, seed, epochs=epochs) for method in ("hidden-direction", "dp-sgd")]


def model_size_runs(batch: int, model: str, seed: int, epochs: int = EPOCHS, **more: Any) -> list[PaperRun]:
    return [replace(setting, model=model) for setting in table1_runs(batch, 8.0, seed, epochs, **more)]


def cifar_runs(label: str, seed: int, epochs: int, **more: Any) -> list[PaperRun]:
    common: dict[str, Any] = {"dataset": "cifar10", "model": "resnet5", "epochs": epochs, "seed": seed, "rescale": AS_LOADED}
    if label == "dp-sgd":
        return [PaperRun("dp-sgd", 64, 1.0, **common)]
    batch, sigma0 = CIFAR[label]
    return [PaperRun("dp-ulr", batch, sigma0, **common, **({"repeats": CIFAR_REPEATS, "sigma": SIGMA} | more))]


def repeats_runs(batch: int, sigma0: float, seed: int, epochs: int = EPOCHS, **more: Any) -> list[PaperRun]:
    return [table1_runs(batch, sigma0, seed, epochs, **(more | {"repeats": repeats}))[0] for repeats in REPEAT_STUDY]


def plain_runs(seed: int, epochs: int = EPOCHS) -> list[PaperRun]:
    """Without noise for privacy: SGD, and ULR, which is clipped all the same."""
    return [PaperRun("sgd", 500, 0.0, epochs, seed), PaperRun("ulr", 500, 0.0, epochs, seed, repeats=REPEATS, sigma=SIGMA)]


def forward_runs(seed: int, epochs: int = EPOCHS) -> list[Recipe]:
    """The certified methods that need forward passes only, at one epsilon."""
    epsilon = epsilon_of(500, 1.0, epochs)
    zeroth: dict[str, Any] = {"target_epsilon": epsilon, "epochs": epochs, "seed": seed, "batch_size": 500}
    return [Recipe(ZerothOrder(), learning_rate=ZEROTH_ORDER_RATE, **zeroth), certified_runs(500, 1.0, seed, epochs)[0]]


# --- as Markdown ----------------------------------------------------------------------------------------------------------
def table1(settings: Sequence[tuple[int, float]], file: Path, certified: Path, seeds: int, epochs: int, **more: Any) -> str:
    """The paper's numbers, ours of the same methods, and what certified methods reach."""
    heads = ["batch", "sigma0", "DP-ULR, paper", "DP-ULR, ours", "DP-SGD, paper", "DP-SGD as in the paper, ours"]
    heads += ["epsilon", "hidden-direction (certified)", "DP-SGD tuned (certified)"]
    rows = []
    for batch, sigma0 in settings:
        ours = _by_method([table1_runs(batch, sigma0, seed, epochs, **more) for seed in range(seeds)], file)
        proved = _by_method([certified_runs(batch, sigma0, seed, epochs) for seed in range(seeds)], certified)
        paper = TABLE1[batch][sigma0]
        row = [f"{batch}", f"{sigma0:g}", f"{paper[0]:.2f} / {paper[1]:.2f}", both(ours[0])]
        row += [f"{paper[2]:.2f} / {paper[3]:.2f}", both(ours[1], best=True), f"{epsilon_of(batch, sigma0, epochs):.3f}"]
        rows.append([*row, *map(_validation, proved)])
    return _markdown(heads, rows)


def model_size(settings: Sequence[tuple[int, str]], file: Path, seeds: int, epochs: int, **more: Any) -> str:
    heads = ["batch", "model", "DP-ULR, paper", "DP-ULR, ours", "DP-SGD, paper", "DP-SGD as in the paper, ours"]
    rows = []
    for batch, model in settings:
        ours = _by_method([model_size_runs(batch, model, seed, epochs, **more) for seed in range(seeds)], file)
        paper = MODEL_SIZE[batch][model]
        row = [f"{batch}", model, f"{paper[0]:.2f} / {paper[1]:.2f}", both(ours[0])]
        rows.append([*row, f"{paper[2]:.2f} / {paper[3]:.2f}", both(ours[1], best=True)])
    return _markdown(heads, rows)


def growth(settings: Sequence[tuple[int, float]], file: Path) -> str:
    """How long the vector of all parameters is after the first and the last epoch of seed 0."""
    rows = []
    for batch, sigma0 in settings:
        ends = []
        for results in _by_method([table1_runs(batch, sigma0, 0)], file):
            ends += [f"{point['parameter_norm']:.0f}" for result in results for point in (result["curve"][0], result["curve"][-1])]
        rows += [[f"{batch}", f"{sigma0:g}", *ends]] if len(ends) == 4 else []
    return _markdown(["batch", "sigma0", "DP-ULR, epoch 1", "DP-ULR, epoch 25", "DP-SGD, epoch 1", "DP-SGD, epoch 25"], rows)


def listing(runs: Sequence[PaperRun], file: Path) -> str:
    """One line a run: for figures whose numbers the paper does not print."""
    rows = []
    for result in found(runs, file):
        setting = result["recipe"]
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


def baselines(file: Path, certified: Path, seeds: int, epochs: int) -> str:
    """The methods beside the paper's: without privacy, and certified."""
    rows = []
    for results in _by_method([plain_runs(seed, epochs) for seed in range(seeds)], file):
        rows += [[results[0]["recipe"]["method"], "none", _validation(results)]] if results else []
    for results in _by_method([forward_runs(seed, epochs) for seed in range(seeds)], certified):
        name = results[0]["recipe"]["mechanism"]["name"] if results else ""
        rows += [[name, f"{results[0]['epsilon']:.3f}", _validation(results)]] if results else []
    return _markdown(["method", "epsilon", "validation"], rows)


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


def _validation(results: Sequence[dict[str, Any]]) -> str:
    return f"{_spread([100 * result['test_accuracy'] for result in results])} ({len(results)})" if results else "-"


def _by_method(pairs: Sequence[Sequence[PaperRun | Recipe]], file: Path) -> list[list[dict[str, Any]]]:
    """What has been run of each method, from one pair of runs a seed."""
    return [found(runs, file) for runs in zip(*pairs, strict=True)]


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
