"""Algorithm 1 of the paper, transcribed literally; and the models, records and settings that the tests of `paper` share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr.paper.step import FittedPaper
from dpulr.randomness import RandomSource, normal_float32
from tests.support.core import LOSS, engine, fit, points

SIGMA0 = 0.9
BASE: dict[str, Any] = {"repeats": 3, "max_grad_norm": 0.7, "sigma": 0.4}


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)),
        nn.Conv1d(1, 4, 2),
        nn.Tanh(),
        nn.Conv1d(4, 2, 2, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def images() -> nn.Module:
    """Convolutions whose gradients are smaller than their patches, so that they are made record by record."""
    return nn.Sequential(
        nn.Linear(5, 36),
        nn.Unflatten(1, (1, 6, 6)),
        nn.Conv2d(1, 2, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(2, 2, (3, 2), stride=(1, 2), dilation=(2, 1), padding=(2, 0), groups=2),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


class Residual(nn.Module):
    """A branch beside the first layer, and one around the last."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.left(x).tanh() + self.right(x)
        return self.out(x) + x


def data(records: int = 12) -> TensorDataset:
    return points(records, 5, torch.float64)


def engine_for(model: nn.Module, records: TensorDataset, settings: dpulr.Paper, **more: Any) -> dpulr.PrivacyEngine:
    options = {"batch_size": 6, "steps": 1, "insecure_noise_seed": 12, "noise_multiplier": None} | more
    return engine(model, records, learning_rate=1.0, mechanism=settings, **options)


def fitted_to(make: Any, settings: dpulr.Paper, records: int, **more: Any) -> tuple[FittedPaper, Tensor, Tensor]:
    """The mechanism fitted to a model in float64, and a batch of so many records."""
    torch.manual_seed(0)
    x, y = data(records).tensors
    noise = SIGMA0 if settings.target_std is None else None
    return fit(settings, make().double(), (x[:1], y[:1]), noise=noise, **more), x, y


class Literal:
    """One step of Algorithm 1, record by record, layer by layer and draw by draw, with dense Jacobians by autograd."""

    def __init__(self, model: nn.Module, records: TensorDataset, settings: dpulr.Paper, *, rate: float, threshold: int) -> None:
        self.model, self.records, self.settings = model, records, settings
        source = RandomSource(12)
        self.directions, self.noise = source.numpy("directions"), source.numpy("noise")
        self.covariances: dict[nn.Module, Tensor] = {}
        self.layers = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
        coins, size = source.numpy("batches"), -1
        while size < threshold:
            size = coins.binomial(len(records), rate)
        self.batch = [records[row] for row in coins.choice(len(records), size, replace=False)]

    def run(self, x: Tensor, y: Tensor, at: dict[nn.Module, Tensor]) -> tuple[Tensor, dict[nn.Module, tuple[Tensor, Tensor]]]:
        """The loss with noise added to the outputs of some layers; and every layer's output before it, with its input."""
        seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

        def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
            seen[module] = ([*args, *kwargs.values()][0].detach().clone(), output)
            return output + at[module].view_as(output) if module in at else output

        handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in self.layers]
        loss = LOSS(self.model(x.unsqueeze(0)), y.unsqueeze(0))[0]
        for handle in handles:
            handle.remove()
        return loss, seen

    def jacobian(self, layer: nn.Module, x: Tensor) -> Tensor:
        """D v of a layer with respect to its parameters, at its input x: one row per output."""
        output = layer(x).flatten()
        units = torch.eye(len(output), dtype=output.dtype)
        parts = torch.autograd.grad(output, list(layer.parameters()), units, is_grads_batched=True)
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def covariance(self, layer: nn.Module) -> Tensor:
        """sum over the batch of L_0^2 J^T J, in full."""
        if layer in self.covariances:
            return self.covariances[layer]
        total = 0
        for x, y in self.batch:
            loss, seen = self.run(x, y, {})
            jacobian = self.jacobian(layer, seen[layer][0])
            total = total + loss.item() ** 2 * jacobian.t() @ jacobian
        self.covariances[layer] = total
        return total

    def sigma(self, layer: nn.Module, std: float, repeats: int, clip: float) -> tuple[float, bool]:
        """The controller: eq:sigma, at most the given sigma; or the given one, with extra noise."""
        most = self.settings.sigma
        if std == 0:
            return most, False
        values = torch.linalg.eigvalsh(self.covariance(layer))
        if self.settings.remedy == "extra-noise" or values[0] < 1e-10 * values[-1]:
            return most, True
        return min(most, math.sqrt(values[0].item() / (repeats * clip**2 * std**2))), False

    def normals(self, layer: nn.Module, repeats: int) -> Tensor:
        width = self.run(*self.batch[0], {})[1][layer][1].numel()
        numbers = normal_float32(self.directions, repeats * len(self.batch) * width)
        return torch.from_numpy(numbers).view(repeats, len(self.batch), width).double()

    def gradient(self, layer: nn.Module, estimates: list[Tensor], std: float, repeats: int, clip: float) -> Tensor:
        """Clip each record, add up, add the extra noise; not yet divided."""
        total = sum(g / max(1, g.norm().item() / clip) for g in estimates)
        sigma, extra = self.sigma(layer, std, repeats, clip)
        xi = torch.from_numpy(self.noise.standard_normal(len(total)))  # the stream goes on, layer by layer
        if extra:
            values, q = torch.linalg.eigh(self.covariance(layer) / sigma**2)
            lacking = (std**2 * clip**2 - values / repeats).clamp_min(0)
            total = total + q @ torch.diag(lacking.sqrt()) @ q.t() @ xi
        return total

    def step(self, stds: Any, all_repeats: Any = 3, clips: Any = 0.7) -> list[Tensor]:
        """The sums over the batch, one flat vector per layer. Settings are numbers, or one for each layer."""
        sums = []
        if self.settings.simultaneous:
            return self.step_together(stds, all_repeats, clips)
        own = zip(*(v if isinstance(v, tuple) else (v,) * len(self.layers) for v in (stds, all_repeats, clips)), strict=True)
        for layer, (std, repeats, clip) in zip(self.layers, own, strict=True):
            sigma, _ = self.sigma(layer, std, repeats, clip)
            z = sigma * self.normals(layer, repeats)
            estimates = []
            for i, (x, y) in enumerate(self.batch):
                jacobian = self.jacobian(layer, self.run(x, y, {})[1][layer][0])
                proxies = [
                    jacobian.t() @ (z[k, i] * self.run(x, y, {layer: z[k, i]})[0].detach()) / sigma**2 for k in range(repeats)
                ]
                estimates.append(sum(proxies) / repeats)
            sums.append(self.gradient(layer, estimates, std, repeats, clip))
        return sums

    def step_together(self, std: float, repeats: int, clip: float) -> list[Tensor]:
        """ULR: noise at all layers in one pass, with the Jacobians at the noisy inputs."""
        sigmas = {layer: self.sigma(layer, std, repeats, clip)[0] for layer in self.layers}
        z = {layer: sigmas[layer] * self.normals(layer, repeats) for layer in self.layers}
        estimates: dict[nn.Module, list[Tensor]] = {layer: [] for layer in self.layers}
        for i, (x, y) in enumerate(self.batch):
            means: dict[nn.Module, Any] = dict.fromkeys(self.layers, 0)
            for k in range(repeats):
                loss, seen = self.run(x, y, {layer: z[layer][k, i] for layer in self.layers})
                for layer in self.layers:
                    jacobian = self.jacobian(layer, seen[layer][0])
                    means[layer] = means[layer] + jacobian.t() @ (z[layer][k, i] * loss.item()) / (sigmas[layer] ** 2 * repeats)
            for layer in self.layers:
                estimates[layer].append(means[layer])
        return [self.gradient(layer, estimates[layer], std, repeats, clip) for layer in self.layers]
