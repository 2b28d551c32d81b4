"""Where the paper's privacy claim fails: ten functions, each of which computes the numbers that docs/errata.md quotes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr import accounting
from dpulr.accounting.rejection import odds
from dpulr.errors import ModelRefused
from dpulr.paper.mechanism import Paper
from dpulr.randomness import RandomSource
from dpulr.sampling import ShuffledSampling

LOSS = nn.CrossEntropyLoss(reduction="none")
Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Erratum:
    """`sentence` says what the numbers of `compute` are."""

    title: str
    sentence: str
    compute: Callable[[], Numbers]

    def shown(self) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.sentence.format(*self.compute())


ERRATA: list[Erratum] = []


def erratum(title: str, sentence: str) -> Callable[[Callable[[], Numbers]], Callable[[], Numbers]]:
    def add(compute: Callable[[], Numbers]) -> Callable[[], Numbers]:
        ERRATA.append(Erratum(title, sentence, cache(compute)))
        return compute

    return add


@erratum("Layers are clipped one by one", "One record moves 4 layers by {:.4f} in all; the theorem has C = 1.")
def layers() -> Numbers:
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(1, 1, 28, 28), torch.zeros(1, dtype=torch.int64))
    released = releases(Paper(target_std=0, sigma=0.001), dpulr.models.mlp(seed=0), data, 1)
    return (float(np.linalg.norm(released)),)


@erratum(
    "The noise is credited before clipping",
    "Smallest variance of the gradient of a batch of 64 in the first layer of a small model, over 500 draws: credited {:.1f}, "
    "after clipping {:.2f}.",
)
def credited_before_clipping() -> Numbers:
    sigma0, (model, x, y) = 4.0, _toy(64)
    released = releases(Paper(target_std=sigma0, sigma=1e3), model, TensorDataset(x, y), 500)
    first = released[:, : _first_layer(model)]
    return sigma0**2, float(np.linalg.eigvalsh(np.cov(first.T))[0])


@erratum(
    "The covariance depends on the record it should hide",
    "D_2(N(0, 65 I), N(0, 64 I)) = {:.2f} in 100,352 dimensions; a shift of 1 at sigma0 = 4 has {:g}.",
)
def covariance() -> Numbers:
    return 100_352 * math.log(64 / math.sqrt(65 * (2 * 64 - 65))), 2 / (2 * 4**2)


@erratum("sigma is itself a release", "sigma of the first layer without the odd record: {:.5f}, with it: {:.5f}.")
def sigma_is_released() -> Numbers:
    sigmas = []
    for odd_one in (False, True):
        model, x, y = _toy(64, rare=0.01)
        if odd_one:
            x, y = torch.cat([x, 5 * torch.eye(6)[5:]]), torch.cat([y, y[:1]])
        fitted = _engine(Paper(target_std=4.0, sigma=1e3), model, TensorDataset(x, y), 1).fitted
        with torch.inference_mode():
            total = fitted.sum_of_bounded_signals((x, y), fitted.draw_public(0), RandomSource(1).directions(x.device))
        sigmas.append(total.controls[0].sigma)
    return tuple(sigmas)


@erratum("The Gaussian law is only asymptotic in K", "Kurtosis of a mean of K = 16 proxies: {:.2f}; a normal law has 3.")
def heavy_tails() -> Numbers:
    z = np.random.default_rng(0).standard_normal((16, 400_000))
    means = (z * np.logaddexp(0, 3 * z)).mean(0)
    centred = means - means.mean()
    return (float((centred**4).mean() / (centred**2).mean() ** 2),)


@erratum(
    "Rejection at N_B = qN is not negligible",
    "T x impairment over 25 epochs of MNIST at q = 1/938, 1/300, 1/120: {:.3f}, {:.3f}, {:.3f}.",
)
def rejection() -> Numbers:
    return tuple(25 * n * odds(1 / n, int(60_000 / n + 1e-9), 60_000) for n in (938, 300, 120))


@erratum("The experiments shuffle", "How often a record comes in an epoch of shuffled batches: at least {:.0f}, at most {:.0f}.")
def shuffling() -> Numbers:
    rng, sampler = np.random.default_rng(0), ShuffledSampling(10)
    counts = np.bincount(np.concatenate([sampler.draw(100, rng) for _ in range(10)]), minlength=100)
    return float(counts.min()), float(counts.max())


@erratum(
    "The theorem's conditions are not met",
    "sigma0 = 0.5, q = 1/938, 25 epochs: the formula gives {:.2f}, the Gaussian mechanism costs {:.2f}.",
)
def conditions() -> Numbers:
    setting: dict[str, Any] = {"sample_rate": 1 / 938, "steps": 23_450, "delta": 1e-5}
    free = {"rejection_threshold": 1, "dataset_size": 60_000}  # a threshold so low that rejection costs nothing
    formula = accounting.paper_nominal_epsilon(target_std=0.5, ignore_conditions=True, **free, **setting)
    return formula, accounting.gaussian_epsilon(noise_multiplier=0.5, **setting)


@erratum(
    '"The other direction is similar" is not',
    "Share of the batches of D and x that D cannot produce, N = 10,000, qN = N_B = 100: {:.2e} per step.",
)
def other_direction() -> Numbers:
    ratio = odds(0.01, 100, 10_000)
    return (ratio / (1 + ratio),)


@erratum("Losses that are not a sum over records", "Losses with the batch's mean taken off that the engine accepts: {:.0f} of 1.")
def losses_that_mix() -> Numbers:
    model, x, y = _toy(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def contrast(output: Tensor, target: Tensor) -> Tensor:
        losses: Tensor = LOSS(output, target)
        return losses - losses.mean()

    try:
        dpulr.PrivacyEngine(model, optimizer, TensorDataset(x, y), contrast, batch_size=8, steps=1, noise_multiplier=1.0)
    except ModelRefused:
        return (0.0,)
    return (1.0,)


# --- what they use --------------------------------------------------------------------------------------------------------
def releases(mechanism: Paper, model: nn.Module, data: TensorDataset, steps: int) -> np.ndarray:
    """What the engine releases in so many steps on all of the data, on a model that stands still: sums, a row per step."""
    engine = _engine(mechanism, model, data, steps)
    heard: list[np.ndarray] = []
    engine.on_release(lambda released: heard.append(released.values.double().cpu().numpy()))
    for batch in engine.batches():
        engine.step(*batch)
    return np.stack(heard)


def _engine(mechanism: Paper, model: nn.Module, data: TensorDataset, steps: int) -> dpulr.PrivacyEngine:
    return dpulr.PrivacyEngine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        data,
        LOSS,
        mechanism=mechanism,
        expected_batch_size=float(len(data)),
        sample_rate=1.0,
        steps=steps,
        insecure_noise_seed=1,
    )


def _toy(records: int, rare: float = 1.0) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A small model, and records whose last feature is scaled by `rare`."""
    torch.manual_seed(0)
    x = torch.randn(records, 6)
    x[:, 5] *= rare
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), x, torch.arange(records) % 3


def _first_layer(model: nn.Sequential) -> int:
    return sum(parameter.numel() for parameter in model[0].parameters())


def parts() -> dict[str, str]:
    """The numbers of docs/errata.md, by the places where they stand."""
    return {f"erratum {number}": item.shown() for number, item in enumerate(ERRATA, 1)}


def text() -> str:
    return "\n".join(f"{number}. {item.title}: {item.shown()}" for number, item in enumerate(ERRATA, 1))
