"""Where a step of `hidden-direction` goes, as shares of its CPU time on one thread: MLP, MNIST. Into results/bench.json.

python -m benchmarks.hidden_step
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch
from torch import nn

import dpulr
from benchmarks import results
from benchmarks.timing import stepped, timed
from dpulr.randomness import Directions

FITTED = "dpulr.mechanisms.hidden_direction:FittedHiddenDirection"
PARTS = {
    "batch": ["dpulr.sampling:PoissonSampling.draw", "dpulr.records:Records.take"],
    "clean pass": ["dpulr.model.forward:Forward.clean"],
    "directions": ["dpulr.randomness:Directions.spheres"],
    "replay": ["dpulr.model.forward:Forward.all_losses"],
    "perturbing": [f"{FITTED}.move"],
    "sum": [f"{FITTED}.sum_of_bounded_signals"],
    "noise": ["dpulr.randomness:GaussianNoise.draw", f"{FITTED}.privatise"],
    "lift": [f"{FITTED}.gradients"],
    "optimizer": ["torch.optim:SGD.step"],
}
CASES = [(1, 64, 300), (1, 200, 300), (1, 500, 200), (1, 2_000, 60), (16, 2_000, 10)]
WARM = 10


def rows() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    train, _ = dpulr.data.load("mnist")
    spent: dict[str, float] = defaultdict(float)
    Directions.expect = lambda self, sizes: None  # type: ignore[method-assign]  # all of it in this thread, to be counted
    timed(PARTS, spent)
    found = []
    for repeats, batch, steps in CASES:
        model = dpulr.models.mlp(seed=0)
        engine = dpulr.PrivacyEngine(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
            train,
            nn.CrossEntropyLoss(reduction="none"),
            mechanism=dpulr.HiddenDirection(repeats=repeats, antithetic=repeats == 1),
            batch_size=batch,
            steps=steps + WARM,
            noise_multiplier=1.0,
        )
        whole = stepped(engine, WARM, time.thread_time, spent)
        shares = {label: spent[label] / whole for label in PARTS}
        shares["rest"] = 1 - sum(shares.values())
        found.append({"directions": repeats, "batch": batch, "seconds": whole / steps, "shares": shares})
    return found


if __name__ == "__main__":
    results.update(hidden_step=rows())
