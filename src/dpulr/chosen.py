"""`dpulr.auto` for an engine: the public shapes of a model, the optimizer that "auto" means, and what a step takes here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from dpulr import auto
from dpulr.mechanisms import Mechanism
from dpulr.model.batches import synthetic
from dpulr.model.forward import Forward
from dpulr.model.layers.base import numel
from dpulr.model.sites import Site
from dpulr.randomness import RandomSource

if TYPE_CHECKING:
    from dpulr.engine import PrivacyEngine

_TIMED_RECORDS = 256
_ADAPTIVE = (torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RAdam)


def task_of(
    mechanism: Mechanism,
    forward: Forward,
    optimizer: torch.optim.Optimizer,
    *,
    records: int,
    batch_size: int | None,
    expected_batch_size: float | None,
    sample_rate: float | None,
    epochs: float | None,
    steps: int | None,
    target_epsilon: float | None,
    target_delta: float,
    noise_multiplier: float | None,
) -> tuple[auto.Task, int | None]:
    """What is public of a run, and the batch size if it was given. A private number of records is not looked at."""
    if expected_batch_size is not None and sample_rate is not None:
        records, batch_size = max(1, round(expected_batch_size / sample_rate)), max(1, round(expected_batch_size))
    task = auto.Task(
        mechanism.name,
        records,
        shapes(forward.sites) or _matrices(forward.model),
        target_epsilon,
        target_delta,
        epochs,
        steps,
        noise_multiplier=noise_multiplier,
        adaptive=isinstance(optimizer, _ADAPTIVE),
    )
    return task, batch_size


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


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum; its learning rate is set before every step."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0, momentum=auto.MOMENTUM)


def seconds_per_step(engine: PrivacyEngine) -> float:
    """About what a step takes here: passes of synthetic records, and the noise. Reading records is not in it."""
    forward, size = engine.forward, engine.expected_batch_size
    records = max(1, min(_TIMED_RECORDS, round(size)))
    generator = torch.Generator().manual_seed(0)
    batch = synthetic(engine.records.example, records, generator, forward.device)
    source = RandomSource(0)
    directions, noise = source.directions(forward.device, forward.dtype), source.noise(engine.fitted.size)
    with engine._computing():
        public = engine.fitted.draw_public(0)
        spent = []
        for _ in range(2):  # the first time, programs are made
            started = time.perf_counter()
            total = engine.fitted.sum_of_bounded_signals(batch, public, directions)
            passed = time.perf_counter()
            engine.fitted.privatise(total, noise.draw().to(forward.device))
            spent.append(((passed - started) * size / records, time.perf_counter() - passed))
    return sum(spent[-1])
