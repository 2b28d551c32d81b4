"""Where a step of `paper` goes: forward passes, privacy controller, extra noise, as CPU time, so that load does not matter.

python benchmarks/paper_step.py            # MLP, MNIST, K = 16
python benchmarks/paper_step.py resnet5    # CIFAR-10 shapes, K = 4
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from typing import Any

import torch
from timing import stepped, timed
from torch import nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr.paper.covariance import AffineBlocks, Covariance
from dpulr.paper.mechanism import BoundPaper

WARM = 2


def main() -> None:
    torch.set_num_threads(1)
    images = sys.argv[1:] == ["resnet5"]
    repeats, steps, batches = (4, 2, (1_000,)) if images else (16, 40, (64, 200, 500))
    train: Any
    if images:
        train = TensorDataset(torch.randn(4_000, 3, 32, 32), torch.randint(10, (4_000,)))
    else:
        train, _ = dpulr.data.load("mnist")
    spent: dict[str, float] = defaultdict(float)
    timed(BoundPaper, "estimate", "forward passes", spent)
    timed(BoundPaper, "_control", "controller", spent)
    timed(AffineBlocks, "add", "controller", spent)
    timed(Covariance, "decomposed", "eigenvectors", spent)
    timed(BoundPaper, "release", "extra noise", spent)
    print(f"CPU milliseconds a step, K = {repeats}; the passes include drawing what they inject")
    print("| batch | all | forward passes | covariance | eigenvectors | extra noise | rest |")
    print("|---|---|---|---|---|---|---|")
    for batch in batches:
        model: nn.Module = dpulr.models.resnet5(seed=0) if images else dpulr.models.mlp(seed=0)
        engine = dpulr.PrivacyEngine(
            model,
            torch.optim.Adam(model.parameters(), lr=0.01),
            train,
            nn.CrossEntropyLoss(reduction="none"),
            mechanism=dpulr.Paper(target_std=4.0, repeats=repeats, sigma=1.0, remedy="extra-noise"),
            batch_size=batch,
            steps=steps + WARM,
            sampling="shuffle",
        )
        whole = stepped(engine, WARM, time.process_time, spent)
        parts = [spent[name] for name in ("forward passes", "controller", "eigenvectors", "extra noise")]
        columns = (whole, *parts, whole - sum(parts))
        print(f"| {batch} | {' | '.join(f'{1e3 * value / steps:.1f}' for value in columns)} |")


if __name__ == "__main__":
    main()
