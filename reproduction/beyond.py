"""Networks that backpropagation can't train: every mechanism on each, at the same epsilon and with about as many forward passes.

MNIST and Fashion-MNIST, epsilon 3, delta 1e-5. Each mechanism is tried with the learning rates of RATES on the last 10,000 training
records with seed 0, as long as it is run later (zeroth-order, which is slow, for 3 epochs or 1, with its own rates). With its best
rate it is run with all seeds on the test set. Fashion-MNIST has the rates of MNIST. Choosing rates is not covered by epsilon.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dpulr import HiddenDirection, models
from dpulr.mechanisms.moves import RADII, explained_shares
from dpulr.model.prepare import prepare
from dpulr.runs import loading, training
from dpulr.runs.settings import Settings
from reproduction import hybrid
from reproduction.certified import accuracy
from reproduction.pages import table
from reproduction.results_file import found, mean_and_spread
from reproduction.run import Progress, Result, Run
from reproduction.unbackpropagated import binarised

RATES, SEEDS = (0.5, 1.0, 2.0), 3
ZEROTH_RATES = (2.0, 8.0, 32.0)
HIDDEN, HYBRID, GAUSSIAN, ZEROTH, STAND_IN = "hidden-direction", "hybrid", "gaussian", "zeroth-order", "stand-in"
NAMES = {
    HIDDEN: "hidden-direction",
    HYBRID: "hidden-direction, exact behind the last step",
    GAUSSIAN: "gaussian",
    ZEROTH: "zeroth-order",
    STAND_IN: "DP-SGD with a surrogate or straight-through gradient",
}


@dataclass(frozen=True)
class Row:
    """A model on a data set. `stand_in` is the same model with slopes that it does not have; None: nobody would try that."""

    about: str
    model: str
    repeats: int
    epochs: int
    stand_in: str | None = None
    dataset: str = "mnist"
    loss: str = "auto"
    methods: tuple[str, ...] = (HIDDEN, HYBRID, GAUSSIAN, ZEROTH, STAND_IN)
    batch_size: int = 1_000
    radius: float | str = "auto"  # of hidden directions
    zeroth_trial_epochs: int = 3
    rates_of: str | None = None  # the row whose learning rates it has; None: its own


_LARGE: dict[str, Any] = {"repeats": 8, "epochs": 12, "batch_size": 2_000, "zeroth_trial_epochs": 1}
_SPIKING = Row("leaky integrate-and-fire, 1,024 neurons, 5 time steps", "spiking", stand_in="spiking_surrogate", **_LARGE)
_BINARISED = Row("MLP with 2,048 signs", "binarised", stand_in="straight_through", **_LARGE)
ROWS = {
    "spiking": _SPIKING,
    "binarised": _BINARISED,
    "zero-one": Row("MLP, 0-1 loss", "counting", 8, 8, loss="zero-one", methods=(HIDDEN, ZEROTH), radius=3.0),
    "boxed": Row("an ONNX box between two layers", "boxed", 4, 3, methods=(HIDDEN, HYBRID, ZEROTH)),
    "unboxed": Row("the same in torch", "unboxed", 4, 3, methods=(HIDDEN,)),
    "fashion-spiking": replace(_SPIKING, dataset="fashion-mnist", rates_of="spiking"),
    "fashion-binarised": replace(_BINARISED, dataset="fashion-mnist", rates_of="binarised"),
}


def run(label: str, method: str, rate: float, seed: int, *, trial: bool = False) -> Run:
    row = ROWS[label]
    options: dict[str, Any] = {}
    repeats: int | None = row.repeats
    if method in (HIDDEN, HYBRID):
        options = {"radius": row.radius} | ({"exact": "auto"} if method == HYBRID else {})
    elif method == GAUSSIAN:
        options = {"estimator": "baseline", "sigma": 1.0, "subspace": 16}
    elif method == ZEROTH:  # two whole passes per direction, where the others have one from each of two layers
        options = {"radius": 1e-2}
    else:
        repeats = None
    model = row.stand_in or row.model if method == STAND_IN else row.model
    return Run(
        Settings(
            dataset=row.dataset,
            model=f"reproduction.unbackpropagated:{model}",
            mechanism={HYBRID: HIDDEN, STAND_IN: "gradient"}.get(method, method),
            repeats=repeats,
            batch_size=row.batch_size,
            epochs=row.zeroth_trial_epochs if trial and method == ZEROTH else row.epochs,
            target_epsilon=3.0,
            learning_rate=rate,
            momentum=0.9,
            loss=row.loss,
            holdout=10_000 if trial else 0,
            seed=seed,
            mechanism_options=options,
        ),
        "beyond",
    )


def tried(label: str, method: str) -> list[Run]:
    """What the learning rate is chosen by."""
    rates = ZEROTH_RATES if method == ZEROTH else RATES
    return [run(ROWS[label].rates_of or label, method, rate, 0, trial=True) for rate in rates]


def best_rate(label: str, method: str) -> float | None:
    results = found(tried(label, method))
    return max(results, key=lambda result: result["test_accuracy"])["run"]["learning_rate"] if results else None


def runs(label: str, method: str, seeds: int) -> list[Run]:
    rate = best_rate(label, method)
    return [] if rate is None else [run(label, method, rate, seed) for seed in range(seeds)]


def stages(labels: Sequence[str], seeds: int) -> Iterator[list[Run]]:
    """Row by row: the rates, then the runs. All rows with one seed before the next."""
    for seed in range(seeds):
        for label in labels:
            for method in _methods(label):
                if seed == 0:
                    yield tried(label, method)
                yield runs(label, method, seeds)[seed : seed + 1]


def _methods(label: str) -> list[str]:
    return [method for method in ROWS[label].methods if method != STAND_IN or ROWS[label].stand_in]


def train(settings: Settings, progress: Progress) -> Result:
    """A run, and beside it in the same process, what a plain forward pass of a batch takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        numbers = training.train_and_evaluate(settings, lambda taken, planned, _: progress(taken / planned))
    del numbers["settings"]
    model, (data, _) = loading.make_model(settings), loading.load_data(settings)
    batch = torch.stack([data[i][0] for i in range(settings.size)])
    with torch.inference_mode():
        model(batch)
        times = []
        for _ in range(9):
            started = time.process_time()
            model(batch)
            times.append(time.process_time() - started)
    step, plain = numbers["cpu_seconds"] / numbers["steps"], sorted(times)[len(times) // 2]
    return {**numbers, "step_seconds": round(step, 5), "plain_seconds": round(plain, 6)}


# --- as Markdown ----------------------------------------------------------------------------------------------------------
def markdown(labels: Sequence[str] = tuple(ROWS), seeds: int = SEEDS) -> str:
    """The table, as far as it has been run: accuracy in per cent, and a step's time over that of a plain forward pass."""
    lines, missing = [], []
    for label in labels:
        row = ROWS[label]
        for method in _methods(label):
            results = found(runs(label, method, seeds))
            if not results:
                missing.append(f"{method} on {label}")
                continue
            cells = [accuracy(results), f"{best_rate(label, method):g}", _cost(results)]
            lines.append([f"{row.about} ({row.dataset})", NAMES[method], *cells])
    if not lines:
        return "Not run yet."
    heads = ["model", "mechanism", "accuracy (%)", "learning rate", "step / plain pass"]
    left = f" Not run yet: {', '.join(missing)}." if missing else ""
    return f"{table(heads, lines)}\n\n{sentence(labels, seeds)}{left}"


def _cost(results: Sequence[Result]) -> str:
    ratios = [result["step_seconds"] / result["plain_seconds"] for result in results]
    return f"{sum(ratios) / len(ratios):.0f}" if ratios else "-"


def parts() -> dict[str, str]:
    """What docs/beyond-backprop.md has from the results."""
    return {"beyond": markdown(), "hybrid": hybrid.markdown()}


def draw(images: Path) -> None:
    """How much of the differences of the loss is linear in the direction, by the radius: the first layer of four models."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, model in {
        "MLP": models.mlp((784, 64, 10), seed=0),
        "spikes, threshold 1": models.spiking(seed=0),
        "spikes, threshold 10": models.spiking(seed=0, threshold=10.0),
        "signs": binarised(0, size=0.3),
    }.items():
        example = (torch.zeros(1, 1, 28, 28), torch.zeros(1, dtype=torch.int64))
        forward = prepare(model, torch.nn.CrossEntropyLoss(reduction="none"), example, torch.device("cpu"))
        settings = HiddenDirection(radius="auto")
        shares = sorted(zip(RADII, explained_shares(settings, forward)[0].tolist(), strict=True))
        chosen = settings.settled(forward).distances(2)[0]
        (line,) = axes.plot(*zip(*shares, strict=True), marker=".", label=f"{name}: radius {chosen:g}")
        axes.axvline(chosen, color=line.get_color(), linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="radius", ylabel="share that is linear in the direction", ylim=(0, 1.05))
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(images / "beyond-radius.png", dpi=150)
    plt.close(figure)


def sentence(labels: Sequence[str] = tuple(ROWS), seeds: int = SEEDS) -> str:
    """In how many of the rows that have been run forward passes with hidden directions are ahead of zeroth-order."""
    ahead = []
    for label in labels:
        scores = {m: mean_and_spread(results)[0] for m in _methods(label) if (results := found(runs(label, m, seeds)))}
        if ZEROTH in scores and (HIDDEN in scores or HYBRID in scores):
            ahead.append(max(scores.get(HIDDEN, 0.0), scores.get(HYBRID, 0.0)) > scores[ZEROTH])
    return f"hidden-direction, or its hybrid, is ahead of zeroth-order in {sum(ahead)} of {len(ahead)} rows."
