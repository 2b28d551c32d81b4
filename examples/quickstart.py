"""Quickstart: train a model on MNIST with differential privacy, and say what it cost.

What one learns: the model and the optimizer are ordinary ones, the loop is yours, and the engine draws the batches, because the
guarantee rests on how they are drawn. Run it from a clone: `python examples/quickstart.py` (about ten seconds on two cores).
"""

from __future__ import annotations

import torch

import dpulr


def main(epochs: float = 5) -> tuple[dpulr.PrivacySpent, float]:
    """Train for so many passes over the data; return what was spent, and the accuracy on the test set."""
    train, test = dpulr.data.load("mnist")
    model = dpulr.models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = dpulr.PrivacyEngine(
        model,
        optimizer,
        train,
        torch.nn.CrossEntropyLoss(reduction="none"),
        mechanism="hidden-direction",
        batch_size=500,
        epochs=epochs,
        target_epsilon=1.0,
        target_delta=1e-5,
    )
    for x, y in engine.batches():
        engine.step(x, y)
    spent, accuracy = engine.privacy_spent(), dpulr.evaluate(model, test)
    print(spent)  # .epsilon .delta .guarantee
    print(accuracy)
    return spent, accuracy


if __name__ == "__main__":
    main()
