"""The paper's tables: which runs they need, and our numbers beside the paper's.

K and the standard deviation of the injected noise are ours: chosen on the last 10,000 training records, never on the test set.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from reproduction.certified import DPSGD, EPOCHS, HIDDEN, NAMES, SEEDS, accuracy, certified_run, epsilon_of
from reproduction.pages import table
from reproduction.paper_numbers import MODEL_SIZE, TABLE1
from reproduction.paper_runs import SIGMA, method_of, paper_run
from reproduction.results_file import found
from reproduction.run import Result, Run

SETTINGS = {f"{batch}:{sigma0:g}": (batch, sigma0) for batch, row in TABLE1.items() for sigma0 in row}  # of table 1
SIZES = {f"{batch}:{model}": (batch, model) for batch, row in MODEL_SIZE.items() for model in row}
MODELS = {"small": "mlp", "medium": "reproduction.models:medium", "large": "reproduction.models:large"}
CIFAR = {"dp-sgd": (64, 1.0), "50:5": (1_000, 5.0), "25:8": (2_000, 8.0), "25:4": (2_000, 4.0)}  # 1/q : sigma0, as in the paper
CIFAR_REPEATS = 2
REPEAT_STUDY = (4, 16, 64)
ZEROTH_ORDER_RATE = 30.0  # held-out accuracy after 3 epochs: 34, 58, 77 and 80 % at 1, 3, 10 and 30
HOLDOUT = 10_000
READINGS: dict[str, tuple[str, dict[str, Any]]] = {  # what the paper leaves open; the first is what the other tables have
    "k16": ("K = 16", {"repeats": 16}),
    "k64": ("K = 64", {"repeats": 64}),
    "k256": ("K = 256", {"repeats": 256}),
    "torch-start": ("K = 64, torch's initial weights", {"repeats": 64, "model": "reproduction.models:torch_start"}),
    "gelu-end": ("K = 64, GELU at the last layer, too", {"repeats": 64, "model": "reproduction.models:gelu_at_the_end"}),
    "small-sigma": ("K = 64, sigma 0.3", {"repeats": 64, "sigma": 0.3}),
    "large-sigma": ("K = 64, sigma 3", {"repeats": 64, "sigma": 3.0}),
    "scaled": ("K = 64, inputs of mean 0 and variance 1", {"repeats": 64, "dataset": "mnist"}),
    "parameters": ("K = 64, noise in the parameters", {"repeats": 64, "remedy": "parameters"}),
}
EXACT: dict[
    str, tuple[str, dict[str, Any]]
] = {  # no readings: what DP-ULR estimates, without an error; and all of it clipped, as long estimates are
    "exact": ("exact gradients instead of estimates (not the paper's)", {}),
    "exact-short": ("exact gradients, all brought to length C (not the paper's)", {"clip": 1e-3}),
}
READ_AT = ((64, 1.0), (200, 4.0))  # where the readings are compared: batch, sigma0


# --- runs -----------------------------------------------------------------------------------------------------------------
def table1_runs(batch: int, sigma0: float, seed: int, epochs: int = EPOCHS, **changes: Any) -> list[Run]:
    """DP-ULR and the paper's DP-SGD for one setting."""
    methods: tuple[Any, Any] = ("dp-ulr", "dp-sgd")
    return [paper_run(method, batch, sigma0, epochs=epochs, seed=seed, **changes) for method in methods]


def certified_runs(batch: int, sigma0: float, seed: int, epochs: int = EPOCHS) -> list[Run]:
    """Hidden-direction and tuned DP-SGD at what the Gaussian mechanism with noise sigma0 costs: both certified."""
    epsilon = epsilon_of(batch, sigma0, epochs)
    return [certified_run("mnist", method, epsilon, seed, epochs=epochs) for method in (HIDDEN, DPSGD)]


def model_size_runs(batch: int, model: str, seed: int, epochs: int = EPOCHS, **changes: Any) -> list[Run]:
    return table1_runs(batch, 8.0, seed, epochs, model=MODELS[model], **changes)


def cifar_runs(label: str, seed: int, epochs: int = EPOCHS, **changes: Any) -> list[Run]:
    common: dict[str, Any] = {"dataset": "cifar10", "model": "resnet5", "epochs": epochs, "seed": seed}
    method: Any = "dp-sgd" if label == "dp-sgd" else "dp-ulr"
    batch, sigma0 = CIFAR[label]
    return [paper_run(method, batch, sigma0, **(common | {"repeats": CIFAR_REPEATS, "sigma": SIGMA} | changes))]


def repeats_runs(batch: int, sigma0: float, seed: int, epochs: int = EPOCHS, **changes: Any) -> list[Run]:
    return [table1_runs(batch, sigma0, seed, epochs, **(changes | {"repeats": repeats}))[0] for repeats in REPEAT_STUDY]


def reading_runs(reading: str, seed: int, epochs: int = EPOCHS) -> list[Run]:
    """DP-ULR under one reading of the paper, on held-out training records, or what it estimates."""
    changes: dict[str, Any] = {"epochs": epochs, "seed": seed, "holdout": HOLDOUT} | (READINGS | EXACT)[reading][1]
    return [paper_run("exact" if reading in EXACT else "dp-ulr", *place, **changes) for place in READ_AT]


def baseline_runs(seed: int, epochs: int = EPOCHS) -> list[Run]:
    """Batches of 500. Without noise: SGD and ULR. Certified, forward passes only, one epsilon: zeroth-order, hidden-direction."""
    epsilon = epsilon_of(500, 1.0, epochs)
    zeroth: dict[str, Any] = {"mechanism": "zeroth-order", "repeats": 16, "batch_size": 500, "learning_rate": ZEROTH_ORDER_RATE}
    return [
        paper_run("sgd", 500, epochs=epochs, seed=seed),
        paper_run("ulr", 500, epochs=epochs, seed=seed),
        certified_run("mnist", HIDDEN, epsilon, seed, epochs=epochs, **zeroth, mechanism_options={}),
        certified_run("mnist", HIDDEN, epsilon, seed, epochs=epochs),
    ]


# --- as Markdown ----------------------------------------------------------------------------------------------------------
_PAIRS = ["DP-ULR, paper", "DP-ULR, ours", "DP-SGD, paper", "DP-SGD as in the paper, ours"]


def table1(
    settings: Sequence[tuple[int, float]] = tuple(SETTINGS.values()),
    seeds: int = SEEDS,
    epochs: int = EPOCHS,
    *,
    certified: bool = False,
    **changes: Any,
) -> str:
    """The paper's numbers and ours of the same methods; `certified`: and what certified methods reach."""
    rows = []
    for batch, sigma0 in settings:
        ours = _by_method([table1_runs(batch, sigma0, seed, epochs, **changes) for seed in range(seeds)])
        row = [f"{batch}", f"{sigma0:g}", *_beside(TABLE1[batch][sigma0], ours)]
        if certified:
            proved = _by_method([certified_runs(batch, sigma0, seed, epochs) for seed in range(seeds)])
            row += [f"{epsilon_of(batch, sigma0, epochs):.3f}", *map(accuracy, proved)]
        rows.append(row)
    more = ["epsilon", *(f"{NAMES[method]}, certified" for method in (HIDDEN, DPSGD))] if certified else []
    return table(["batch", "sigma0", *_PAIRS, *more], rows)


def model_size(
    settings: Sequence[tuple[int, str]] = tuple(SIZES.values()), seeds: int = SEEDS, epochs: int = EPOCHS, **changes: Any
) -> str:
    rows = []
    for batch, model in settings:
        ours = _by_method([model_size_runs(batch, model, seed, epochs, **changes) for seed in range(seeds)])
        rows.append([f"{batch}", model, *_beside(MODEL_SIZE[batch][model], ours)])
    return table(["batch", "model", *_PAIRS], rows)


def listing(runs: Sequence[Run]) -> str:
    """One line per run: for figures whose numbers the paper does not print."""
    rows = []
    for result in found(runs):
        run = result["run"]
        rows.append(
            [
                method_of(run),
                f"{run['batch_size']}",
                f"{run['noise_multiplier']:g}",
                f"{run['repeats'] or ''}",
                f"{run['seed']}",
                _both([result]),
                ", ".join(f"{100 * point['test_accuracy']:.1f}" for point in result["curve"]),
                f"{result['nominal_epsilon']:.3f}",
                f"{result['seconds']:.0f}",
            ]
        )
    heads = ["method", "batch", "sigma0", "K", "seed", "training / validation", "validation by epoch", "nominal epsilon", "seconds"]
    return table(heads, rows)


def baselines(seeds: int = SEEDS, epochs: int = EPOCHS) -> str:
    """The methods beside the paper's: without privacy, and certified."""
    rows = []
    for results in _by_method([baseline_runs(seed, epochs) for seed in range(seeds)]):
        for first in results[:1]:
            paper = first["run"]["loop"] == "paper"
            name = {"sgd": "SGD", "ulr": "ULR"}[method_of(first["run"])] if paper else first["run"]["mechanism"]
            rows.append([name, "no privacy" if paper else f"{first['epsilon']:.3f}", accuracy(results)])
    return table(["method", "epsilon", "validation"], rows)


def readings(seeds: int = 1, epochs: int = EPOCHS) -> str:
    """Held-out accuracy under each reading, and how far the paper's number is."""
    rows = []
    for reading, (words, _) in (READINGS | EXACT).items():
        row = [words]
        for place, results in zip(READ_AT, _by_method([reading_runs(reading, seed, epochs) for seed in range(seeds)]), strict=True):
            points = [100 * result["test_accuracy"] for result in results]
            gap = f"{statistics.mean(points) - TABLE1[place[0]][place[1]][1]:+.1f}" if points else "-"
            row += [f"{_spread(points)} ({len(points)})" if points else "-", gap]
        rows.append(row)
    heads = [part for batch, sigma0 in READ_AT for part in (f"batch {batch}, sigma0 {sigma0:g}", "minus the paper's")]
    return table(["reading", *heads], rows)


def growth(settings: Sequence[tuple[int, float]] = tuple(SETTINGS.values())) -> str:
    """How long the vector of all parameters is after the first and the last epoch of seed 0."""
    rows = []
    for batch, sigma0 in settings:
        curves = [result["curve"] for results in _by_method([table1_runs(batch, sigma0, 0)]) for result in results]
        ends = [f"{point['parameter_norm']:.0f}" for curve in curves for point in (curve[0], curve[-1])]
        rows += [[f"{batch}", f"{sigma0:g}", *ends]] if len(ends) == 4 else []
    return table(["batch", "sigma0", "DP-ULR, epoch 1", "DP-ULR, epoch 25", "DP-SGD, epoch 1", "DP-SGD, epoch 25"], rows)


# --- what the tables say, in sentences --------------------------------------------------------------------------------------
def differences() -> str:
    """How far ours are from the paper's, by batch size: the validation accuracy, ours minus the paper's."""
    rows = []
    for batch, row in TABLE1.items():
        gaps: tuple[list[float], list[float]] = ([], [])
        for sigma0, paper in row.items():
            ulr, sgd = _by_method([table1_runs(batch, sigma0, seed) for seed in range(SEEDS)])
            if ulr and sgd:
                gaps[0].append(statistics.mean(100 * result["test_accuracy"] for result in ulr) - paper[1])
                gaps[1].append(statistics.mean(100 * result["best_accuracy"] for result in sgd) - paper[3])
        rows.append([f"{batch}", *(f"{min(gap):+.1f} to {max(gap):+.1f}" if gap else "-" for gap in gaps)])
    return table(["batch", "DP-ULR: points above the paper", "DP-SGD: points above the paper"], rows)


def torch_start() -> str:
    """DP-SGD at batch 500 with torch's own initial weights."""
    runs = [paper_run("dp-sgd", 500, sigma0, model="reproduction.models:torch_start") for sigma0 in TABLE1[500]]
    cells = [[f"{100 * result['best_accuracy']:.1f}" for result in found([run])] for run in runs]
    return table(
        ["sigma0", *(f"{sigma0:g}" for sigma0 in TABLE1[500])], [["validation, %", *(cell[0] if cell else "-" for cell in cells)]]
    )


def _beside(paper: tuple[float, float, float, float], ours: Sequence[Sequence[Result]]) -> list[str]:
    first, second = f"{paper[0]:.2f} / {paper[1]:.2f}", f"{paper[2]:.2f} / {paper[3]:.2f}"
    return [first, _both(ours[0]), second, _both(ours[1], best=True)]


def _both(results: Sequence[Result], *, best: bool = False) -> str:
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


def _by_method(seeds: Sequence[Sequence[Run]]) -> list[list[Result]]:
    """What has been run of each method, from one list of runs per seed."""
    return [found(runs) for runs in zip(*seeds, strict=True)]
