"""The paper's evaluation: its DP-ULR, its DP-SGD (by Opacus), plain ULR and plain SGD, in one loop.

What the paper states is fixed: cross-entropy, GELU, C = 1, 25 epochs, the learning rate times 0.85 every 10 epochs, Adam at 0.01
for DP-ULR, SGD at 0.1 for DP-SGD, shuffled batches of a fixed size, extra noise where the covariance lacks rank. What it does
not state is a setting here: the repeats K and the standard deviation of the injected noise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any, Literal

import torch
from torch import nn

import dpulr
from dpulr.accounting.events import Charge, SampledStep
from dpulr.mechanisms import Gradient, Mechanism
from dpulr.paper.mechanism import Paper
from dpulr.paper.nominal import PaperRelease, nominal_of
from dpulr.runs import loading
from dpulr.runs.settings import Settings
from reproduction.opacus import plain_steps, private_steps
from reproduction.run import Progress, Run

Method = Literal["dp-ulr", "dp-sgd", "ulr", "sgd", "exact"]
DELTA = 1e-5
DECAY, DECAY_EPOCHS = 0.85, 10
REPEATS, SIGMA = 16, 1.0  # ours: chosen on the last 10,000 training records
UNIT = "reproduction.datasets:mnist_unit"


def paper_run(method: Method, batch_size: int, sigma0: float = 0.0, **changes: Any) -> Run:
    """The settings of one run. `sigma` and `remedy` are options of DP-ULR; everything else is a field of `Settings`.

    "exact" is not the paper's: what DP-ULR estimates, without an error, under the same optimizer, with noise of sigma0 times the
    bound of each layer (`clip`, 1 if not given).
    """
    forward = method in ("dp-ulr", "ulr")
    options = {"sigma": changes.pop("sigma", SIGMA), "remedy": changes.pop("remedy", "extra-noise")} if forward else {}
    if method == "exact":
        options = {"clip": changes.pop("clip", 1.0)}
    if method == "dp-sgd" and changes.get("model") == "resnet5":
        options["mode"] = "hooks"  # ghost clipping makes a matrix of positions x positions: not for convolutions
    values: dict[str, Any] = {
        "dataset": UNIT,
        "model": "mlp",
        "mechanism": {"dp-sgd": "opacus", "sgd": "sgd", "exact": "gradient"}.get(method, "paper"),
        "repeats": changes.pop("repeats", REPEATS) if forward else None,
        "batch_size": batch_size,
        "epochs": 25,
        "target_epsilon": None,
        "noise_multiplier": sigma0,
        "learning_rate": 0.01 if forward or method == "exact" else 0.1,
        "momentum": 0.0,
        "schedule": "constant",
        "sampling": "shuffle",
        "mechanism_options": options,
    }
    for of_dp_ulr in ("repeats", "sigma", "remedy"):
        changes.pop(of_dp_ulr, None)
    return Run(Settings(**(values | changes)), "paper")


def method_of(description: Mapping[str, Any]) -> Method:
    if description["mechanism"] == "paper":
        return "dp-ulr" if description["noise_multiplier"] else "ulr"
    names: dict[str, Method] = {"opacus": "dp-sgd", "gradient": "exact"}
    return names.get(description["mechanism"], "sgd")


def train(settings: Settings, progress: Progress) -> dict[str, Any]:
    """Train, with the accuracy after each epoch. Accuracies on training records are not covered by any guarantee.

    Batches have a fixed size: an epoch is as many whole ones as there are.
    """
    train_set, test_set = loading.load_data(settings)
    model = loading.make_model(settings)
    per_epoch, epochs = len(train_set) // settings.size, round(settings.epochs)
    optimizer, each_step = _steps(settings, model, train_set, per_epoch * epochs)
    curve, seconds, taken, started = [], 0.0, 0, time.perf_counter()
    for taken in range(1, per_epoch * epochs + 1):
        next(each_step)
        for group in optimizer.param_groups:
            group["lr"] = settings.rate * DECAY ** (taken // per_epoch // DECAY_EPOCHS)
        progress(taken / (per_epoch * epochs))
        if taken % per_epoch == 0:
            seconds += time.perf_counter() - started
            accuracies = {"train_accuracy": dpulr.evaluate(model, train_set), "test_accuracy": dpulr.evaluate(model, test_set)}
            length = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
            curve.append({"epoch": taken // per_epoch, **accuracies, "parameter_norm": round(length, 2)})
            started = time.perf_counter()
    rate, nominal = settings.size / len(train_set), None
    if settings.noise_multiplier:
        nominal = nominal_of([Charge(SampledStep(PaperRelease(settings.noise_multiplier), rate), taken)], DELTA)
    return {
        "guarantee": "none",
        "epsilon": None,
        "nominal_epsilon": nominal,
        "delta": DELTA,
        "steps": taken,
        "sample_rate": rate,
        "test_accuracy": curve[-1]["test_accuracy"],
        "best_accuracy": max(point["test_accuracy"] for point in curve),
        "train_accuracy": curve[-1]["train_accuracy"],
        "curve": curve,
        "seconds": round(seconds, 2),
        "version": dpulr.__version__,
        "torch": torch.__version__,
        **({"opacus": version("opacus")} if settings.mechanism == "opacus" else {}),
    }


def _steps(settings: Settings, model: nn.Module, data: Any, steps: int) -> tuple[torch.optim.Optimizer, Iterator[None]]:
    """The optimizer, and what takes one step for each item."""
    if settings.mechanism in ("paper", "gradient"):
        adam = torch.optim.Adam(model.parameters(), lr=settings.rate)
        return adam, _engine_steps(settings, model, adam, data, steps)
    torch.manual_seed(settings.seed)
    sgd = torch.optim.SGD(model.parameters(), lr=settings.rate)
    if settings.mechanism == "sgd":
        return sgd, plain_steps(model, sgd, data, settings.size)
    noise = settings.noise_multiplier
    assert noise is not None
    shared: dict[str, Any] = {"batch_size": settings.size, "noise_multiplier": noise, "shuffled": True}
    return sgd, private_steps(model, sgd, data, **shared, **settings.mechanism_options)


def _engine_steps(settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, steps: int) -> Iterator[None]:
    """DP-ULR, or what it estimates, by the engine.

    Without noise plain ULR, clipped all the same: the heavy tails of the losses end it otherwise.
    """
    noise: dict[str, Any] = {}
    mechanism: Mechanism
    if settings.mechanism == "paper":
        repeats = settings.repeats if isinstance(settings.repeats, int) else REPEATS
        mechanism = Paper(target_std=settings.noise_multiplier, repeats=repeats, **settings.mechanism_options)
    else:
        layers = sum(isinstance(module, nn.Linear) for module in model.modules())
        joint = math.sqrt(layers)  # the bounds of all layers together, in bounds of one
        mechanism = Gradient(max_grad_norm=joint * settings.mechanism_options["clip"], clipping="per-layer")
        noise = {"noise_multiplier": (settings.noise_multiplier or 0.0) / joint}
    engine = dpulr.PrivacyEngine(
        model,
        optimizer,
        data,
        nn.CrossEntropyLoss(reduction="none"),
        mechanism=mechanism,
        batch_size=settings.size,
        steps=steps,
        sampling="shuffle",
        seed=settings.seed,
        **noise,
    )
    for batch in engine.batches():
        engine.step(*batch)
        yield
