"""DP-SGD by Opacus in the harness of the other experiments: same data, model, schedule and accounting."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dpulr
from dpulr import accounting


@dataclass(frozen=True)
class OpacusDPSGD:
    """Exact gradients, clipped record by record, Poisson batches. `mode`: "ghost" clipping, or "hooks", faster for convolutions.

    `physical_batch` computes a batch in parts of at most so many records: the same steps, twice as fast where tensors are large.
    """

    max_grad_norm: float = 1.0
    mode: Literal["ghost", "hooks"] = "ghost"
    physical_batch: int | None = None
    name: ClassVar[str] = "dp-sgd (Opacus)"


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
        rows = torch.tensor(indices)
        return [self.inputs.index_select(0, rows), self.targets.index_select(0, rows)]


def run_opacus(recipe: Any, train: Any, test: Any) -> dict[str, Any]:
    """Train with DP-SGD at the recipe's epsilon. The noise is calibrated by our accountant, so that both sides spend the same."""
    import opacus
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    settings: OpacusDPSGD = recipe.mechanism
    rate = recipe.batch_size / len(train)
    steps = max(1, round(recipe.epochs / rate))
    noise = accounting.calibrate(target_epsilon=recipe.target_epsilon, delta=recipe.target_delta, sample_rate=rate, steps=steps)
    torch.manual_seed(recipe.seed)
    model = getattr(dpulr.models, recipe.model)(seed=recipe.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(Batches(train), batch_size=recipe.batch_size, collate_fn=list),
            noise_multiplier=noise,
            max_grad_norm=settings.max_grad_norm,
            grad_sample_mode=settings.mode,
            poisson_sampling=True,
        )
        wrapped, private, loader = parts[0], parts[1], parts[-1]
        criterion = parts[2] if settings.mode == "ghost" else nn.CrossEntropyLoss()
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        parted: Any = nullcontext(loader)
        if settings.physical_batch is not None:
            parted = BatchMemoryManager(data_loader=loader, max_physical_batch_size=settings.physical_batch, optimizer=private)
        started, taken = time.perf_counter(), 0
        with parted as batches:
            while taken < steps:
                for inputs, targets in batches:
                    private.zero_grad()
                    criterion(wrapped(inputs), targets).backward()
                    private.step()
                    if private._is_last_step_skipped:  # a part of a batch that goes on
                        continue
                    schedule.step()
                    taken += 1
                    if taken == steps:
                        break
        seconds = time.perf_counter() - started
    epsilon = accounting.gaussian_epsilon(noise_multiplier=noise, sample_rate=rate, steps=steps, delta=recipe.target_delta)
    return {
        "guarantee": "certified",
        "epsilon": epsilon,
        "delta": recipe.target_delta,
        "steps": steps,
        "sample_rate": rate,
        "noise_multiplier": noise,
        "test_accuracy": dpulr.evaluate(model, test),
        "seconds": round(seconds, 2),
        "version": dpulr.__version__,
        "torch": torch.__version__,
        "opacus": opacus.__version__,
    }
