"""What a mechanism is: public settings, which state what a step releases, and, fitted to a model, how a step is computed.

A step reads, in this order: `draw_public`, `sum_of_bounded_signals`, `privatise`, `gradients`. What one stage needs from another is
passed as a value; nothing is left on an object between them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from dpulr.accounting.events import Release
from dpulr.errors import InvalidArgument
from dpulr.mechanisms.chunks import Chunks
from dpulr.model.batches import count
from dpulr.model.forward import Forward
from dpulr.model.passes import Clean
from dpulr.model.people import People
from dpulr.model.rescue import each_alone
from dpulr.model.row_sizes import Agree, RowSizes, agreeing
from dpulr.model.signals import Signal
from dpulr.model.sites import Bases, PublicBases, Site, Space
from dpulr.model.trials import other_weights
from dpulr.plan import Plan, Request, certified_plan
from dpulr.randomness import Directions, GaussianNoise, LaplaceNoise, RandomSource, SameDirections

if TYPE_CHECKING:
    from dpulr.mechanisms.scales import Scales

WITH_MARGIN = 1 - 4e-3
"""Bounds are met with this much room, which rounding can't exceed, whatever the records are (docs/theory.md, section 9)."""

LEAST_BOUND = 1e-30
"""Well within float32: a smaller bound would itself be rounded by more than the margin."""

GRID_BITS = 10
"""The grid of a release is finer than its noise by this power of two."""

Public = TypeVar("Public")
Batch = tuple[Any, Any]
Gradients = list[dict[str, Tensor]]
"""For each site, a buffer per parameter."""


class OnePiece(Gradients):
    """Buffers that are views of one, `flat`, one after the other."""

    def __init__(self, buffers: Gradients, flat: Tensor) -> None:
        super().__init__(buffers)
        self.flat = flat


@dataclass(frozen=True)
class WorstCase:
    """Where an attacker has it easiest: what `dpulr audit` plays by default.

    mechanism         the settings to attack
    dim               dimensions of the crafted canary's layer
    many_per_step     thousands of games in one step, each with a row of the model to itself; False: one game per step
    canary            "crafted" against the mechanism, or a kind made from data
    trials            games with the canary, and as many without; None: the usual number
    signal_is_public  given the public draw, the attacker can compute what the canary adds
    """

    mechanism: Mechanism
    dim: int = 16
    many_per_step: bool = True
    canary: str = "crafted"
    trials: int | None = None
    signal_is_public: bool = False


class Mechanism(ABC):
    """Public settings of a mechanism: a frozen dataclass."""

    name: ClassVar[str]
    space: Space = "auto"
    shares_parameters: ClassVar[bool] = False
    """Whether a layer may be called several times, and parameters may be tied: where a record is bounded over all uses."""
    bounds_people: ClassVar[bool] = False
    """Whether it has `sum_over_people`, which bounds what all records of a person add together."""
    calls_again: ClassVar[bool] = False
    """Whether a linear layer or convolution may be called several times, and is moved in all of its calls."""
    takes_weights: ClassVar[bool] = False
    """Whether records' weights (`Forward.weighed`) act on their signals."""

    @property
    def keeps_sizes(self) -> bool:
        """Whether a record whose loss is multiplied by a number can add more, or less, for that."""
        return True

    uses_sites: ClassVar[bool] = True
    """Whether layers are moved one by one. If not, the model is run and checked as a whole, and no layer has to be known."""

    @abstractmethod
    def release(self, sites: Sequence[Site], noise_multiplier: float) -> Release:
        """What one step with this noise releases. It depends on public shapes only."""

    @abstractmethod
    def passes(self, sites: Sequence[Site]) -> int | None:
        """Forward passes of a batch per step, those from a layer on included. None: they vary from step to step."""

    def settled(self, forward: Forward) -> Mechanism:
        """The same settings with what they leave to the model filled in. It is tried on synthetic records: nothing private."""
        return self

    def with_repeats(self, repeats: int) -> Mechanism:
        """The same settings with repeats that were left open ("auto") filled in."""
        return replace(self, repeats=repeats) if getattr(self, "repeats", None) == "auto" else self  # type: ignore[type-var]

    def for_people(self, most: int) -> Mechanism:
        """The same settings for people, who take part in a step with at most so many records."""
        if most > 1 and not self.bounds_people:
            raise InvalidArgument(
                f"{self.name} bounds single records, not all of a person's: use max_per_person=1 (one record of each person and "
                "step, chosen at random)."
            )
        return self

    def notes(self, forward: Forward) -> list[str]:
        """What a user should know of these (settled) settings on this model, in sentences. Public."""
        return []

    @property
    def has_exact_part(self) -> bool:
        """Whether layers that hide their directions and exact ones share a release: an audit then attacks both at once."""
        return False

    @abstractmethod
    def fit(self, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> FittedMechanism[Any]:
        """The mechanism tied to a model and to a plan."""

    def plan(self, request: Request, sites: Sequence[Site]) -> Plan:
        """From what was asked for to what every step does."""
        return certified_plan(request, partial(self.release, sites))

    @classmethod
    def worst_case(cls) -> WorstCase:
        """How an audit attacks it."""
        return WorstCase(cls())


class FittedMechanism(ABC, Generic[Public]):
    """A mechanism tied to a model and a plan. A release is one flat vector of `size` numbers."""

    forward: Forward
    size: int
    noise_std: float = math.nan
    """Standard deviation of the noise on every number of the release; NaN where it differs between them."""
    shares: int = 1
    """Processes that each add a share of the noise to a sum of their own. The release is then the sum of what they privatise."""
    sharers: int = 1
    """Processes that each take their own records of a batch."""
    chunks: Chunks
    rows: RowSizes | None = None
    """How many rows a pass has; None: it is the mechanism's own affair."""

    def row_sizes(self, plan: Plan, agree: Agree) -> RowSizes:
        """Of several processes, each has its share of a batch."""
        return RowSizes(lambda: plan.expected_batch_size * plan.per_person / self.sharers, self.chunks.most, agree)

    @property
    def rows_settled(self) -> bool:
        """Whether it is known how many rows passes may have."""
        return self.rows is None or self.forward.recordwise or self.rows.settled

    def rows_known(self, records: int) -> int:
        """How many rows a pass for so many records has; as many, as long as that is not known."""
        return self.rows.of(records) if self.rows is not None and not self.forward.recordwise and self.rows.settled else records

    def settle_rows(self) -> str | None:
        """Before a step: see how many rows its passes may have. Tried once, on synthetic records. What a user should know of it."""
        if self.rows is None or self.rows_settled:
            return None
        self.rows.settle()
        if not self.rows.alone:
            return None
        return (
            "running records one by one, which is slow, because no number of rows was found with which this model gives a record "
            "the same last bits wherever its row stands (docs/pitfalls.md)"
        )

    @property
    def streams(self) -> list[list[int]]:
        """Groups of sites whose gradients can be made one group after the other; one group, where that saves nothing."""
        return []

    def noise(self, source: RandomSource) -> GaussianNoise | LaplaceNoise:
        """Where `privatise` gets its noise from."""
        return source.noise(self.size)

    @property
    def part_sizes(self) -> list[int]:
        """How many numbers of the release belong to each site; all of them to one, where there are no parts."""
        return [self.size]

    @abstractmethod
    def draw_public(self, step: int) -> Public:
        """What this step draws in public, from public randomness: subspaces, seeds of directions."""

    @abstractmethod
    def sum_of_bounded_signals(self, batch: Batch, public: Public, directions: Directions) -> Any:
        """The sum over the batch of the records' signals, each within its bound."""

    def sum_over_people(self, batch: Batch, people: People, public: Public, directions: Directions) -> Any:
        """The same where people are protected: what all records of a person add is within the bound of one record."""
        raise InvalidArgument(f"{type(self).__name__} bounds single records, not people.")

    def state(self) -> dict[str, Any]:
        """What a resumed run needs beside the weights: public numbers, as JSON can hold them."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave. What is missing there stays as it is."""

    def privatise(self, total: Any, noise: Tensor) -> Tensor:
        """Here noise is added. What comes out may be seen by everybody. `noise` is standard normal, in float64.

        Of several shares, each adds its part of the variance; their sum is the release.
        """
        return noised(total.double(), noise, self.noise_std, self.shares)

    def spacing(self, largest: float) -> float | None:
        """The grid on which shares lie, if a signed number of 31 bits counts its cells up to `largest`; None: as floats, then."""
        spacing = grid_spacing(self.noise_std, self.shares) if self.noise_std > 0 else 0.0
        return spacing if largest < 2**30 * spacing else None

    def split_passes(self, rank: int, size: int) -> None:
        """From now on, compute only this rank's part of what is summed, for every record of the batch."""
        raise InvalidArgument(
            f"parallel='passes' is for hidden-direction: {type(self).__name__} bounds what all passes of a record say together, "
            "and what single ones say must not leave its process. Use parallel='records'."
        )

    @abstractmethod
    def gradients(self, values: Tensor, public: Public, into: Gradients) -> None:
        """Write the parameters' gradients that released values stand for."""


class SitewiseMechanism(FittedMechanism[Bases]):
    """A fitted mechanism whose release has a part for each site, in the site's public subspace.

    `backward_to` are the sites at whose outputs a backward pass gives the gradient. `scales` say where records are clipped, if not
    at a constant; if they adapt, the votes about them are the last part of a release.
    """

    backward_to: Sequence[int] = ()
    lifts_nothing: ClassVar[bool] = False
    """Whether a release is the gradients, one after the other, but for votes behind them."""
    scales: Scales | None = None
    _own_votes: Tensor | float = 1.0

    def __init__(
        self,
        forward: Forward,
        plan: Plan,
        *,
        noise_std: float,
        memory_limit: int | None,
        seed: int,
        subspace: int | None = None,
        sites: Sequence[Site] | None = None,
        votes: int = 0,
    ) -> None:
        self._votes = votes
        self.forward, self.device, self.dtype = forward, forward.device, forward.dtype
        self.sites = [site.within(subspace) for site in forward.sites] if sites is None else list(sites)
        self.noise_std, self.divisor = noise_std, plan.expected_batch_size
        self.size = sum(self.part_sizes)
        self.chunks = Chunks(forward, self.sites, self.size, memory_limit)
        self.rows = self.row_sizes(plan, self._rows_agree)
        self._bases = PublicBases(self.sites, torch.Generator().manual_seed(seed), self.dtype, self.device)

    @cached_property
    def part_sizes(self) -> list[int]:
        return [*(site.size for site in self.sites), *([self._votes] if self._votes else [])]

    def draw_public(self, step: int) -> Bases:
        return self._bases.draw()

    def sum_of_bounded_signals(self, batch: Batch, public: Bases, directions: Directions) -> Any:
        return self._sum(batch, None, public, directions)

    def sum_over_people(self, batch: Batch, people: People, public: Bases, directions: Directions) -> Any:
        return self._sum(batch, people, public, directions)

    def _sum(self, batch: Batch, people: People | None, public: Bases, directions: Directions) -> Any:
        total = torch.zeros(self.size, device=self.device, dtype=torch.float64)
        alone = self.forward.recordwise
        assert self.rows is not None
        for chunk, own in self.chunks.parts(batch, people, self.chunks.most if alone else self.rows.largest):
            size = 0 if alone else self.rows.of(count(chunk[1]))
            directions.expect(self.draws(max(size, count(chunk[1]))) if own is None else [])
            for clean in self.forward.clean(*chunk, self.backward_to, own, rows_of=None if alone else self.rows.of):
                if alone:
                    self._add_alone(clean, public, directions, total)
                else:
                    self.add(clean, public, directions, self.parts(total))
        return total

    def add(self, clean: Clean, public: Bases, directions: Directions, parts: list[Tensor]) -> None:
        """Add the bounded signals of the records of one clean pass to the parts of the release."""
        below = torch.zeros(self._votes, clean.records, dtype=torch.bool, device=self.device)
        for signal in self.signals(clean, public, directions, below):
            signal.add_to(parts)
        if self.scales is not None and self._votes:
            self.scales.count(below, clean.absent, parts[-1], self._own_votes)

    @abstractmethod
    def signals(self, clean: Clean, public: Bases, directions: Directions, below: Tensor) -> Iterator[Signal]:
        """The bounded signals of the records of one clean pass, site by site.

        `below` (votes, records) takes what records say about scales: whether they were below them.
        """

    def _add_alone(self, clean: Clean, public: Bases, directions: Directions, total: Tensor) -> None:
        """One record, or person, of a model that reads values: its layers may see shapes of its own, for which a sum raises."""

        def one(own: Clean) -> None:
            found = torch.zeros_like(total)
            self.add(own, public, directions, self.parts(found))
            total.add_(found)

        if not each_alone([clean], one):
            self.forward.check_alive([0])

    def _rows_agree(self, sizes: Sequence[int]) -> int:
        """Tried on synthetic records, with the same directions for each, and with weights that are not the model's own."""
        public = PublicBases(self.sites, torch.Generator().manual_seed(0), self.dtype, self.device).draw()

        def numbers(batch: Batch) -> Iterator[Tensor]:
            (clean,) = self.forward.clean(*batch, self.backward_to)
            yield clean.losses
            yield from self.numbers(clean, public, SameDirections(self.device, self.dtype))

        with other_weights(self.forward.parameters(), keep=1.0):
            return agreeing(numbers, self.forward.probe, sizes)

    def numbers(self, clean: Clean, public: Bases, directions: Directions) -> Iterator[Tensor]:
        """All that is computed of each record of a clean pass before the sum, a row per record."""
        below = torch.zeros(self._votes, clean.records, dtype=torch.bool, device=self.device)
        for signal in self.signals(clean, public, directions, below):
            yield from signal.per_record()

    def draws(self, records: int) -> list[int]:
        """How many normal numbers `add` will draw for so many records, draw by draw: so that they can be drawn ahead."""
        return []

    def gradients(self, values: Tensor, public: Bases, into: Gradients) -> None:
        if self.lifts_nothing and isinstance(into, OnePiece):
            write_multiple(values[: len(into.flat)], 1 / self.divisor, into.flat)
        else:
            self.lift(values.mul(1 / self.divisor).to(self.dtype), public, into)
        if self.scales is not None and self._votes:
            self.scales.follow(self.parts(values)[-1])

    def state(self) -> dict[str, Any]:
        return {} if self.scales is None else {"scales": self.scales.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self.scales is not None and "scales" in state:
            self.scales.load(state["scales"])

    def lift(self, mean: Tensor, public: Bases, into: Gradients) -> None:
        """Write the gradients that a mean of signals stands for, site by site."""
        for site, part, basis, views in zip(self.sites, self.parts(mean)[: len(self.sites)], public, into, strict=True):
            site.lift(part, basis, views)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """The sites' parts of a release, and the votes about scales, if there are any."""
        return list(flat.split_with_sizes(self.part_sizes))


def write_multiple(values: Tensor, factor: float, out: Tensor) -> None:
    """factor * values, in float64, as `out` in its own type. numpy does both at once, without a second large vector."""
    if values.is_cpu and out.dtype in (torch.float32, torch.float64):
        np.multiply(values.numpy(), factor, out=out.numpy(), casting="same_kind")
    else:
        out.copy_(values.mul(factor))


def noised(total: Tensor, noise: Tensor, noise_std: float, shares: int = 1) -> Tensor:
    """The line where noise is added, in place: to a float64 sum, or to one of several shares of it. Then it is rounded."""
    return on_grid(total.add_(noise, alpha=noise_std / math.sqrt(shares)), noise_std, shares)


def on_grid(values: Tensor, noise_std: float, shares: int = 1) -> Tensor:
    """Round in place to a public grid, 2^-10 of the noise: the low bits of a float64 sum would tell what was summed (section 9).

    For shares the grid is coarser by a power of two, sqrt(shares) or the next: then all of them together err no more than one.
    """
    if noise_std == 0:
        return values
    spacing = grid_spacing(noise_std, shares)  # a power of two: to multiply by one over it is exact, and quicker than to divide
    return values.mul_(1 / spacing).round_().mul_(spacing)


def grid_spacing(noise_std: float, shares: int = 1) -> float:
    coarser = ((shares - 1).bit_length() + 1) // 2
    return 2.0 ** (math.floor(math.log2(noise_std)) - GRID_BITS + coarser)


def weighted(factors: Tensor, z: Tensor) -> Tensor:
    """(records, dim): the sum over repeats of factors (repeats, records) times z (repeats, records, dim), which is overwritten."""
    z *= factors.unsqueeze(2)
    return z.sum(0) if len(z) > 1 else z[0]
