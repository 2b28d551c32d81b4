"""Events from pictures, as a camera has them that sees changes only: MNIST moved by simulated eye movements, and a spiking network.

What one learns: a record may be a film of events, (time steps, pixels twice: lighter, darker). The eye makes three small jumps, the
sides of a triangle, in equal steps; a pixel whose brightness changes by more than THRESHOLD from one step to the next has an event.
The path is the same for all records, and nothing is random: each film depends on its own picture alone.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr.models import LeakyIntegrateAndFire

CORNERS, THRESHOLD = ((0, 0), (2, 1), (0, 2), (0, 0)), 0.2  # pixels; brightness is between 0 and 1


def path(steps_per_side: int = 2) -> list[tuple[float, float]]:
    """Where the eye looks at each moment."""
    sides = [(a, b, k / steps_per_side) for a, b in pairwise(CORNERS) for k in range(steps_per_side)]
    return [(a[0] + (b[0] - a[0]) * t, a[1] + (b[1] - a[1]) * t) for a, b, t in sides] + [CORNERS[-1]]


def events(images: Tensor) -> Tensor:
    """(records, steps, 2 * 784) events, 0 or 1, of pictures as `dpulr.data.load` gives them."""
    brightness = 0.1 + 0.3 * images
    frames = []
    for down, right in path():  # shifted by parts of a pixel
        moved = torch.tensor([[1.0, 0.0, right / 14], [0.0, 1.0, down / 14]]).expand(len(images), 2, 3)
        grid = nn.functional.affine_grid(moved, list(images.shape), align_corners=False)
        frames.append(nn.functional.grid_sample(brightness, grid, align_corners=False).flatten(1))
    change = torch.stack(frames, 1).diff(dim=1)
    return torch.cat([change > THRESHOLD, change < -THRESHOLD], dim=2).float()


def main(records: int = 20_000, epochs: float = 2, repeats: int = 2) -> tuple[dpulr.PrivacyEngine, float]:
    """Train on events of so many pictures at epsilon 3; return the engine, and the accuracy on events of 2,000 test pictures."""
    torch.manual_seed(0)
    train, test = [
        (events(x[:n]), y[:n]) for (x, y), n in zip([d.tensors for d in dpulr.data.load("mnist")], (records, 2_000), strict=True)
    ]
    steps = train[0].shape[1]
    model = nn.Sequential(nn.Linear(1568, 64), LeakyIntegrateAndFire(steps, counted=True), nn.Linear(64, 10))
    nn.init.normal_(model[0].weight, std=0.1)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), nn.CrossEntropyLoss(reduction="none")
    how, data = dpulr.HiddenDirection(repeats=repeats, radius="auto"), TensorDataset(*train)
    engine = dpulr.PrivacyEngine(model, optimizer, data, loss, mechanism=how, batch_size=500, epochs=epochs, target_epsilon=3.0)
    for inputs, targets in engine.batches():
        engine.step(inputs, targets)
    accuracy = dpulr.evaluate(model, TensorDataset(*test))
    print(f"epsilon {engine.privacy_spent().epsilon:.2f}; {train[0].mean():.3f} events per pixel and step; accuracy {accuracy:.3f}")
    return engine, accuracy


if __name__ == "__main__":
    main()
