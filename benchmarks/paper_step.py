"""Where a step of `paper` goes: forward passes, privacy controller, extra noise, as CPU time, so that load does not matter.

python -m benchmarks.paper_step            # MLP, MNIST, K = 16
python -m benchmarks.paper_step resnet5    # CIFAR-10 shapes, K = 4
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpulr
from benchmarks import results
from benchmarks.timing import stepped, timed

PARTS = {
    "forward passes": ["dpulr.paper.step:FittedPaper.estimate"],
    "covariance": ["dpulr.paper.covariance:AffineBlocks.add"],
    "eigenvectors": ["dpulr.paper.covariance:Covariance.decomposed"],
    "extra noise": ["dpulr.paper.step:FittedPaper.privatise"],
}
WARM = 2


def rows(images: bool) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    repeats, steps, batches = (4, 2, (1_000,)) if images else (16, 40, (64, 200, 500))
    train: Any
    if images:
        train = TensorDataset(torch.randn(4_000, 3, 32, 32), torch.randint(10, (4_000,)))
    else:
        train, _ = dpulr.data.load("mnist")
    spent: dict[str, float] = defaultdict(float)
    timed(PARTS, spent)
    found = []
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
        parts = {label: spent[label] / steps for label in PARTS}
        parts["rest"] = whole / steps - sum(parts.values())
        found.append(
            {"model": "resnet5" if images else "mlp", "K": repeats, "batch": batch, "seconds": whole / steps, "parts": parts}
        )
    return found


if __name__ == "__main__":
    images = sys.argv[1:] == ["resnet5"]
    kept = [row for row in results.read().get("paper_step", []) if (row["model"] == "resnet5") != images]
    results.update(paper_step=sorted([*kept, *rows(images)], key=lambda row: row["model"]))
