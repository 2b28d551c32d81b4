"""Games: many independent releases with the canary and without it, from the real engine.

`RowsGame` plays thousands of games in one step. Its model is a table; each game owns a row, and its canary is the only record that
looks that row up. The engine's sampler draws each canary on its own, the mechanism bounds it on its own, and the noise of each row
is independent. Rows without a record are the releases without the canary.

`BatchGame` plays one game a step, on any model and data, with the canary in one engine's data set and not in the other's.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpulr.accounting.events import GaussianRelease, HiddenDirectionRelease, PaperRelease, SampledStep
from dpulr.audit import attacks
from dpulr.audit.attacks import Attack, Probe
from dpulr.audit.bounds import Array
from dpulr.audit.claims import Claim
from dpulr.audit.ratios import gaussian_log_ratio, hidden_log_ratio
from dpulr.engine import PrivacyEngine
from dpulr.mechanisms import Mechanism, by_name
from dpulr.mechanisms.zeroth_order import BoundZerothOrder
from dpulr.sampling import PoissonSampling

LossFunction = Callable[[Any, Any], Tensor]
Canary = tuple[Tensor, Tensor]
_ENDLESS = 10**9
_NUMBERS = 1 << 20  # numbers in one release of many rows
_SIMULATIONS = 200


class Game(ABC):
    """`releases` gives arrays (games, steps, size) without and with the canary, until the caller has enough."""

    name = "one step"
    mechanism: str
    claim: Claim
    steps: int

    @abstractmethod
    def releases(self) -> Iterator[tuple[Array, Array]]: ...

    @abstractmethod
    def signals(self) -> Array:
        """(simulations, size): what the canary alone adds to a release. An attacker can simulate it."""

    def attacks(self) -> list[Attack]:
        """The scores to try."""
        found = [attacks.projection(), attacks.quadratic()]
        return [*found, attacks.steps_apart()] if self.steps > 1 else found

    def features(self, trials: int) -> tuple[Array, Array]:
        """Features of `trials` games of each kind."""
        probe = Probe.of(self.signals())
        out: list[Array] = []
        inside: list[Array] = []
        count = 0
        for without, having in self.releases():
            out.append(probe.features(without))
            inside.append(probe.features(having))
            count += len(without)
            if count >= trials:
                break
        return np.concatenate(out)[:trials], np.concatenate(inside)[:trials]


def engine_claim(engine: PrivacyEngine, steps: int) -> Claim:
    """What the engine charges for so many steps; the paper's release as the Gaussian mechanism that its proof takes it for."""
    release = engine.bound.event_at(engine.noise_multiplier)
    nominal = isinstance(release, PaperRelease)
    if isinstance(release, PaperRelease):
        release = GaussianRelease(release.target_std)
    threshold = engine.sampler.rejection_threshold if isinstance(engine.sampler, PoissonSampling) else 0
    step = SampledStep(release, engine.sample_rate, threshold, engine.min_dataset_size if threshold else None)
    return Claim(step, steps, nominal)


def listen(engine: PrivacyEngine) -> list[Array]:
    """From now on every release of the engine, as a sum (not a mean), is appended to the list. Nothing else changes."""
    heard: list[Array] = []
    pass_on, size = engine.bound.gradients, engine.expected_batch_size

    def gradients(release: Tensor, into: Any) -> None:
        heard.append(release.cpu().numpy() * np.float32(size))
        pass_on(release, into)

    engine.bound.gradients = gradients  # type: ignore[method-assign]
    return heard


def take_steps(
    engine: PrivacyEngine,
    heard: list[Array],
    steps: int,
    seen: Callable[[PrivacyEngine, Array], Array] = lambda engine, release: release,
) -> Array:
    """(steps, size): what is seen of the releases of the next steps."""
    found = []
    for inputs, targets in engine.batches(steps):
        engine.step(inputs, targets)
        found.append(seen(engine, heard.pop()))
    return np.stack(found)


def unmoved(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that leaves the model as it is, so that every release is of the same game."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)


class Table(nn.Module):
    """A row of `dim` numbers for each game."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(rows, dim)
        nn.init.zeros_(self.rows.weight)

    def forward(self, row: Tensor) -> Tensor:
        out: Tensor = self.rows(row)
        return out


def linear_loss(output: Tensor, target: Tensor) -> Tensor:
    """The loss is linear in the layer's output: each sign tells as much as a sign can (docs/audit.md)."""
    return (output * target).sum(1)


class RowsGame(Game):
    """The canary crafted against the mechanism: a linear loss of slope `slope` along the first axis of `dim` dimensions."""

    def __init__(
        self,
        mechanism: str | Mechanism,
        *,
        dim: int,
        noise_multiplier: float,
        sample_rate: float = 1.0,
        steps: int = 1,
        slope: float = 1e4,
        seed: int | None = None,
        rows: int | None = None,
    ) -> None:
        self.dim, self.steps, self.sample_rate = dim, steps, sample_rate
        self.rows = rows or max(1, min(20_000, _NUMBERS // (2 * dim)))
        target = torch.zeros(self.rows, dim)
        target[:, 0] = slope
        model = Table(2 * self.rows, dim)
        self.engine = PrivacyEngine(
            model,
            unmoved(model),
            TensorDataset(torch.arange(self.rows), target),
            linear_loss,
            mechanism=mechanism,
            expected_batch_size=1.0,
            sample_rate=sample_rate,
            steps=_ENDLESS,
            noise_multiplier=noise_multiplier,
            insecure_noise_seed=seed,
        )
        self.mechanism = self.engine.mechanism.name
        self.claim = engine_claim(self.engine, steps)
        self.noise = self.engine.bound.noise_std

    def releases(self) -> Iterator[tuple[Array, Array]]:
        heard = listen(self.engine)
        while True:
            steps = take_steps(self.engine, heard, self.steps).reshape(self.steps, 2 * self.rows, -1)
            games = steps.swapaxes(0, 1)
            yield games[self.rows :], games[: self.rows]

    def signals(self) -> Array:
        return np.eye(1, self.dim)

    def attacks(self) -> list[Attack]:
        release = self.claim.step.release
        if isinstance(release, HiddenDirectionRelease):
            site = release.sites[0]
            if site.repeats > 1:
                return super().attacks()
            noise = site.noise_ratio

            def ratio(along: Array, across: Array) -> Array:
                return hidden_log_ratio(along, across, self.dim, noise)

            return [attacks.likelihood_ratio(ratio, self.sample_rate), *super().attacks()[1:]]
        bound = self.noise / (release.noise_multiplier if isinstance(release, GaussianRelease) else 1.0)

        def shifted(along: Array, across: Array) -> Array:
            return gaussian_log_ratio(along / bound, self.noise / bound)

        return [attacks.likelihood_ratio(shifted, self.sample_rate), *super().attacks()[1:]]


class BatchGame(Game):
    """A canary among the records of a data set, on any model: one game a step (or `steps` of them)."""

    def __init__(
        self,
        mechanism: str | Mechanism,
        *,
        model: nn.Module,
        loss_fn: LossFunction,
        records: tuple[Tensor, Tensor],
        canary: Canary,
        noise_multiplier: float,
        sample_rate: float = 1.0,
        batch_size: float | None = None,
        sampling: Any = "poisson",
        rejection_threshold: int = 0,
        steps: int = 1,
        seed: int | None = None,
        prepared: Callable[[PrivacyEngine], None] = lambda engine: None,
    ) -> None:
        self.steps = steps
        self.canary = (canary[0].unsqueeze(0), canary[1].unsqueeze(0))
        inputs, targets = records
        if self.canary[0].shape[1:] != inputs.shape[1:] or self.canary[1].shape[1:] != targets.shape[1:]:
            raise ValueError(
                f"the canary's shapes are {tuple(canary[0].shape)} and {tuple(canary[1].shape)}; a record of the data has "
                f"{tuple(inputs.shape[1:])} and {tuple(targets.shape[1:])}."
            )
        size = batch_size or max(1.0, sample_rate * len(targets))
        joined = tuple(torch.cat([part, own.to(part.dtype)]) for part, own in zip(records, self.canary, strict=True))
        self.engines = []
        for index, data in enumerate([(inputs, targets), joined]):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="running whole forward passes")
                engine = PrivacyEngine(
                    model,
                    unmoved(model),
                    TensorDataset(*data),
                    loss_fn,
                    mechanism=by_name(mechanism),
                    expected_batch_size=size,
                    sample_rate=sample_rate,
                    steps=_ENDLESS,
                    noise_multiplier=noise_multiplier,
                    sampling=sampling,
                    rejection_threshold=rejection_threshold,
                    min_dataset_size=len(targets) - 1 + index if rejection_threshold else None,
                    insecure_noise_seed=None if seed is None else 2 * seed + index,
                )
            prepared(engine)
            self.engines.append(engine)
        without, having = self.engines
        self.mechanism = without.mechanism.name
        self.claim = engine_claim(having, steps)

    def releases(self) -> Iterator[tuple[Array, Array]]:
        heard = [listen(engine) for engine in self.engines]
        while True:
            out, inside = [
                np.stack([take_steps(engine, ears, self.steps, self.seen) for _ in range(100)])
                for engine, ears in zip(self.engines, heard, strict=True)
            ]
            yield out, inside

    def seen(self, engine: PrivacyEngine, release: Array) -> Array:
        """What the attacker makes of a release, with all that is public."""
        return release

    def signals(self) -> Array:
        engine = self.engines[1]
        found = []
        with torch.inference_mode(), engine.forward.checked_mode():
            for _ in range(_SIMULATIONS):
                found.append(engine.bound.total(*self.canary, engine._directions).double().cpu().numpy())
        return np.stack(found)


class ZerothOrderGame(BatchGame):
    """Directions are public: the attacker computes what the canary adds, and turns each release so that this is the first axis."""

    def seen(self, engine: PrivacyEngine, release: Array) -> Array:
        bound = engine.bound
        assert isinstance(bound, BoundZerothOrder)
        with torch.inference_mode():
            slopes = torch.stack([bound.slopes(*self.canary, bound.direction(seed)) for seed in bound._seeds], dim=1)
            signal = bound.clipped(slopes)[0].numpy()
        axis = signal / max(float(np.linalg.norm(signal)), 1e-300)
        along = float(release @ axis)
        return np.array([along, float(np.linalg.norm(release - along * axis))])

    def signals(self) -> Array:
        return np.eye(1, 2)
