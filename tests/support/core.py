"""Data, models, engines and fitted mechanisms that the core's tests share: small enough for milliseconds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr.mechanisms import Mechanism
from dpulr.model.prepare import prepare
from dpulr.plan import Request
from dpulr.randomness import RandomSource

LOSS = nn.CrossEntropyLoss(reduction="none")
CPU = torch.device("cpu")
NO_PUBLIC = object()


# --- data and models ------------------------------------------------------------------------------------------------------
def blobs(records: int = 200, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Two clouds of points, one for each class."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(records) % 2
    x = torch.randn(records, 4, generator=generator, dtype=dtype) + 3 * (y.to(dtype).unsqueeze(1) - 0.5)
    return TensorDataset(x, y)


def points(records: int = 40, features: int = 6, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Normal points with one of three labels."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(records, features, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.arange(records) % 3)


def small_mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    """For `blobs`."""
    return dpulr.models.mlp((4, 8, 2), seed=0).to(dtype)


def mlp() -> nn.Module:
    """For `points` of 6 features: two layers, both in output space."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def normed_mlp() -> nn.Module:
    """For `points` of 5 features: three layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3))


def all_kinds() -> nn.Module:
    """For `points` of 6 features: output space (linear), weight space (convolution, norm), the generic rule (PReLU)."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Conv1d(1, 3, 2),
        nn.GroupNorm(1, 3),
        nn.PReLU(3),
        nn.Flatten(),
        nn.Linear(15, 4),
        nn.Linear(4, 3),
    )


# --- engines --------------------------------------------------------------------------------------------------------------
def engine(
    model: nn.Module | None = None,
    data: Any = None,
    *,
    loss_fn: Any = LOSS,
    optimizer: Any = None,
    learning_rate: float = 0.1,
    **settings: Any,
) -> dpulr.PrivacyEngine:
    """An engine with defaults for whatever a test does not care about."""
    model = small_mlp() if model is None else model
    if optimizer is None:
        optimizer = torch.optim.SGD(list(model.parameters()) or [nn.Parameter(torch.zeros(1))], lr=learning_rate)
    defaults: dict[str, Any] = {"mechanism": dpulr.Gaussian(repeats=2), "steps": 4, "noise_multiplier": 1.0}
    if "sample_rate" not in settings:
        defaults["batch_size"] = 20
    return dpulr.PrivacyEngine(model, optimizer, blobs() if data is None else data, loss_fn, **{**defaults, **settings})


def train(private: dpulr.PrivacyEngine, steps: int | None = None) -> int:
    """All planned steps, or so many of them. Returns how many were taken."""
    taken = 0
    for batch in private.batches(steps):
        private.step(*batch)
        taken += 1
    return taken


def gradient(model: nn.Module) -> Tensor:
    """The gradients that the last step has left, as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    with torch.no_grad():
        return (model(x).argmax(1) == y).double().mean().item()


def named(mechanism: Mechanism) -> str:
    """The name of a mechanism and the settings that are not its defaults, for the names of tests."""
    plain = type(mechanism)()
    changed = {field.name: getattr(mechanism, field.name) for field in dataclasses.fields(mechanism)}
    return " ".join([mechanism.name, *(f"{k}={v}" for k, v in changed.items() if v != getattr(plain, k))])


# --- fitted mechanisms ----------------------------------------------------------------------------------------------------
def fit(
    mechanism: Mechanism,
    model: nn.Module,
    example: tuple[Any, Any] | None = None,
    *,
    loss_fn: Any = LOSS,
    noise: float = 1.0,
    method: str = "auto",
    memory_limit: int | None = None,
    seed: int = 0,
    **request: Any,
) -> Any:
    """The mechanism fitted to a model, with a plan of one step. `example` is a batch of one record."""
    example = (torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64)) if example is None else example
    kinds = {"shared": mechanism.shares_parameters, "sites": mechanism.uses_sites}
    forward = prepare(model, loss_fn, example, CPU, space=mechanism.space, method=method, **kinds)
    asked = Request(**{"records": 100, "batch_size": 10, "steps": 1, "noise_multiplier": noise, **request})
    return mechanism.fit(forward, mechanism.plan(asked, forward.sites), memory_limit=memory_limit, seed=seed)


def total(fitted: Any, inputs: Any, targets: Any, seed: int = 1, public: Any = NO_PUBLIC) -> Any:
    """The sum of bounded signals over these records, with secret directions from `seed`."""
    with torch.inference_mode():
        public = fitted.draw_public(0) if public is NO_PUBLIC else public
        return fitted.sum_of_bounded_signals((inputs, targets), public, directions(seed, fitted.forward.dtype))


def parts_of(fitted: Any, inputs: Any, targets: Any, seed: int = 1) -> list[Tensor]:
    """`total`, part by part of the release."""
    return [part.clone() for part in fitted.parts(total(fitted, inputs, targets, seed))]


def directions(seed: int, dtype: torch.dtype = torch.float32) -> Any:
    return RandomSource(seed).directions(CPU, dtype)


def rounded(values: Any, noise_std: float) -> Any:
    """Onto the public grid of a release: the power of two at or below the noise, over 1,024."""
    spacing = 2.0 ** (math.floor(math.log2(noise_std)) - 10)
    return (values / spacing).round() * spacing


def state_of(stream: np.random.Generator) -> str:
    """What a generator will draw next, as text."""
    return str(stream.bit_generator.state)


class Kept(RandomSource):
    """Keeps the streams that it hands out, by purpose."""

    def __init__(self, insecure_seed: int | None = None) -> None:
        super().__init__(insecure_seed)
        self.streams: dict[str, np.random.Generator] = {}

    def numpy(self, purpose: str) -> np.random.Generator:
        assert purpose not in self.streams
        self.streams[purpose] = super().numpy(purpose)
        return self.streams[purpose]
