"""Quantised and binary layers: an int8 front of torch's own quantisation, then a layer whose weights are used by their signs.

What one learns: int8 layers with static scales, learned on public data, are a frozen part of a model like any other. A layer that
rounds its weights is moved at its output, and what is learned about the rounded weights is given to those behind them. (Dynamic
quantisation takes a scale per batch and so mixes records: the engine refuses it, and says so.)
"""

from __future__ import annotations

import torch
import torch.ao.quantization as quantisation
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr


class BinaryLinear(nn.Module):
    """x W^T by the signs of W."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.05 * torch.randn(outputs, inputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.sign(self.weight).t() / x.shape[1] ** 0.5 + self.bias


def front(public: Tensor) -> nn.Module:
    """A random layer in int8; the ranges are those of public records."""
    layer = nn.Sequential(quantisation.QuantStub(), nn.Linear(20, 64), nn.ReLU(), quantisation.DeQuantStub()).eval()
    layer.qconfig = quantisation.get_default_qconfig("fbgemm")
    prepared = quantisation.prepare(layer)
    prepared(public)
    return quantisation.convert(prepared)


def main(steps: int = 80, repeats: int = 8) -> tuple[dpulr.PrivacyEngine, float]:
    """Train behind the int8 front; return the engine, and the accuracy on the training records."""
    torch.manual_seed(0)
    x = torch.randn(3_000, 20)
    data = TensorDataset(x, (x[:, :10].sum(1) > x[:, 10:].sum(1)).long())
    model = nn.Sequential(front(torch.randn(500, 20)), BinaryLinear(64, 16), nn.Hardtanh(), nn.Linear(16, 2))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), nn.CrossEntropyLoss(reduction="none")
    how = dpulr.HiddenDirection(repeats=repeats)
    engine = dpulr.PrivacyEngine(model, optimizer, data, loss, mechanism=how, batch_size=300, steps=steps, target_epsilon=3.0)
    for inputs, targets in engine.batches():
        engine.step(inputs, targets)
    accuracy = dpulr.evaluate(model, data)
    print(f"epsilon {engine.privacy_spent().epsilon:.2f}; sites {list(engine.forward.sites)}; accuracy {accuracy:.3f}")
    return engine, accuracy


if __name__ == "__main__":
    main()
