"""An adapter before a model that one can only call, as a soft prompt is: private records are brought into a shape that it knows.

What one learns: nothing of the frozen model is needed but its answers. Somebody's classifier (scikit-learn, in a black box) knows
upright digits; ours are mirrored. A trained matrix in front of it, and a vector that is added to every input (the prompt), learn
privately to turn them round.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr


def digits() -> tuple[np.ndarray, np.ndarray]:
    """8 x 8 pictures of 1,797 digits, between 0 and 1."""
    images, labels = load_digits(return_X_y=True)
    return images.astype(np.float32) / 16, labels


class Adapter(nn.Module):
    """Starts by changing nothing. `bias` is the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        nn.init.eye_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def main(steps: int = 150, repeats: int = 8) -> tuple[dpulr.PrivacyEngine, float, float]:
    """Train the adapter; return the engine, and the accuracies on the training records before and after."""
    torch.manual_seed(0)
    images, labels = digits()
    frozen = LogisticRegression(max_iter=200).fit(images, labels)
    box = dpulr.BlackBox(lambda x: np.log(frozen.predict_proba(x) + 1e-6), output_shape=(10,), name="somebody's classifier")
    model = nn.Sequential(Adapter(), box)
    mirrored = images.reshape(-1, 8, 8)[:, :, ::-1].reshape(-1, 64).copy()
    data = TensorDataset(torch.from_numpy(mirrored), torch.from_numpy(labels))
    before = dpulr.evaluate(model, data)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), nn.CrossEntropyLoss(reduction="none")
    how = dpulr.HiddenDirection(repeats=repeats)
    engine = dpulr.PrivacyEngine(model, optimizer, data, loss, mechanism=how, batch_size=200, steps=steps, target_epsilon=5.0)
    for inputs, targets in engine.batches():
        engine.step(inputs, targets)
    after = dpulr.evaluate(model, data)
    print(f"epsilon {engine.privacy_spent().epsilon:.2f}; accuracy {before:.3f} before, {after:.3f} after")
    return engine, before, after


if __name__ == "__main__":
    main()
