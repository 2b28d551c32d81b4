"""A job of milliseconds for tests of runs, and an independent count of the updates that it made.

`model` is what `--model tests.support.small_job:model` finds. Every optimizer step of the process first adds a byte to the file
named by SMALL_JOB_UPDATES: what the operating system has, no kill takes back. It shares no code with the ledger.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

RECORDS, CLASSES = 200, 3


def data() -> tuple[TensorDataset, TensorDataset]:
    """Three well separated clouds."""
    generator = torch.Generator().manual_seed(1)
    centres = 3 * torch.randn(CLASSES, 6, generator=generator)

    def part(size: int) -> TensorDataset:
        labels = torch.arange(size) % CLASSES
        return TensorDataset(centres[labels] + torch.randn(size, 6, generator=generator), labels)

    return part(RECORDS), part(150)


def model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def failing_model() -> nn.Module:
    raise RuntimeError("this model can't be made")


def count_update(optimizer: object, *_: object) -> None:
    path = os.environ.get("SMALL_JOB_UPDATES")
    if path:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, b"u")
        os.close(handle)


register_optimizer_step_pre_hook(count_update)
