"""The paper's other models, for `Settings.model` ("reproduction.models:medium"). The small MLP is the package's `mlp`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from dpulr import models


def medium(seed: int) -> nn.Module:
    return models.mlp(models.MLP_SIZES["medium"], seed=seed)


def large(seed: int) -> nn.Module:
    return models.mlp(models.MLP_SIZES["large"], seed=seed)


def torch_start(seed: int) -> nn.Module:
    """The small MLP with torch's initial weights instead of He's."""
    model = models.mlp(seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
    return model


def gelu_at_the_end(seed: int) -> nn.Module:
    """The small MLP read to the letter: "each employing GELU activations", the last layer too."""
    return nn.Sequential(models.mlp(seed=seed), nn.GELU())


class Steps(nn.Module):
    """A box in numpy that knows 0 and 1 only: no gradient passes it, and a small change mostly changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy((x.numpy() > 0).astype(np.float32)).to(x.device)


def stepped(seed: int) -> nn.Module:
    """Convolutions on both sides of a box: the layer before it can't be trained by backpropagation, the others can."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2, padding=2),
            Steps(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2, ceil_mode=True),
            nn.Flatten(),
            nn.Linear(256, 10),
        )


def tabular(seed: int) -> nn.Module:
    """For the synthetic table of `datasets.synthetic`."""
    return models.mlp((40, 32, 4), seed=seed)


def tabular_linear() -> nn.Module:
    return _zero(40, 4)


def _zero(inputs: int, classes: int) -> nn.Module:
    linear = nn.Linear(inputs, classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(linear)


def adult_linear() -> nn.Module:
    """For `datasets.adult`."""
    return _zero(42, 2)


def adult_mlp(seed: int) -> nn.Module:
    return models.mlp((42, 32, 2), seed=seed)
