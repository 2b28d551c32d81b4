"""Events from pictures, as a camera has them that sees changes only: MNIST moved by simulated eye movements, and a spiking network.

What one learns: a record may be a film of events (steps, pixels twice: lighter, darker). The eye makes three small jumps, the sides
of a triangle, in equal steps; a pixel whose brightness changes by more than THRESHOLD from one step to the next has an event. The
path is the same for all records, and nothing is random: each film depends on its own picture alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr

PATH = ((0, 0), (1, 0.5), (2, 1), (1, 1.5), (0, 2), (0, 1), (0, 0))  # pixels down, pixels to the right
THRESHOLD = 0.2  # of a brightness between 0 and 1


def events(images: Tensor) -> Tensor:
    """(records, steps, 2 * 784) events, 0 or 1, of pictures as `dpulr.data.load` gives them."""
    frames = []
    for down, right in PATH:
        moved = torch.tensor([[1.0, 0.0, right / 14], [0.0, 1.0, down / 14]]).expand(len(images), 2, 3)
        grid = nn.functional.affine_grid(moved, list(images.shape), align_corners=False)
        frames.append(nn.functional.grid_sample(0.1 + 0.3 * images, grid, align_corners=False).flatten(1))
    change = torch.stack(frames, 1).diff(dim=1)
    return torch.cat([change > THRESHOLD, change < -THRESHOLD], dim=2).float()


class Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1568, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        membrane, scores = x.new_zeros(len(x), 64), x.new_zeros(len(x), 10)
        for now in x.unbind(1):
            membrane = 0.9 * membrane + self.first(now)
            spikes = (membrane >= 0.3).to(x.dtype)
            membrane, scores = membrane * (1 - spikes), scores + self.last(spikes)
        return scores


def main(records: int = 10_000, epochs: float = 2, repeats: int = 2) -> tuple[dpulr.PrivacyEngine, float]:
    """Train on events of so many pictures at epsilon 3; return the engine, and the accuracy on events of 2,000 test pictures."""
    (x, y), (test_x, test_y) = (part.tensors for part in dpulr.data.load("mnist"))
    data, test = TensorDataset(events(x[:records]), y[:records]), TensorDataset(events(test_x[:2_000]), test_y[:2_000])
    model, loss = Spiking(), nn.CrossEntropyLoss(reduction="none")
    optimizer, how = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), dpulr.HiddenDirection(repeats, radius="auto")
    engine = dpulr.PrivacyEngine(model, optimizer, data, loss, mechanism=how, batch_size=500, epochs=epochs, target_epsilon=3.0)
    for batch in engine.batches():
        engine.step(*batch)
    accuracy = dpulr.evaluate(model, test)
    print(f"epsilon {engine.privacy_spent().epsilon:.2f}; radius {engine.mechanism.radius}; accuracy {accuracy:.3f}")
    return engine, accuracy


if __name__ == "__main__":
    main()
