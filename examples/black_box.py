"""numpy in the middle of a model: no gradient could pass through it, and the layer in front of it is trained all the same.

What one learns: any code that maps records to records may stand anywhere in a model. It must treat each record alone: the engine
tries that on synthetic records, and refuses what mixes them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr


class Nearest(nn.Module):
    """Each number becomes the nearest of a few levels, by numpy: flat almost everywhere, with jumps in between."""

    def __init__(self, levels: int = 5) -> None:
        super().__init__()
        self.levels = np.linspace(-2, 2, levels, dtype=np.float32)

    def forward(self, x: Tensor) -> Tensor:
        nearest = np.abs(x.detach().cpu().numpy()[..., None] - self.levels).argmin(-1)
        return torch.from_numpy(self.levels[nearest]).to(x)


def data(records: int = 2_000) -> TensorDataset:
    """On which side of a plane does a point lie? Of the many directions of its space the first layer must find one."""
    x = torch.randn(records, 20, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def main(steps: int = 100, train_first: bool = True) -> tuple[dpulr.PrivacyEngine, float]:
    """Train through the black box; return the engine, and the accuracy on the training records."""
    torch.manual_seed(0)
    dataset = data()
    model = nn.Sequential(nn.Linear(20, 3), Nearest(), nn.Linear(3, 2))
    model[0].requires_grad_(train_first)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9)
    engine = dpulr.PrivacyEngine(
        model,
        optimizer,
        dataset,
        nn.CrossEntropyLoss(reduction="none"),
        mechanism=dpulr.HiddenDirection(repeats=8, radius=0.5),  # jumps need a wide look around
        batch_size=200,
        steps=steps,
        target_epsilon=3.0,
    )
    for inputs, targets in engine.batches():
        engine.step(inputs, targets)
    accuracy = dpulr.evaluate(model, dataset)
    print(engine.privacy_spent(), f"accuracy {accuracy:.3f}", sep="\n")
    return engine, accuracy


if __name__ == "__main__":
    main()
