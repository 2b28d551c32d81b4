"""How a run is evaluated: on public held-out data, on private ones with noise and for a share of epsilon, or not at all."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpulr.accounting import Ledger
from dpulr.errors import DataError, InvalidArgument, UsageError
from dpulr.model.losses import LossFunction, zero_one
from dpulr.private_scores import HeldOut
from dpulr.runs.loading import class_names, is_table, table_schema, users_function
from dpulr.runs.settings import Settings
from dpulr.scores import mean_loss, score

_LOSSES: dict[str, LossFunction] = {
    "cross-entropy": nn.CrossEntropyLoss(reduction="none"),
    "squared": lambda output, target: _differences(output, target).square().mean(1),
    "absolute": lambda output, target: _differences(output, target).abs().mean(1),
    "zero-one": zero_one,
}


class Evaluation(Protocol):
    """What a run asks: does it work at all; then figures, by the names that results have for them."""

    def check(self, model: nn.Module) -> None: ...
    def figures(self, model: nn.Module) -> dict[str, Any]: ...
    def details(self, model: nn.Module) -> dict[str, Any]: ...


def make_loss(settings: Settings) -> LossFunction:
    """The loss function of a run: one value per record."""
    name = settings.loss
    if name == "auto":
        numbers = is_table(settings) and not table_schema(settings).target.categories
        name = "squared" if numbers else "cross-entropy"
    if ":" in name:
        return users_function(name)
    if name not in _LOSSES:
        raise UsageError(f"loss is {name!r}; it must be auto, one of {', '.join(_LOSSES)}, or package.module:function.")
    return _LOSSES[name]


def make_evaluation(settings: Settings, test: Any, ledger: Ledger | None = None) -> Evaluation:
    """`ledger` is what noisy evaluations are charged to."""
    if settings.evaluations == 0:
        return _Never()
    if test is None:
        raise UsageError(
            f"{settings.dataset} has no test part. Give --test FILE (public records), --holdout N (the last N records; they count "
            "as public, unless you give --evaluation-epsilon), or --evaluations 0."
        )
    if settings.evaluation_epsilon is not None:
        if settings.unit is not None:
            raise UsageError("--evaluation-epsilon protects records, and with --unit a person may have several: leave it out.")
        return _Noisy(test, settings.evaluation_epsilon, settings.evaluations, ledger)
    return _Public(test, make_loss(settings), class_names(settings))


class _Never:
    def check(self, model: nn.Module) -> None:
        return None

    def figures(self, model: nn.Module) -> dict[str, Any]:
        return {}

    details = figures


class _Public:
    """Accuracy, loss and calibration; for losses that are not of classes their mean alone."""

    def __init__(self, test: Any, loss: LossFunction, names: list[str]) -> None:
        self._test, self._loss, self._names = test, loss, names

    def check(self, model: nn.Module) -> None:
        """A test part that can't be evaluated must fail before the first charge, not after it."""
        try:
            self.figures(model)
        except Exception as problem:
            text = str(problem) if isinstance(problem, DataError | InvalidArgument) else f"{type(problem).__name__}: {problem}"
            numbers = " Here: --loss squared." if isinstance(problem, InvalidArgument) else ""
            raise UsageError(f"the test part can't be evaluated, and nothing was charged: {text}{numbers}") from problem

    def figures(self, model: nn.Module) -> dict[str, Any]:
        if self._of_classes():
            return dict(score(model, self._test).figures())
        return {"test_loss": mean_loss(model, self._test, self._loss)}

    def details(self, model: nn.Module) -> dict[str, Any]:
        """Class by class."""
        return {"test_classes": score(model, self._test).classes(self._names)} if self._of_classes() else {}

    def _of_classes(self) -> bool:
        return isinstance(self._loss, nn.CrossEntropyLoss) or self._loss is zero_one


class _Noisy:
    """So many accuracies, which share an epsilon. Those of earlier processes of the run count."""

    def __init__(self, test: Any, epsilon: float, times: int, ledger: Ledger | None) -> None:
        self._test, self._each, self._times, self._ledger = test, epsilon / times, times, ledger

    def check(self, model: nn.Module) -> None:
        HeldOut(model, self._test)

    def figures(self, model: nn.Module) -> dict[str, Any]:
        assert self._ledger is not None
        if len(self._ledger.evaluations) >= self._times:
            return {}
        held_out = HeldOut(model, self._test)
        self._ledger.charge_evaluation(self._each)
        return {"test_accuracy": held_out.noisy_accuracy(self._each), "test_noise": 1 / self._each / len(self._test)}

    def details(self, model: nn.Module) -> dict[str, Any]:
        return {}


def _differences(output: Tensor, target: Tensor) -> Tensor:
    """(records, outputs); a target of one number per record stands for one output."""
    flat = output.flatten(1)
    return flat - target.to(flat.dtype).reshape(len(flat), -1).expand_as(flat) if flat.numel() else flat


def make_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """Those of torch, with their own defaults but for the rate and the momentum of SGD."""
    rate = 1.0 if isinstance(settings.learning_rate, str) else settings.learning_rate  # it is set before every step
    if settings.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=settings.momentum)
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}
    optimizer: torch.optim.Optimizer = kinds[settings.optimizer](model.parameters(), lr=rate)
    return optimizer
