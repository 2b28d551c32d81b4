"""Losses that count: whether a digit is wrong, by 0 and 1. No gradient has ever been there.

What one learns: a loss gives one number per record, and nothing more is asked of it. `dpulr.losses` has 0-1 loss, top-k, exact
match and edit distance; a score by another program is a `dpulr.BlackBox` of shape (). With a 0-1 loss two passes differ by -1, 0 or
1: the bit that a record keeps is all there is to know.
"""

from __future__ import annotations

import torch
from torch import nn

import dpulr


def main(epochs: float = 6, repeats: int = 8) -> tuple[dpulr.PrivacyEngine, float]:
    """Train an MLP on MNIST by its errors at epsilon 3; return the engine, and the accuracy on the test set."""
    torch.manual_seed(0)
    train, test = dpulr.data.load("mnist")
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.GELU(), nn.Linear(64, 10))
    engine = dpulr.PrivacyEngine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        train,
        dpulr.losses.zero_one,
        mechanism=dpulr.HiddenDirection(repeats=repeats, radius="auto"),
        batch_size=1_000,
        epochs=epochs,
        target_epsilon=3.0,
    )
    for inputs, targets in engine.batches():
        engine.step(inputs, targets)
    accuracy = dpulr.evaluate(model, test)
    print(f"epsilon {engine.privacy_spent().epsilon:.2f}; radius {engine.mechanism.radius}; accuracy {accuracy:.3f}")
    return engine, accuracy


if __name__ == "__main__":
    main()
