"""MNIST by Lightning: Trainer keeps epochs, validation and checkpoints; the callback takes the steps.

`python examples/lightning_mnist.py` needs the extra `lightning`, and takes about a minute.
"""

from __future__ import annotations

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dpulr
from dpulr.integrations.lightning import PrivateFit


class Digits(lightning.LightningModule):
    """A module as anybody writes it. `training_step` is for training without privacy: here it is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dpulr.models.mlp(seed=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main(steps: int = 360, **trainer: object) -> tuple[float, PrivateFit]:
    train, test = dpulr.data.load("mnist")
    private = PrivateFit(
        train, nn.CrossEntropyLoss(reduction="none"), batch_size=500, steps=steps, target_epsilon=1.0, target_delta=1e-5
    )
    fit = lightning.Trainer(callbacks=[private], logger=False, **trainer)
    fit.fit(Digits(), private, DataLoader(test, batch_size=2_000))
    print(f"accuracy {float(fit.callback_metrics['accuracy']):.4f}")
    print(private.privacy_spent())
    return float(fit.callback_metrics["accuracy"]), private


if __name__ == "__main__":
    main()
