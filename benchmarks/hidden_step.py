"""Where a step of `hidden-direction` goes, as shares of its CPU time on one thread: MLP, MNIST.

python benchmarks/hidden_step.py
"""

from __future__ import annotations

import time
from collections import defaultdict

import torch
from timing import stepped, timed
from torch import nn

import dpulr
from dpulr.mechanisms.coordinates import Coordinates
from dpulr.mechanisms.hidden_direction import BoundHiddenDirection
from dpulr.model.replay import TracedForward
from dpulr.model.sites import Site
from dpulr.randomness import Directions, GaussianNoise
from dpulr.sampling import PoissonSampling, Records

PARTS = {
    "batch": [(PoissonSampling, "draw"), (Records, "take")],
    "clean pass": [(TracedForward, "surviving")],
    "directions": [(BoundHiddenDirection, "draw")],
    "perturbing": [(Coordinates, "perturbation")],
    "replay": [(TracedForward, "all_losses")],
    "gains": [(Site, "gains")],
    "sum": [(Coordinates, "add")],
    "noise": [(GaussianNoise, "draw"), (BoundHiddenDirection, "release")],
    "lift": [(BoundHiddenDirection, "gradients")],
    "optimizer": [(torch.optim.SGD, "step")],
}
CASES = [(1, 64, 300), (1, 200, 300), (1, 500, 200), (1, 2_000, 60), (16, 2_000, 10)]
WARM = 10


def main() -> None:
    torch.set_num_threads(1)
    train, _ = dpulr.data.load("mnist")
    spent: dict[str, float] = defaultdict(float)
    Directions.plan = lambda self, sizes: None  # type: ignore[method-assign]  # all of it in this thread, to be counted
    for label, methods in PARTS.items():
        for owner, name in methods:
            timed(owner, name, label, spent)
    print("| directions | batch | ms | " + " | ".join(PARTS) + " | rest |")
    print("|---" * (len(PARTS) + 4) + "|")
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
        shares = [spent[label] / whole for label in PARTS]
        cells = [f"{share:.0%}" for share in [*shares, 1 - sum(shares)]]
        print(f"| {repeats} | {batch} | {1e3 * whole / steps:.2f} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
