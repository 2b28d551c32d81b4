"""One run of the paper's evaluation: its DP-ULR, its DP-SGD (by Opacus), plain ULR and plain SGD, in one harness.

What the paper states is fixed: cross-entropy, GELU, C = 1, 25 epochs, the learning rate times 0.85 every 10 epochs, Adam at 0.01
for DP-ULR, SGD at 0.1 for DP-SGD, shuffled batches of a fixed size, extra noise where the covariance lacks rank. What it does
not state is a field here: the repeats K and the standard deviation of the injected noise.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

import dpulr
from dpulr.accounting.events import Charge, PaperRelease, SampledStep
from dpulr.mechanisms import Paper
from dpulr.paper.nominal import nominal_of
from dpulr.runs.training import split
from reproduction.opacus import Batches

Method = Literal["dp-ulr", "dp-sgd", "ulr", "sgd"]
DELTA = 1e-5
LEARNING_RATES = {"dp-ulr": 0.01, "ulr": 0.01, "dp-sgd": 0.1, "sgd": 0.1}
DECAY, DECAY_EPOCHS = 0.85, 10
UNIT = (0.1, 0.3)  # MNIST's pixels in [0, 1]
AS_LOADED = (0.0, 1.0)


@dataclass(frozen=True)
class PaperRun:
    """Settings of one run. `holdout` takes the last so many training records as test set, for tuning; `rescale` = (a, b) turns
    every input x, as loaded, into a + b x; `start` says whose initial weights the MLP has."""

    method: Method
    batch_size: int
    target_std: float = 0.0
    epochs: int = 25
    seed: int = 0
    dataset: str = "mnist"
    model: str = "small"
    repeats: int = 16
    sigma: float = 1.0
    holdout: int = 0
    rescale: tuple[float, float] = UNIT
    start: Literal["he", "torch"] = "he"

    def describe(self) -> dict[str, Any]:
        """As plain values; what the method does not use is left out."""
        values = {**asdict(self), "learning_rate": LEARNING_RATES[self.method]}
        if self.method in ("dp-sgd", "sgd"):
            del values["repeats"], values["sigma"]
        if self.start == "he":
            del values["start"]  # as in results from before there was a choice
        return values


Progress = Callable[[float], None]


def run(setting: PaperRun, progress: Progress | None = None) -> dict[str, Any]:
    """Train, with the accuracy after each epoch. Accuracies on training records are not covered by any guarantee."""
    train, test = split(setting.dataset, setting.holdout, setting.rescale)
    model = make_model(setting)
    per_epoch = len(train) // setting.batch_size
    steps = _opacus_steps if setting.method in ("dp-sgd", "sgd") else _engine_steps
    curve, seconds, taken, started = [], 0.0, 0, time.perf_counter()
    for rate in steps(setting, model, train):
        taken += 1
        rate(LEARNING_RATES[setting.method] * DECAY ** (taken // per_epoch // DECAY_EPOCHS))
        if progress is not None and taken % max(1, per_epoch // 50) == 0:
            progress(taken / (per_epoch * setting.epochs))
        if taken % per_epoch == 0:
            seconds += time.perf_counter() - started
            accuracies = {"train_accuracy": dpulr.evaluate(model, train), "test_accuracy": dpulr.evaluate(model, test)}
            length = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
            curve.append({"epoch": taken // per_epoch, **accuracies, "parameter_norm": round(length, 2)})
            started = time.perf_counter()
    nominal = None
    if setting.target_std > 0:
        step = SampledStep(PaperRelease(setting.target_std), setting.batch_size / len(train))
        nominal = nominal_of([Charge(step, taken)], DELTA)
    return {
        "recipe": setting.describe(),
        "guarantee": "none",
        "epsilon": None,
        "nominal_epsilon": nominal,
        "delta": DELTA,
        "steps": taken,
        "sample_rate": setting.batch_size / len(train),
        "test_accuracy": curve[-1]["test_accuracy"],
        "best_accuracy": max(point["test_accuracy"] for point in curve),
        "train_accuracy": curve[-1]["train_accuracy"],
        "curve": curve,
        "seconds": round(seconds, 2),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": dpulr.__version__,
        "torch": torch.__version__,
        **({"opacus": version("opacus")} if setting.method == "dp-sgd" else {}),
    }


def make_model(setting: PaperRun) -> nn.Module:
    if setting.model == "resnet5":
        return dpulr.models.resnet5(seed=setting.seed)
    model = dpulr.models.mlp(dpulr.models.MLP_SIZES[setting.model], seed=setting.seed)
    if setting.start == "torch":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setting.seed)
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.reset_parameters()
    return model


def _engine_steps(setting: PaperRun, model: nn.Module, train: Any) -> Iterator[Callable[[float], None]]:
    """DP-ULR and plain ULR by the engine. After each step it hands out what sets the learning rate of the next."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATES[setting.method])
    mechanism = Paper(
        target_std=setting.target_std,
        repeats=setting.repeats,
        sigma=setting.sigma,
        max_grad_norm=1.0,  # also without noise: unclipped, the heavy tails of the losses end training within two epochs
        remedy="extra-noise",
    )
    engine = dpulr.PrivacyEngine(
        model,
        optimizer,
        train,
        nn.CrossEntropyLoss(reduction="none"),
        mechanism=mechanism,
        batch_size=setting.batch_size,
        steps=len(train) // setting.batch_size * setting.epochs,
        sampling="shuffle",
        seed=setting.seed,
    )
    for batch in engine.batches():
        engine.step(*batch)
        yield _rate_of(optimizer)


def _opacus_steps(setting: PaperRun, model: nn.Module, train: Any) -> Iterator[Callable[[float], None]]:
    """DP-SGD by Opacus with batches of a fixed size, as the paper reports it; without noise, plain SGD."""
    from opacus import PrivacyEngine

    torch.manual_seed(setting.seed)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LEARNING_RATES[setting.method])
    loader: Any = DataLoader(Batches(train), batch_size=setting.batch_size, shuffle=True, drop_last=True, collate_fn=list)
    wrapped: Any = model
    stepper, criterion = optimizer, nn.CrossEntropyLoss()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if setting.method == "dp-sgd":
            images = setting.model == "resnet5"  # ghost clipping makes a matrix of positions x positions: not for convolutions
            wrapped, stepper, *more, loader = PrivacyEngine().make_private(
                module=model,
                optimizer=optimizer,
                criterion=criterion,
                data_loader=loader,
                noise_multiplier=setting.target_std,
                max_grad_norm=1.0,
                grad_sample_mode="hooks" if images else "ghost",
                poisson_sampling=False,
            )
            criterion = more[0] if more else criterion
        for _ in range(setting.epochs):
            for inputs, targets in loader:
                stepper.zero_grad()
                criterion(wrapped(inputs), targets).backward()
                stepper.step()
                yield _rate_of(optimizer)


def _rate_of(optimizer: torch.optim.Optimizer) -> Callable[[float], None]:
    def put(rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate

    return put
