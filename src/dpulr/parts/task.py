"""`dpulr.auto` for an engine: its task, which is what everybody may know of a run, with the shapes of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dpulr import auto
from dpulr.mechanisms import Mechanism
from dpulr.model.forward import Forward
from dpulr.model.layers.base import numel
from dpulr.model.sites import Site
from dpulr.plan import Request

_ADAPTIVE = (torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RAdam)


def task_of(mechanism: Mechanism, forward: Forward, optimizer: torch.optim.Optimizer, request: Request) -> tuple[auto.Task, int]:
    """What is public of a run, and its batch size. A private number of records is not looked at."""
    records, size = request.records, max(1, round(request.expected))
    if request.batch_size is None:
        records = max(1, round(request.expected / request.rate))
    task = auto.Task(
        mechanism.name,
        records,
        shapes(forward.sites) or _matrices(forward.model),
        request.target_epsilon,
        request.target_delta,
        request.epochs,
        request.steps,
        noise_multiplier=request.noise_multiplier,
        adaptive=isinstance(optimizer, _ADAPTIVE),
    )
    return task, size


def shapes(sites: Sequence[Site]) -> tuple[auto.Layer, ...]:
    """The layers as `dpulr.auto` sees them."""
    found = []
    for site in sites:
        parameters = list(site.parameters.values())
        rows = max((p.shape[0] for p in parameters if p.dim() > 1), default=1)
        positions = max(1, numel(site.output_shape) // max(1, rows)) if len(site.output_shape) > 1 else 1
        found.append(auto.Layer(site.fan_in + 1, sum(p.numel() for p in parameters), positions))
    return tuple(found)


def _matrices(model: nn.Module) -> tuple[auto.Layer, ...]:
    """The same where a mechanism has no use for layers."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = tuple(auto.Layer(numel(p.shape[1:]) + 1, p.numel()) for p in trained if p.dim() > 1)
    return matrices or (auto.Layer(1, max(1, sum(p.numel() for p in trained))),)
