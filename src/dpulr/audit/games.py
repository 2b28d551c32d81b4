"""Games: many independent releases with the canary and without it, from the real engine.

`RowsGame` plays thousands of games in one step. Its model is a table; each game owns a row, and its canary is the only record that
looks that row up. The engine's sampler draws each canary on its own, the mechanism bounds it on its own, and the noise of each row
is independent. Rows without a record are the releases without the canary.

`BatchGame` plays one game per step, on any model and data, with the canary in one engine's data set and not in the other's.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpulr.audit import attacks
from dpulr.audit.attacks import Attack, Probe
from dpulr.audit.bounds import Array
from dpulr.audit.claims import Claim
from dpulr.engine import PrivacyEngine, Released
from dpulr.errors import InvalidArgument
from dpulr.mechanisms import Mechanism, by_name, kind_of
from dpulr.model.losses import LossFunction
from dpulr.model.people import People
from dpulr.randomness import RandomSource

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
    """What the engine charges for so many steps. A release without a proof is held to what its authors claim for it."""
    step = engine.plan.step
    if step is None:
        raise InvalidArgument("nothing is claimed: there is no noise.")
    return Claim(replace(step, release=step.release.claimed()), steps, nominal=not step.release.certified)


def signal_of(engine: PrivacyEngine, record: Canary, public: Any, secret: RandomSource) -> Array:
    """What a record (a person's records) alone would add to a release, by the attacker's own simulation with its own randomness."""
    fitted = engine.fitted
    with torch.inference_mode(), engine.forward.checked_mode():
        directions = secret.directions(engine.forward.device, engine.forward.dtype)
        most = engine.plan.per_person
        if most == 1:
            total = fitted.sum_of_bounded_signals(record, public, directions)
        else:
            people = People.of(np.zeros(len(record[1]), dtype=np.int64), most, engine.forward.device)
            total = fitted.sum_over_people(record, people, public, directions)
        no_noise = torch.zeros(fitted.size, dtype=torch.float64, device=engine.forward.device)
        return fitted.privatise(total, no_noise).double().cpu().numpy()


def released_in(engine: PrivacyEngine, steps: int) -> list[Released]:
    """What the next steps release."""
    heard: list[Released] = []
    stop = engine.on_release(heard.append)
    for inputs, targets in engine.batches(steps):
        engine.step(inputs, targets)
    stop()
    return heard


def _as_people(labels: Any, per_person: int) -> dict[str, Any]:
    """Settings of an engine that protects people, if a person may have several records."""
    return {} if per_person == 1 else {"unit": labels, "max_per_person": per_person}


class Unmoved(torch.optim.Optimizer):
    """Leaves the model as it is, so that every release is of the same game."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([p for p in model.parameters() if p.requires_grad], {})

    def step(self, closure: Any = None) -> Any:
        return None


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
    """The canary crafted against the mechanism: a linear loss of slope `slope` along the first axis of `dim` dimensions.

    With `per_person`, the canary is a person with so many records, all alike: they point in one direction together.
    """

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
        per_person: int = 1,
        randomness: Callable[[int | None], RandomSource] = RandomSource,
    ) -> None:
        self.dim, self.steps, self.sample_rate = dim, steps, sample_rate
        self.rows = rows or max(1, min(20_000, _NUMBERS // (2 * dim * per_person)))
        target = torch.zeros(self.rows, dim)
        target[:, 0] = slope
        model = Table(2 * self.rows, dim)
        self.engine = PrivacyEngine(
            model,
            Unmoved(model),
            TensorDataset(*(part.repeat_interleave(per_person, 0) for part in (torch.arange(self.rows), target))),
            linear_loss,
            mechanism=mechanism,
            **_as_people(np.arange(self.rows).repeat(per_person), per_person),
            expected_batch_size=1.0,
            sample_rate=sample_rate,
            steps=_ENDLESS,
            noise_multiplier=noise_multiplier,
            randomness=randomness(seed),
        )
        self.mechanism = self.engine.mechanism.name
        self.claim = engine_claim(self.engine, steps)
        self.bound = self.engine.fitted.noise_std / noise_multiplier

    def releases(self) -> Iterator[tuple[Array, Array]]:
        while True:
            steps = np.stack([released.values.cpu().numpy() for released in released_in(self.engine, self.steps)])
            games = steps.reshape(self.steps, 2 * self.rows, -1).swapaxes(0, 1)
            yield games[self.rows :], games[: self.rows]

    def signals(self) -> Array:
        return np.eye(1, self.dim)

    def attacks(self) -> list[Attack]:
        """The exact test of one record where the release knows its likelihood ratio, and what always can be tried."""
        release, usual = self.claim.step.release, super().attacks()
        if self.claim.step.unit == "person" or release.log_ratio(np.zeros(1), np.zeros(1)) is None:
            return usual

        def ratio(along: Array, across: Array) -> Array:
            found = release.log_ratio(along / self.bound, across / self.bound)
            assert found is not None
            return found

        return [attacks.likelihood_ratio(ratio, self.sample_rate), *usual[1:]]


class BatchGame(Game):
    """A canary among the records of a data set, on any model: one game per step (or per `steps` of them).

    With `per_person`, it is a person with so many records like the canary among people with one record each.
    """

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
        per_person: int = 1,
        randomness: Callable[[int | None], RandomSource] = RandomSource,
    ) -> None:
        self.steps, self.seed = steps, seed
        self.canary = (torch.stack([canary[0]] * per_person), torch.stack([canary[1]] * per_person))
        inputs, targets = records
        if self.canary[0].shape[1:] != inputs.shape[1:] or self.canary[1].shape[1:] != targets.shape[1:]:
            raise InvalidArgument(
                f"the canary's shapes are {tuple(canary[0].shape)} and {tuple(canary[1].shape)}; a record of the data has "
                f"{tuple(inputs.shape[1:])} and {tuple(targets.shape[1:])}."
            )
        size = batch_size or max(1.0, sample_rate * len(targets))
        joined = tuple(torch.cat([part, own.to(part.dtype)]) for part, own in zip(records, self.canary, strict=True))
        self.engines = []
        for index, data in enumerate([(inputs, targets), joined]):
            own = None if seed is None else 2 * seed + index
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="running whole forward passes")
                engine = PrivacyEngine(
                    model,
                    Unmoved(model),
                    TensorDataset(*data),
                    loss_fn,
                    mechanism=by_name(mechanism),
                    **_as_people(np.minimum(np.arange(len(data[1])), len(targets)), per_person),
                    expected_batch_size=size,
                    sample_rate=sample_rate,
                    steps=_ENDLESS,
                    noise_multiplier=noise_multiplier,
                    sampling=sampling,
                    rejection_threshold=rejection_threshold,
                    min_dataset_size=len(targets) - 1 + index if rejection_threshold else None,
                    randomness=randomness(own),
                )
            self.engines.append(engine)
        without, having = self.engines
        without.parameters_changed(public=True)  # the other's set-up has tried other weights on the same model
        self.mechanism = without.mechanism.name
        self.claim = engine_claim(having, steps)

    def releases(self) -> Iterator[tuple[Array, Array]]:
        while True:
            out, inside = [np.stack([self._game(engine) for _ in range(100)]) for engine in self.engines]
            yield out, inside

    def _game(self, engine: PrivacyEngine) -> Array:
        return np.stack([self.seen(engine, released) for released in released_in(engine, self.steps)])

    def seen(self, engine: PrivacyEngine, released: Released) -> Array:
        """What the attacker makes of a release, with all that is public."""
        return released.values.double().cpu().numpy()

    def signals(self) -> Array:
        engine, secret = self.engines[1], RandomSource(self.seed)
        public = engine.fitted.draw_public(0)
        return np.stack([self._signal(engine, public, secret, i) for i in range(_SIMULATIONS)])

    def _signal(self, engine: PrivacyEngine, public: Any, secret: RandomSource, turn: int) -> Array:
        own = RandomSource(None if secret.insecure_seed is None else _SIMULATIONS * secret.insecure_seed + turn)
        return signal_of(engine, self.canary, public, own)


class PublicSignalGame(BatchGame):
    """Given the public draw, the attacker computes what the canary adds, and turns each release so that this is the first axis."""

    def seen(self, engine: PrivacyEngine, released: Released) -> Array:
        signal = signal_of(engine, self.canary, released.public, RandomSource())
        axis = signal / max(float(np.linalg.norm(signal)), 1e-300)
        values = super().seen(engine, released)
        along = float(values @ axis)
        return np.array([along, float(np.linalg.norm(values - along * axis))])

    def signals(self) -> Array:
        return np.eye(1, 2)


def batch_game(mechanism: str | Mechanism) -> type[BatchGame]:
    """The game that suits a mechanism."""
    return PublicSignalGame if kind_of(mechanism).worst_case().signal_is_public else BatchGame


def single_canary_game(mechanism: str | Mechanism, *, slope: float = 1e4, **options: Any) -> BatchGame:
    """A canary with a linear loss, in one dimension, beside one record whose loss is always 0."""
    return batch_game(mechanism)(
        mechanism,
        model=nn.Sequential(nn.Linear(1, 1, bias=False)),
        loss_fn=linear_loss,
        records=(torch.ones(1, 1), torch.zeros(1, 1)),
        canary=(torch.ones(1), torch.full((1,), slope)),
        **options,
    )
