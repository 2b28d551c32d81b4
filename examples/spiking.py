"""A spiking network of snnTorch's own neurons on MNIST, written as in its tutorials, trained through its hard thresholds.

What one learns: time steps are a loop inside the model, and the membranes start afresh in every pass. No surrogate gradient is
needed: `radius="auto"` makes directions reach as far as the thresholds ask for. `dpulr.models.spiking` is a faster network of the
same kind.
"""

from __future__ import annotations

import snntorch
import torch
from torch import Tensor, nn

import dpulr


class Spiking(nn.Module):
    def __init__(self, hidden: int = 64, steps: int = 8) -> None:
        super().__init__()
        self.first, self.neurons, self.last = nn.Linear(784, hidden), snntorch.Leaky(beta=0.9), nn.Linear(hidden, 10)
        self.steps = steps
        nn.init.normal_(self.first.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        membrane, scores = self.neurons.init_leaky(), x.new_zeros(len(x), 10)
        for _ in range(self.steps):
            spikes, membrane = self.neurons(self.first(x.flatten(1)), membrane)
            scores = scores + self.last(spikes)
        return scores / self.steps


def main(epochs: float = 2, repeats: int = 2) -> tuple[dpulr.PrivacyEngine, float]:
    """Train on MNIST at epsilon 3; return the engine, and the accuracy on the test set."""
    torch.manual_seed(0)
    train, test = dpulr.data.load("mnist")
    model = Spiking()
    engine = dpulr.PrivacyEngine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        train,
        nn.CrossEntropyLoss(reduction="none"),
        mechanism=dpulr.HiddenDirection(repeats=repeats, radius="auto"),
        batch_size=1_000,
        epochs=epochs,
        target_epsilon=3.0,
    )
    print(f"radius {engine.mechanism.radius}")
    for inputs, targets in engine.batches():
        engine.step(inputs, targets)
    accuracy = dpulr.evaluate(model, test)
    print(f"epsilon {engine.privacy_spent().epsilon:.2f}; accuracy {accuracy:.3f}")
    return engine, accuracy


if __name__ == "__main__":
    main()
