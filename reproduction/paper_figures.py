"""The paper's figures with our data: the optimization dynamics on MNIST, and training on CIFAR-10."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpulr import accounting
from dpulr.accounting.events import Charge, PaperRelease, SampledStep
from dpulr.paper.nominal import nominal_of
from reproduction.paper_numbers import TABLE1
from reproduction.paper_runs import DELTA, PaperRun
from reproduction.paper_tables import CIFAR, cifar_runs, table1_runs
from reproduction.results_file import found

NOISES = (1.0, 4.0, 8.0)
RECORDS = 60_000
ULR, SGD, EPSILON = "#1f6fb4", "#c8553d", "#555555"


def dynamics_runs(seed: int, epochs: int, **more: Any) -> list[PaperRun]:
    """The runs of the table that the figure shows."""
    return [run for batch in TABLE1 for sigma0 in NOISES for run in table1_runs(batch, sigma0, seed, epochs, **more)]


def dynamics(file: Path, seed: int, epochs: int, **more: Any) -> list[dict[str, Any]]:
    """A panel for each sample rate and noise: accuracies and three epsilons by epoch."""
    panels = []
    for batch in TABLE1:
        for sigma0 in NOISES:
            runs = {run.method: found([run], file) for run in table1_runs(batch, sigma0, seed, epochs, **more)}
            curves = {method: results[0]["curve"] for method, results in runs.items() if results}
            longest = max((len(curve) for curve in curves.values()), default=0)
            rows = [_epsilons(batch, sigma0, epoch) for epoch in range(1, longest + 1)]
            panels.append({"batch_size": batch, "target_std": sigma0, "seed": seed, "curves": curves, "epsilons": rows})
    return panels


def _epsilons(batch: int, sigma0: float, epoch: int) -> dict[str, float]:
    """The paper's formula without and with rejection at N_B = qN, as Algorithm 1 has it; and what the Gaussian mechanism costs."""
    per_epoch = math.ceil(RECORDS / batch)
    rate, steps = 1 / per_epoch, epoch * per_epoch
    plain = nominal_of([Charge(SampledStep(PaperRelease(sigma0), rate), steps)], DELTA)
    rejecting = SampledStep(PaperRelease(sigma0), rate, int(rate * RECORDS + 1e-9), RECORDS)
    redrawn = nominal_of([Charge(rejecting, steps)], DELTA)
    certified = accounting.gaussian_epsilon(noise_multiplier=sigma0, sample_rate=rate, steps=steps, delta=DELTA)
    assert plain is not None
    assert redrawn is not None
    return {"epoch": epoch, "nominal": plain, "nominal_with_rejection": redrawn, "gaussian_certified": certified}


def draw_dynamics(panels: Sequence[dict[str, Any]], path: Path) -> None:
    plt = _pyplot()
    figure, axes = plt.subplots(3, 3, figsize=(13, 10), layout="constrained", sharex=True)
    for axis, panel in zip(axes.flat, panels, strict=True):
        for method, color in (("dp-ulr", ULR), ("dp-sgd", SGD)):
            _accuracies(axis, panel["curves"].get(method, []), method, color)
        axis.set_ylim(0, 100)
        axis.set_title(f"batch {panel['batch_size']}, sigma0 = {panel['target_std']:g}", fontsize=10)
        right = axis.twinx()
        epochs = [row["epoch"] for row in panel["epsilons"]]
        for name, style in (("nominal", "-"), ("nominal_with_rejection", ":"), ("gaussian_certified", "--")):
            right.plot(epochs, [row[name] for row in panel["epsilons"]], style, color=EPSILON, linewidth=1)
        right.set_ylim(0)
        right.tick_params(labelsize=8, colors=EPSILON)
    for axis in axes[-1]:
        axis.set_xlabel("epoch")
    for axis in axes[:, 0]:
        axis.set_ylabel("accuracy, %")
    axes[0][0].legend(loc="lower right", fontsize=8)
    figure.suptitle(
        "Accuracy (left scale; dotted: training) and epsilon at delta 1e-5 (right scale, grey): the paper's formula without\n"
        "(solid) and with rejection at N_B = qN (dotted), both nominal, no guarantee; dashed: the Gaussian mechanism with joint\n"
        "clipping and Poisson batches at the same noise, certified",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_cifar(file: Path, seed: int, epochs: int, path: Path, **more: Any) -> None:
    plt = _pyplot()
    labels = ["dp-sgd", *CIFAR]
    figure, axes = plt.subplots(1, len(labels), figsize=(15, 4), layout="constrained", sharey=True)
    for axis, label in zip(axes, labels, strict=True):
        results = found(cifar_runs(label, seed, epochs, **more), file)
        for result in results:
            _accuracies(axis, result["curve"], result["recipe"]["method"], SGD if label == "dp-sgd" else ULR)
            axis.set_title(f"{_panel(label)}\nnominal epsilon {result['nominal_epsilon']:.2f}", fontsize=10)
        if not results:
            axis.set_title(f"{_panel(label)}\nnot run", fontsize=10)
        axis.set_xlabel("epoch")
        axis.set_xlim(0, epochs + 0.5)
        axis.locator_params(axis="x", integer=True)
        axis.set_ylim(0, 60)
    axes[0].set_ylabel("accuracy, %")
    figure.suptitle("ResNet-5 on CIFAR-10: accuracy by epoch (dotted: training). Epsilons are nominal: no guarantee", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(label: str) -> str:
    if label == "dp-sgd":
        return "DP-SGD, batch 64, noise 1"
    inverse, sigma0 = label.split(":")
    return f"DP-ULR, q = 1/{inverse}, sigma0 = {sigma0}"


def _accuracies(axis: Any, curve: Sequence[dict[str, float]], label: str, color: str) -> None:
    if curve:
        epochs = [point["epoch"] for point in curve]
        axis.plot(epochs, [100 * point["test_accuracy"] for point in curve], "o-", markersize=3, color=color, label=label)
        axis.plot(epochs, [100 * point["train_accuracy"] for point in curve], ":", color=color)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
