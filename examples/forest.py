"""A gradient-boosted forest of scikit-learn behind a private layer: the layer learns which features to hand it.

What one learns: `dpulr.BlackBox` makes a module of anything that maps arrays to arrays with a row per record. The forest is frozen;
it was fitted on public records. The private layer in front of it is trained by losses alone: no gradient passes a tree.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from torch import nn
from torch.utils.data import TensorDataset

import dpulr


def forest(seed: int = 0) -> HistGradientBoostingClassifier:
    """Fitted on public records: in which quarter of the plane does a point lie?"""
    public = np.random.default_rng(seed).normal(size=(2_000, 2))
    return HistGradientBoostingClassifier(max_iter=20, random_state=0).fit(public, (public > 0) @ [2, 1])


def private_data(records: int = 3_000) -> TensorDataset:
    """The same question; but the two coordinates are hidden in twelve."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(records, 12, generator=generator)
    plane = torch.stack([x[:, :6].sum(1), x[:, 6:].sum(1)], 1)
    return TensorDataset(x, ((plane > 0).long() @ torch.tensor([2, 1])))


def main(steps: int = 60, repeats: int = 8) -> tuple[dpulr.PrivacyEngine, float]:
    """Train the layer before the forest; return the engine, and the accuracy on the training records."""
    torch.manual_seed(0)
    trees, data = forest(), private_data()
    box = dpulr.BlackBox(lambda x: np.log(trees.predict_proba(x) + 1e-3), output_shape=(4,), name="forest")
    model = nn.Sequential(nn.Linear(12, 2), box)
    engine = dpulr.PrivacyEngine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        data,
        nn.CrossEntropyLoss(reduction="none"),
        mechanism=dpulr.HiddenDirection(repeats=repeats, radius=0.5),
        batch_size=300,
        steps=steps,
        target_epsilon=3.0,
    )
    for inputs, targets in engine.batches():
        engine.step(inputs, targets)
    accuracy = dpulr.evaluate(model, data)
    print(f"epsilon {engine.privacy_spent().epsilon:.2f}; accuracy {accuracy:.3f}")
    return engine, accuracy


if __name__ == "__main__":
    main()
