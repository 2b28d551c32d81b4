"""The paper's models, and a spiking one. Each takes images of shape (channels, height, width) and returns one number per class."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

from dpulr import validate
from dpulr.errors import InvalidArgument

__all__ = ["MLP_SIZES", "LeakyIntegrateAndFire", "ResNet5", "SpikeCode", "into_windows", "mlp", "resnet5", "spiking"]

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


class SpikeCode(nn.Module):
    """Pictures as currents over time, (records, steps, pixels).

    "rate": a pixel spikes in each time step with its brightness as probability. "latency": once, the sooner the brighter; never if
    it is black. `offset` and `scale` give the brightness between 0 and 1 that a value x stands for, offset + scale x.
    """

    def __init__(self, coding: str, steps: int, offset: float = 0.1, scale: float = 0.3) -> None:
        super().__init__()
        validate.one_of("coding", coding, ("rate", "latency"))
        self.coding, self.steps, self.offset, self.scale = coding, steps, offset, scale

    def forward(self, x: Tensor) -> Tensor:
        bright = (self.offset + self.scale * x.flatten(1)).clamp(0, 1).unsqueeze(1)
        if self.coding == "rate":
            return (torch.rand_like(bright.expand(-1, self.steps, -1)) < bright).to(x.dtype)
        moments = torch.arange(self.steps, device=x.device).view(1, -1, 1)
        return ((((1 - bright) * self.steps).floor() == moments) & (bright > 0)).to(x.dtype)


class LeakyIntegrateAndFire(nn.Module):
    """Neurons that spike when their membrane reaches the threshold, and then start from 0. No gradient passes them.

    Takes currents (records, width), the same in every time step, or (records, steps, width); returns the spikes (records, steps,
    width), or, if `counted`, their numbers (records, width). Nothing is kept from one call to the next.
    """

    def __init__(self, steps: int, *, leak: float = 0.9, threshold: float = 1.0, counted: bool = False) -> None:
        super().__init__()
        validate.whole_number("steps", steps)
        validate.positive("threshold", threshold)
        self.steps, self.leak, self.threshold, self.counted = steps, leak, threshold, counted

    def forward(self, current: Tensor) -> Tensor:
        constant = current.dim() == 2
        membrane = number = torch.zeros_like(current if constant else current[:, 0])
        spikes = []
        for step in range(self.steps):
            membrane = torch.add(current if constant else current[:, step], membrane, alpha=self.leak)
            spike = membrane >= self.threshold
            membrane = membrane.masked_fill(spike, 0)
            if self.counted:
                number = number + spike
            else:
                spikes.append(spike)
        return number if self.counted else torch.stack(spikes, 1).to(current.dtype)


def spiking(
    sizes: Sequence[int] = (784, 128, 10),
    *,
    coding: str = "current",
    steps: int = 10,
    leak: float = 0.9,
    threshold: float = 1.0,
    window: int | None = None,
    seed: int | None = None,
) -> nn.Sequential:
    """A network of leaky integrate-and-fire neurons, all time steps in one pass. A linear layer reads the numbers of spikes.

    `coding` is how a picture goes in: "current", the same in every time step, or spikes by "rate" or "latency" (`SpikeCode`).
    With a `window`, each neuron of the first layer starts with so many rows and columns of a square picture (`into_windows`).
    """
    validate.one_of("coding", coding, ("current", "rate", "latency"))
    if len(sizes) < 3:
        raise InvalidArgument(f"sizes must hold the numbers of inputs, of neurons and of classes; got {list(sizes)}.")
    with _initial(seed):
        linear = [_he(nn.Linear(*pair)) for pair in pairwise(sizes)]
        if window is not None:
            into_windows(linear[0], window)
        with torch.no_grad():  # currents below the threshold, so that most neurons neither rest nor spike all the time
            for layer in linear[:-1]:
                layer.weight *= 0.3 * threshold
            linear[-1].weight /= steps
    layers: list[nn.Module] = [nn.Flatten() if coding == "current" else SpikeCode(coding, steps)]
    for i, layer in enumerate(linear[:-1]):
        layers += [layer, LeakyIntegrateAndFire(steps, leak=leak, threshold=threshold, counted=i == len(linear) - 2)]
    return nn.Sequential(*layers, linear[-1])


def into_windows(layer: nn.Linear, window: int) -> nn.Linear:
    """Each output starts with a window of a square picture, at a random place: `window` rows and columns of pixels.

    The weights outside start from 0, those inside are made so much larger. Random features of this kind tell pictures apart better
    than those of whole pictures: worth having where the layer learns slowly.
    """
    side = math.isqrt(layer.in_features)
    if side**2 != layer.in_features or not 1 <= window <= side:
        raise InvalidArgument(f"window is {window}; a layer of {layer.in_features} inputs has no such part of a square picture.")
    ahead = torch.arange(side) - torch.randint(side - window + 1, (2, layer.out_features, 1))
    rows, columns = (ahead >= 0) & (ahead < window)
    with torch.no_grad():
        layer.weight *= (rows.unsqueeze(2) & columns.unsqueeze(1)).flatten(1) * (side / window)
    return layer


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
