"""Models that are awkward to take apart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Branches(nn.Module):
    """Two branches from one input, joined by a product; then a residual whose clean operand comes from upstream of both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.head = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        return self.head(torch.relu(self.left(h)) * torch.sigmoid(self.right(x)) + h - 2 * x)[:, :3]


class InPlace(nn.Module):
    """Overwrites values that the clean pass keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        g = self.relu(h)
        g += self.second(g)
        g.mul_(0.5)
        F.relu(g, inplace=True)
        return self.third(g)


class Overwrites(nn.Module):
    """Changes its input, as a first `nn.ReLU(inplace=True)` does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        return self.second(torch.tanh(self.first(x)) + x)


class ItemAssignment(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h[:, 0] = 1.0
        return self.second(h)


class Shapes(nn.Module):
    """Functional operations that take the batch's size as a number, and a constant made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.view(x.size(0), 2, 3))
        h = h + torch.arange(4.0) + x.new_ones(x.shape[0], 1, 1)
        batch, places, _ = h.shape
        return self.second(h.permute(1, 0, 2).permute(1, 0, 2).reshape(batch, places * 4))


class ValueBranch(nn.Module):
    """A Python `if` on values: tracing can't follow it."""

    def __init__(self, threshold: float = 3.0) -> None:
        super().__init__()
        self.first, self.second, self.threshold = nn.Linear(6, 5), nn.Linear(5, 3), threshold

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(torch.tanh(h) if x.sum() > self.threshold else torch.relu(h) + 1)


class Reads(nn.Module):
    """Turns values into a Python number in one way or another."""

    def __init__(self, found: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layer, self.found = nn.Linear(6, 3), found

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2.0 if self.found(x > 20) else 1.0)


class Drags(nn.Module):
    """A layer that returns a tuple beside one that returns a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.unsqueeze(1)
        return self.head(self.attention(h, h, h, need_weights=False)[0].squeeze(1))


class Experts(nn.Module):
    """A branch that chooses the layer: a record trains only its own."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high, self.head = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.high(x) if x.sum() > 0 else self.low(x)))


class ShapeBranch(nn.Module):
    """A Python `if` on shapes: tracing can't follow it either, but records stay apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if len(h.unbind(1)) > 2:
            h = torch.tanh(h)
        return self.second(h)


class NumpyBox(nn.Module):
    """A black box: nothing here has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.sort(np.floor(np.sin(x.numpy()) * 4), axis=1))


class BoxInside(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), NumpyBox(), nn.Linear(5, 3))


class InlineBox(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = np.cumsum(np.asarray(self.first(x)), axis=1)
        return self.second(torch.from_numpy(h))


class Recurrent(nn.Module):
    """Returns a tuple inside, so that the wrapper is the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.view(x.shape[0], 3, 2)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0].mean(1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x.view(-1, 3, 2))).mean(1))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 5), nn.Embedding(7, 5), nn.Linear(5, 3)

    def forward(self, a: Tensor, words: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        h = self.first(a) + self.second(words).mean(1) * scale
        if mask is not None:
            h = h * mask
        return self.head(h)


class OutOfOrder(nn.Module):
    """Layers are registered in another order than they run, side by side and one behind the other, with a clean operand."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.right, self.left, self.gate = nn.Linear(5, 3), nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.tanh(self.left(x)), self.right(x)
        mixed = left * torch.sigmoid(self.gate(left)) + right.view(x.size(0), -1)
        return self.last(mixed) + x[:, :3] + left[:, 1:4]


class Refuses(nn.Module):
    """A black box that raises for large values."""

    def forward(self, x: Tensor) -> Tensor:
        if (x.numpy() > 1e5).any():
            raise KeyError("patient 17")
        return x


class Binary(nn.Module):
    """Weights held as a raw parameter, used by their signs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(outputs, inputs) / 3), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.sign(), self.bias)
