"""What is compared: each peer is made for a model, data and a batch size, and gives a function that takes one whole training step.

A step means sampling, gradients, noise and optimizer. All peers hold the data in memory and fetch a batch by one indexing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr

Step = Callable[[], None]
NOISE, RATE = 2.0, 0.05


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def plain(model: nn.Module, data: TensorDataset, batch: int) -> Step:
    """Ordinary training: shuffled batches, backpropagation, no privacy."""
    inputs, targets = data.tensors
    sgd, loss_fn = optimizer(model), nn.CrossEntropyLoss()

    def batches() -> Iterator[Tensor]:
        while True:
            yield from torch.randperm(len(targets))[: len(targets) // batch * batch].view(-1, batch)

    indices = batches()

    def step() -> None:
        rows = next(indices)
        sgd.zero_grad()
        loss_fn(model(inputs.index_select(0, rows)), targets[rows]).backward()
        sgd.step()

    return step


def opacus(mode: Literal["ghost", "hooks"]) -> Callable[[nn.Module, TensorDataset, int], Step]:
    def make(model: nn.Module, data: TensorDataset, batch: int) -> Step:
        from reproduction.opacus import private_steps  # here, so that measuring memory loads nothing of it

        steps = private_steps(model, optimizer(model), data, batch_size=batch, noise_multiplier=NOISE, mode=mode)
        return lambda: next(steps)

    return make


def ours(mechanism: Any, noise: float | None = NOISE) -> Callable[[nn.Module, TensorDataset, int], Step]:
    """Our engine, with everything a user pays for: the ledger, the checks of each batch, float64 noise."""

    def make(model: nn.Module, data: TensorDataset, batch: int) -> Step:
        engine = dpulr.PrivacyEngine(
            model,
            optimizer(model),
            data,
            nn.CrossEntropyLoss(reduction="none"),
            mechanism=mechanism,
            batch_size=batch,
            steps=10**6,
            noise_multiplier=noise,
        )
        stream = engine.batches()

        def step() -> None:
            engine.step(*next(stream))

        return step

    return make


def naive(repeats: int = 16, sigma: float = 0.5) -> Callable[[nn.Module, TensorDataset, int], Step]:
    """Algorithm 1 as it reads: K whole passes per layer, a gradient for each record, averaged and clipped. No controller."""

    def make(model: nn.Module, data: TensorDataset, batch: int) -> Step:
        inputs, targets = data.tensors
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        sgd, loss_fn = optimizer(model), nn.CrossEntropyLoss(reduction="none")

        @torch.no_grad()
        def step() -> None:
            rows = torch.nonzero(torch.rand(len(targets)) < batch / len(targets))[:, 0]
            x, y = inputs[rows], targets[rows]
            for layer in layers:
                gradient = torch.zeros(len(y), layer.out_features, layer.in_features + 1)
                for _ in range(repeats):
                    kept: list[Tensor] = []

                    def noisy(module: nn.Module, args: Any, output: Tensor, kept: list[Tensor] = kept) -> Tensor:
                        kept += [args[0], torch.randn_like(output)]
                        return output + sigma * kept[1]

                    handle = layer.register_forward_hook(noisy)
                    losses = loss_fn(model(x), y)
                    handle.remove()
                    a = torch.cat([kept[0], torch.ones(len(y), 1)], 1)
                    gradient += (losses / sigma)[:, None, None] * kept[1][:, :, None] * a[:, None, :]
                gradient /= repeats
                gradient *= (1 / gradient.flatten(1).norm(dim=1)).clamp(max=1)[:, None, None]
                total = (gradient.sum(0) + NOISE * torch.randn(gradient.shape[1:])) / batch
                layer.weight.grad, layer.bias.grad = total[:, :-1].clone(), total[:, -1].clone()
            sgd.step()

        return step

    return make


def passes(repeats: int = 16) -> Callable[[nn.Module, TensorDataset, int], Step]:
    """Only the passes of `paper`: one clean, and for each layer K noisy replays of what lies behind it. The losses are not used."""

    def make(model: nn.Module, data: TensorDataset, batch: int) -> Step:
        modules = [module for module in model.modules() if not list(module.children())]
        inputs, targets = data.tensors
        loss_fn, rng = nn.CrossEntropyLoss(reduction="none"), np.random.default_rng()

        @torch.inference_mode()
        def step() -> None:
            rows = torch.from_numpy(rng.choice(len(targets), batch, replace=False))
            x, y = inputs.index_select(0, rows), targets[rows]
            many = y.repeat(repeats)
            for i, module in enumerate(modules):
                x = module(x)
                if isinstance(module, nn.Linear | nn.Conv2d):
                    noise = rng.standard_normal((repeats, *x.shape), dtype=np.float32)
                    out = torch.from_numpy(noise).mul_(0.5).add_(x).flatten(0, 1)
                    for later in modules[i + 1 :]:
                        out = later(out)
                    loss_fn(out.t().unsqueeze(0), many.unsqueeze(0))

        return step

    return make


def floor(repeats: int = 1, dims: int = 16) -> Callable[[nn.Module, TensorDataset, int], Step]:
    """The bare matrix products and normal draws of hidden-direction: no activation, no loss, no copy, no bookkeeping."""

    def make(model: nn.Module, data: TensorDataset, batch: int) -> Step:
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        weights = [layer.weight.detach().t().contiguous() for layer in layers]
        clean = [torch.randn(batch, weight.shape[0]) for weight in weights]
        many = [torch.randn(repeats * batch, weight.shape[0]) for weight in weights]
        kept = [min(dims, weight.shape[1]) for weight in weights]
        bases = [torch.randn(m, weight.shape[1]) for m, weight in zip(kept, weights, strict=True)]
        size = sum(m * (weight.shape[0] + 1) for m, weight in zip(kept, weights, strict=True))
        rng = np.random.default_rng()

        @torch.inference_mode()
        def step() -> None:
            for i, weight in enumerate(weights):
                clean[i] @ weight
                z = torch.from_numpy(rng.standard_normal((repeats * batch, kept[i]), dtype=np.float32))
                z @ bases[i]
                for later in range(i + 1, len(weights)):
                    many[later] @ weights[later]
                z[:batch].t() @ clean[i]
            rng.standard_normal(size)

        return step

    return make


def peers() -> dict[str, Callable[[nn.Module, TensorDataset, int], Step]]:
    hidden = dpulr.HiddenDirection
    return {
        "plain SGD": plain,
        "Opacus, ghost": opacus("ghost"),
        "Opacus, hooks": opacus("hooks"),
        "gradient": ours(dpulr.Gradient()),
        "hidden-direction, K = 1": ours(hidden(repeats=1)),
        "hidden-direction, K = 1, both ways": ours(hidden(repeats=1, antithetic=True)),
        "hidden-direction, K = 4": ours(hidden(repeats=4)),
        "hidden-direction, K = 16": ours(hidden(repeats=16)),
        "gaussian, 16 pairs": ours(dpulr.Gaussian(repeats=16)),
        "zeroth-order, 16 directions": ours(dpulr.ZerothOrder(repeats=16)),
        "paper, K = 16": ours(dpulr.Paper(target_std=NOISE, repeats=16, remedy="extra-noise"), None),
        "passes of paper, K = 16": passes(),
        "naive DP-ULR, K = 16": naive(),
        "floor of hidden-direction, K = 1": floor(),
    }


def mnist_like(records: int = 60_000) -> TensorDataset:
    return TensorDataset(torch.randn(records, 784), torch.randint(0, 10, (records,)))


def cifar_like(records: int = 4_000) -> TensorDataset:
    return TensorDataset(torch.randn(records, 3, 32, 32), torch.randint(0, 10, (records,)))


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope in logarithms: how a cost grows."""
    return float(np.polyfit([math.log(v) for v in x], [math.log(v) for v in y], 1)[0])
