"""The paper's models. Each takes images of shape (channels, height, width) and returns one number per class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

from dpulr.errors import InvalidArgument

__all__ = ["MLP_SIZES", "ResNet5", "mlp", "resnet5"]

M = TypeVar("M", bound=nn.Module)

MLP_SIZES = {  # the paper's MLP, and two with 2.5 and 5 times its parameters: all hidden layers wider by the same factor
    "small": (784, 128, 64, 32, 10),
    "medium": (784, 288, 144, 72, 10),
    "large": (784, 504, 252, 126, 10),
}


def mlp(sizes: Sequence[int] = MLP_SIZES["small"], *, seed: int | None = None) -> nn.Sequential:
    """A multi-layer perceptron with GELU, by default the paper's for MNIST. `seed` fixes the initial weights.

    Weights start as He et al. (2015) propose: torch's own start is smaller, and under noise it takes epochs to grow out of it.
    """
    if len(sizes) < 2:
        raise InvalidArgument(f"sizes must hold at least the number of inputs and of classes; got {list(sizes)}.")
    with _initial(seed):
        layers: list[nn.Module] = [nn.Flatten()]
        for width_in, width_out in pairwise(sizes):
            layers += [nn.Linear(width_in, width_out), nn.GELU()]
        return _he(nn.Sequential(*layers[:-1]))


class ResNet5(nn.Module):
    """The paper's CIFAR-10 model: 3x3 convolutions of 8, 16, 32 and 32 channels, a residual around the fourth, one linear layer.

    The paper does not say what stands between the last convolution and the linear layer; here it is an average over 4 x 4 regions.
    """

    def __init__(self, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.conv3 = nn.Conv2d(16, 32, 3, padding=1)
        self.conv4 = nn.Conv2d(32, 32, 3, padding=1)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.linear = nn.Linear(32 * 16, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        x = self.relu(self.conv3(x))
        x = self.relu(self.conv4(x) + x)
        out: Tensor = self.linear(self.pool(x).flatten(1))
        return out


def resnet5(channels: int = 3, classes: int = 10, *, seed: int | None = None) -> ResNet5:
    """`ResNet5` with its initial weights fixed by `seed`."""
    with _initial(seed):
        return _he(ResNet5(channels, classes))


def _he(model: M) -> M:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.kaiming_normal_(parameter)
    return model


@contextmanager
def _initial(seed: int | None) -> Iterator[None]:
    """Initial weights from `seed`, without touching torch's global generator; None: from the global generator."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
