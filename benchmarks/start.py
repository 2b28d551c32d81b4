"""Seconds from `import torch` done to the first step done, in this new process: `python -m benchmarks.start [MODEL]`.

Nothing is cached. The second number is what of it torch takes to make the first optimizer: it loads its compiler then, for plain
training, too.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

MODELS = ("mnist", "mlp", "resnet5", "deep")
"""MNIST from the package at a given noise; and at epsilon 1, which is calibrated: 2 layers, ResNet-5, 16 layers of width 20."""


def task(name: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Model, data and settings."""
    import dpulr

    if name == "mnist":
        return dpulr.models.mlp(seed=0), dpulr.data.load("mnist")[0], {"batch_size": 500, "noise_multiplier": 2.0}
    model: nn.Module
    shape: tuple[int, ...] = (784,)
    if name == "mlp":
        model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    elif name == "resnet5":
        model, shape = dpulr.models.resnet5(seed=0), (3, 32, 32)
    else:
        layers = [part for _ in range(15) for part in (nn.Linear(20, 20), nn.Tanh())]
        model, shape = nn.Sequential(*layers, nn.Linear(20, 10)), (20,)
    data = TensorDataset(torch.randn(10_000, *shape), torch.randint(0, 10, (10_000,)))
    return model, data, {"batch_size": 100 if name == "resnet5" else 500, "target_epsilon": 1.0}


def main(name: str) -> None:
    os.environ["DPULR_CACHE"] = "off"
    begin = time.perf_counter()
    import dpulr

    model, data, settings = task(name)
    making = time.perf_counter()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    making = time.perf_counter() - making
    engine = dpulr.PrivacyEngine(model, optimizer, data, nn.CrossEntropyLoss(reduction="none"), epochs=5, **settings)
    for x, y in engine.batches(1):
        engine.step(x, y)
    print(time.perf_counter() - begin, making)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else MODELS[0])
