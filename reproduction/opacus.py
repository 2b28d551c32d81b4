"""DP-SGD by Opacus: one loop for the tables, the paper's evaluation, the audit's control and the benchmarks."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dpulr
from dpulr import accounting
from dpulr.accounting.events import Charge, GaussianRelease
from dpulr.plan import Plan, Request, certified_plan
from dpulr.runs import loading
from dpulr.runs.settings import Settings
from dpulr.scores import score
from reproduction.run import Progress

Mode = Literal["ghost", "hooks"]
LossFunction = Callable[[Tensor, Tensor], Tensor]


class Batches(Dataset[Any]):
    """A data set in memory that hands out whole batches: one indexing a tensor, where a loader would stack record by record."""

    def __init__(self, dataset: Any) -> None:
        records = dataset[range(len(dataset))] if isinstance(dataset, TensorDataset) else dataset.dataset[list(dataset.indices)]
        self.inputs, self.targets = records

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: Any) -> Any:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        rows = torch.tensor(indices, dtype=torch.int64)
        return [self.inputs.index_select(0, rows), self.targets.index_select(0, rows)]


def private_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Any,
    *,
    batch_size: int,
    noise_multiplier: float,
    max_grad_norm: float = 1.0,
    loss_fn: LossFunction | None = None,
    mode: Mode = "ghost",
    shuffled: bool = False,
    physical_batch: int | None = None,
) -> Iterator[None]:
    """Take a step of DP-SGD for each item, without end. After it the parameters' `grad` is what was released.

    Batches are Poisson samples, or `shuffled` ones of a fixed size, for which nothing is proved. `mode` is how Opacus clips: ghost
    clipping, or hooks, which are faster for convolutions. `physical_batch` computes a batch in parts of at most so many records.
    """
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    criterion: Any = loss_fn or nn.CrossEntropyLoss()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped, private, *given, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=DataLoader(Batches(data), batch_size=batch_size, shuffle=shuffled, drop_last=shuffled, collate_fn=list),
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            grad_sample_mode=mode,
            poisson_sampling=not shuffled,
        )
    criterion = given[0] if given else criterion
    parted: Any = nullcontext(loader)
    if physical_batch is not None:
        parted = BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical_batch, optimizer=private)
    with parted as batches:
        while True:
            for inputs, targets in batches:
                private.zero_grad()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    criterion(wrapped(inputs), targets).backward()
                private.step()
                if not private._is_last_step_skipped:  # else it was a part of a batch that goes on
                    yield


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, batch_size: int) -> Iterator[None]:
    """The same without privacy: shuffled batches, no clipping, no noise."""
    loader = DataLoader(Batches(data), batch_size=batch_size, shuffle=True, drop_last=True, collate_fn=list)
    criterion = nn.CrossEntropyLoss()
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()
            yield


def plan_of(settings: Settings, records: int) -> Plan:
    """DP-SGD at the target epsilon: the noise is calibrated by our accountant, so that both sides spend the same."""
    request = Request(
        records=records,
        batch_size=settings.size,
        epochs=settings.epochs if settings.steps is None else None,
        steps=settings.steps,
        target_epsilon=settings.target_epsilon,
        target_delta=settings.target_delta,
    )
    return certified_plan(request, GaussianRelease)


def train(settings: Settings, progress: Progress) -> dict[str, Any]:
    """DP-SGD at the target epsilon."""
    train_set, test_set = loading.load_data(settings)
    plan = plan_of(settings, len(train_set))
    steps, noise = plan.steps, plan.noise_multiplier
    assert plan.step is not None
    torch.manual_seed(settings.seed)
    model = loading.make_model(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.rate, momentum=settings.momentum)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    each_step = private_steps(
        model, optimizer, train_set, batch_size=settings.size, noise_multiplier=noise, **settings.mechanism_options
    )
    started = time.perf_counter()
    for taken in range(1, steps + 1):
        next(each_step)
        schedule.step()
        progress(taken / steps)
    seconds = time.perf_counter() - started
    return {
        "guarantee": "certified",
        "epsilon": accounting.epsilon([Charge(plan.step, steps)], plan.target_delta),
        "delta": settings.target_delta,
        "steps": steps,
        "sample_rate": plan.sample_rate,
        "noise_multiplier": noise,
        **score(model, test_set).figures(),
        "seconds": round(seconds, 2),
        "version": dpulr.__version__,
        "torch": torch.__version__,
        "opacus": version("opacus"),
    }
