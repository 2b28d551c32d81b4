"""What becomes of a loss: the numbers of docs/losses.md.

Two small problems whose best answer is known, and MNIST at epsilon 1. Rates were tried on held-out training records (MNIST)
or not at all (the small problems); choosing them is not covered by epsilon.
"""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr.mechanisms import Mechanism
from dpulr.runs.settings import Settings
from reproduction.pages import table
from reproduction.results_file import folder, found
from reproduction.run import Result, Run

SEEDS = 3
FILE = "losses.json"
RECORDS, FEATURES, BATCH, STEPS, RATE = 10_000, 5, 500, 200, 0.1

MECHANISMS: dict[str, Mechanism] = {
    "hidden-direction": dpulr.HiddenDirection(),
    'hidden-direction, `kappa="adaptive"`': dpulr.HiddenDirection(kappa="adaptive"),
    "gradient, C = 1 (DP-SGD)": dpulr.Gradient(),
    'gradient, `max_grad_norm="adaptive"`': dpulr.Gradient(max_grad_norm="adaptive"),
}


# --- small problems -------------------------------------------------------------------------------------------------------
def exponential(mechanism: Mechanism, seed: int) -> float:
    """Squared error, exponential targets, features that say nothing: the mean prediction. Best: 1; the median is 0.69."""
    torch.manual_seed(seed)
    targets = torch.distributions.Exponential(1.0).sample((RECORDS, 1))

    def squared(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square()[:, 0]

    model = nn.Sequential(nn.Linear(FEATURES, 1))
    trained(model, targets, squared, mechanism, epsilon=3.0)
    with torch.no_grad():
        return float(model(torch.randn(5_000, FEATURES)).mean())


def no_signal(mechanism: Mechanism, seed: int) -> float:
    """Cross-entropy, 30 % positives, features that say nothing: the mean predicted probability. Best: 0.3."""
    torch.manual_seed(seed)
    targets = (torch.rand(RECORDS) < 0.3).long()
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 2))
    trained(model, targets, nn.CrossEntropyLoss(reduction="none"), mechanism, epsilon=1.0)
    with torch.no_grad():
        return float(model(torch.randn(5_000, FEATURES)).softmax(1)[:, 1].mean())


def trained(model: nn.Module, targets: Tensor, loss: Any, mechanism: Mechanism, *, epsilon: float) -> None:
    data = TensorDataset(torch.randn(RECORDS, FEATURES), targets)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    engine = dpulr.PrivacyEngine(
        model, optimizer, data, loss, mechanism=mechanism, batch_size=BATCH, steps=STEPS, target_epsilon=epsilon
    )
    for batch in engine.batches():
        engine.step(*batch)
        schedule.step()


PROBLEMS: dict[str, Callable[[Mechanism, int], float]] = {
    "mean of an exponential target (best 1.00), epsilon 3": exponential,
    "probability where 30 % are positive (best 0.30), epsilon 1": no_signal,
}


def small(seeds: int = SEEDS) -> None:
    """Run what has no result yet."""
    for problem, run in PROBLEMS.items():
        for name, mechanism in MECHANISMS.items():
            for seed in range(seeds):
                known, key = _known(), f"{problem} / {name} / {seed}"
                if key not in known:
                    with warnings.catch_warnings(action="ignore"):
                        known[key] = round(run(mechanism, seed), 4)
                    (folder() / FILE).write_text(json.dumps(known, indent=1) + "\n")
                    print(key, known[key], flush=True)


def _known() -> dict[str, float]:
    file = folder() / FILE
    return dict(json.loads(file.read_text())) if file.exists() else {}


def small_table() -> str:
    known = _known()
    rows = []
    for name in MECHANISMS:
        cells = []
        for problem in PROBLEMS:
            values = [known[key] for seed in range(SEEDS) if (key := f"{problem} / {name} / {seed}") in known]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread} ({len(values)})" if values else "-")
        rows.append([name, *cells])
    return table(["mechanism", *PROBLEMS], rows)


# --- MNIST ----------------------------------------------------------------------------------------------------------------
_EXACT: dict[str, Any] = {"mechanism": "gradient", "repeats": None, "batch_size": 1_000, "learning_rate": 0.15}
_FOLLOWING = {"mechanism_options": {"max_grad_norm": "adaptive"}}
WAYS: dict[str, dict[str, Any]] = {
    "hidden-direction (`dpulr train`)": {},
    "hidden-direction, `--temperature 0.02`": {"temperature": 0.02},
    'hidden-direction, `kappa="adaptive"`': {"mechanism_options": {"kappa": "adaptive"}},
    "gradient": _EXACT,
    'gradient, `max_grad_norm="adaptive"`': {**_EXACT, **_FOLLOWING},
    "gradient, `--temperature 0.02`": {**_EXACT, "temperature": 0.02},
    "DP-SGD (Opacus)": {**_EXACT, "mechanism": "opacus"},
}


def mnist_run(way: str, seed: int) -> Run:
    return Run(Settings(model="mlp", seed=seed, **WAYS[way]), "opacus" if "Opacus" in way else "dpulr")


def mnist_runs(seed: int) -> list[Run]:
    """`dpulr train` as it is, but for what the way says: MNIST, epsilon 1, 10 epochs."""
    return [mnist_run(way, seed) for way in WAYS]


def mnist_table(seeds: int = SEEDS) -> str:
    figures = {"accuracy": ("accuracy (%)", 100.0, 2), "loss": ("loss", 1.0, 3), "brier": ("Brier score", 1.0, 3)}
    figures["calibration_error"] = ("calibration error", 1.0, 3)
    rows = []
    for way in WAYS:
        results = found(mnist_run(way, seed) for seed in range(seeds))
        rows.append([way, *(_cell(results, f"test_{name}", *how[1:]) for name, how in figures.items())])
    return table(["MNIST, epsilon 1, 10 epochs", *(head for head, *_ in figures.values())], rows)


def _cell(results: list[Result], name: str, factor: float, digits: int) -> str:
    values = [factor * result[name] for result in results if name in result]
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread} ({len(values)})"


def parts() -> dict[str, str]:
    """The tables of docs/losses.md."""
    return {"small-problems": small_table(), "mnist-losses": mnist_table()}
