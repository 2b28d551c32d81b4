"""The paper's figures with our data: the optimization dynamics on MNIST, and training on CIFAR-10."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpulr import accounting
from dpulr.accounting.events import Charge, SampledStep
from dpulr.paper.nominal import PaperRelease, nominal_of
from reproduction.certified import DPSGD, EPOCHS, HIDDEN, RECORDS, SEEDS, comparisons, results_of
from reproduction.paper_numbers import TABLE1
from reproduction.paper_runs import DELTA, method_of
from reproduction.paper_tables import CIFAR, cifar_runs, table1_runs
from reproduction.results_file import found, mean_and_spread

NOISES = (1.0, 4.0, 8.0)
OURS, THEIRS, GREY, EPSILON = "#1f6fb4", "#c8553d", "#8a8a8a", "#555555"


def dynamics(seed: int = 0, epochs: int = EPOCHS, **changes: Any) -> list[dict[str, Any]]:
    """A panel for each sample rate and noise: accuracies and three epsilons by epoch."""
    panels = []
    for batch in TABLE1:
        for sigma0 in NOISES:
            results = found(table1_runs(batch, sigma0, seed, epochs, **changes))
            curves = {method_of(result["run"]): result["curve"] for result in results}
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
        for method, color in (("dp-ulr", OURS), ("dp-sgd", THEIRS)):
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


def draw_cifar(path: Path, seed: int = 0, epochs: int = EPOCHS, **changes: Any) -> None:
    plt = _pyplot()
    figure, axes = plt.subplots(1, len(CIFAR), figsize=(15, 4), layout="constrained", sharey=True)
    for axis, label in zip(axes, CIFAR, strict=True):
        results = found(cifar_runs(label, seed, epochs, **changes))
        for result in results:
            _accuracies(axis, result["curve"], method_of(result["run"]), THEIRS if label == "dp-sgd" else OURS)
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


def draw_certified(dataset: str, path: Path) -> None:
    """Accuracy against epsilon, mean and spread over the seeds."""
    plt = _pyplot()
    chosen = comparisons()[dataset]
    figure, axis = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    labels = {HIDDEN: "hidden-direction (forward passes only)", DPSGD: "DP-SGD, Opacus (backpropagation)"}
    for method, color, marker in ((HIDDEN, OURS, "o"), (DPSGD, THEIRS, "s")):
        results = {epsilon: results_of(dataset, method, epsilon, SEEDS) for epsilon in sorted(chosen.epsilons)}
        points = [(epsilon, *mean_and_spread(found)) for epsilon, found in results.items() if found]
        if points:
            epsilons, means, spreads = zip(*points, strict=True)
            style: dict[str, Any] = {"marker": marker, "markersize": 4, "capsize": 2, "linewidth": 1.4}
            axis.errorbar(epsilons, means, spreads, color=color, label=labels[method], **style)
    axis.set_xscale("log")
    if dataset == "mnist":
        best = [max(columns[1::2]) for row in TABLE1.values() for columns in row.values()]
        axis.plot(chosen.epsilons, best, "x", color=GREY, label="the better of the paper's two columns")
    else:
        axis.set_xticks(chosen.epsilons, [f"{epsilon:g}" for epsilon in chosen.epsilons])
        axis.minorticks_off()
    axis.set_xlabel("epsilon (delta = 1e-5)")
    axis.set_ylabel("test accuracy (%)")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, loc="lower right")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.savefig(path, dpi=130)
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
