"""The paper's other models, for `Settings.model` ("reproduction.models:medium"). The small MLP is the package's `mlp`."""

from __future__ import annotations

import torch
from torch import nn

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
