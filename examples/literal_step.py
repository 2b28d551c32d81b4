"""One step of hidden-direction without the library: plain torch, one record after the other, one pass after the other.

What one learns: all that a step does. The library gives the same numbers (tests/examples compares them), only faster: it replays
what lies behind a layer, and takes records, layers and repeats together. It also does what is left out here: it checks the model,
charges the ledger, draws from a safe generator, and rounds the noised sum to a grid. torch's own generator, used below, is not safe
(docs/pitfalls.md).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

RADIUS, REPEATS, BOUND = 0.1, 4, 1.0  # how far to move, directions per record and layer, how much a record may add per layer


def literal_step(
    model: nn.Module, batch: tuple[Tensor, Tensor], z: dict[str, Tensor], noise: dict[str, Tensor], noise_std: float, size: float
) -> dict[str, Tensor]:
    """The private gradient of every parameter of the linear layers of `model`.

    z      for each layer directions of length 1 (repeats, records, outputs): fresh, and secret for ever
    noise  for each parameter standard normal numbers in its shape: fresh, and secret for ever
    size   the expected size of a batch: public. The size that this batch happens to have is private
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    total = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for i, (record, target) in enumerate(zip(*batch, strict=True)):
        for name, layer in layers.items():
            seen, clean_loss = loss(model, layer, record, target)  # the clean pass
            for direction in z[name][:, i]:
                move = RADIUS * math.sqrt(layer.out_features) * direction
                _, moved_loss = loss(model, layer, record, target, move)
                bit = torch.sign(moved_loss - clean_loss)  # did the loss rise or fall along this direction?
                signal = BOUND / REPEATS * bit * direction  # at most BOUND / REPEATS long
                length = math.sqrt(seen.square().sum().item() + 1)  # of the input with the constant 1 of the bias
                total[f"{name}.weight"] += torch.outer(signal, seen / length)  # so the record adds at most BOUND in all
                total[f"{name}.bias"] += signal / length
    for name in total:
        total[name] += noise_std * noise[name]  # NOISE. All that follows may be seen by everybody
    return {name: value / size / mean_overlap(layers[name.rpartition(".")[0]].out_features) for name, value in total.items()}


def loss(model: nn.Module, layer: nn.Module, record: Tensor, target: Tensor, move: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """One pass with the layer's output moved: what went into the layer, and the record's loss."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.append(args[0][0])
        return output + move

    handle = layer.register_forward_hook(hook)
    value = cross_entropy(model(record.unsqueeze(0)), target.unsqueeze(0))
    handle.remove()
    return seen[0], value


def mean_overlap(dim: int) -> float:
    """E|z_1| of a direction z: a kept sign points that far along the gradient on average. A public scale of the learning rate."""
    return math.exp(math.lgamma(dim / 2) - math.lgamma((dim + 1) / 2)) / math.sqrt(math.pi)


@torch.no_grad()
def main(steps: int = 30, rate: float = 0.05, noise_std: float = 1.0) -> float:
    """Train a small model; return its accuracy. On which side of a plane does a point lie?"""
    torch.manual_seed(0)
    x = torch.randn(1_000, 4)
    y = (x.sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    for _ in range(steps):
        batch = torch.rand(len(x)) < rate  # Poisson sampling: every record by a coin of its own
        drawn = {"0": torch.randn(REPEATS, int(batch.sum()), 8), "2": torch.randn(REPEATS, int(batch.sum()), 2)}
        z = {name: normal / normal.norm(dim=2, keepdim=True) for name, normal in drawn.items()}
        noise = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        gradient = literal_step(model, (x[batch], y[batch]), z, noise, noise_std, rate * len(x))
        for name, parameter in model.named_parameters():
            parameter -= 0.5 * gradient[name]
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    print(f"accuracy {accuracy:.3f} after {steps} steps")
    return accuracy


if __name__ == "__main__":
    main()
