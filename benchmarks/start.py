"""Seconds from `import torch` done to the first step done, in this new process: `python -m benchmarks.start`."""

from __future__ import annotations

import time

import torch

if __name__ == "__main__":
    begin = time.perf_counter()
    import dpulr

    train, _ = dpulr.data.load("mnist")
    model = dpulr.models.mlp(seed=0)
    engine = dpulr.PrivacyEngine(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        train,
        torch.nn.CrossEntropyLoss(reduction="none"),
        batch_size=500,
        epochs=5,
        noise_multiplier=2.0,
    )
    for x, y in engine.batches(1):
        engine.step(x, y)
    print(time.perf_counter() - begin)
