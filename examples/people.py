"""People: the same training, once with records protected and once with the people whom they belong to.

What one learns: `unit=` says who a record belongs to; people are then sampled, and count as one, however many records they have.
The same epsilon takes more noise, because there are fewer people than records. Run it from a clone: `python examples/people.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import dpulr

WRITERS = 4_000


def writers(records: int) -> np.ndarray:
    """Who wrote which digit. MNIST does not say, so this is made up: few write much, many write little."""
    rng = np.random.default_rng(0)
    shares = rng.pareto(1.5, WRITERS) + 0.1
    return rng.choice(WRITERS, records, p=shares / shares.sum())


def trained(train: Any, test: Any, **protected: Any) -> tuple[dpulr.PrivacySpent, float]:
    """Train a small model; return what was spent, and the accuracy on the test set."""
    model = dpulr.models.mlp((784, 32, 10), seed=0)
    engine = dpulr.PrivacyEngine(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9),
        train,
        torch.nn.CrossEntropyLoss(reduction="none"),
        mechanism="gradient",
        target_epsilon=3.0,
        target_delta=1e-5,
        **protected,
    )
    for x, y in engine.batches():
        engine.step(x, y)
    return engine.privacy_spent(), dpulr.evaluate(model, test)


def main(epochs: float = 5) -> list[tuple[dpulr.PrivacySpent, float]]:
    """Both trainings, for so many passes over the records, or over the people."""
    train, test = dpulr.data.load("mnist")
    who = writers(len(train))
    found = [
        trained(train, test, batch_size=2_000, epochs=epochs),
        trained(train, test, batch_size=400, epochs=epochs, unit=who, max_per_person=8),
    ]
    for spent, accuracy in found:
        print(f"{accuracy:.3f}  {spent}")
    return found


if __name__ == "__main__":
    main()
