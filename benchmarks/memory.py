"""One case of memory, in a process of its own: `python -m benchmarks.memory hidden mlp 500` prints its peak, and that before."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpulr
from benchmarks.peers import mnist_like, ours, plain


def peak() -> int:
    """Of this process alone; getrusage hands down the peak of the process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(which: str, kind: str, batch: int) -> None:
    torch.manual_seed(0)
    model: Any
    if kind == "mlp":
        model, data = dpulr.models.mlp(seed=0), mnist_like(10_000)
    else:  # ten million parameters in one layer
        model = nn.Sequential(nn.Linear(3_200, 3_200), nn.GELU(), nn.Linear(3_200, 10))
        data = TensorDataset(torch.randn(2_000, 3_200), torch.randint(0, 10, (2_000,)))
    make = plain if which == "plain" else ours(dpulr.HiddenDirection(repeats=1))
    step = make(model, data, batch)
    before = peak()
    for _ in range(5):
        step()
    print(peak(), before)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
