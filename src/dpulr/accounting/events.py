"""What was released, as immutable values: releases, steps and charges. Each release states its own facts.

The mathematics that a release needs is loaded when it is asked for: events themselves need neither numpy nor scipy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

from dpulr import validate
from dpulr.accounting.kinds import from_dict, register, to_dict
from dpulr.errors import InvalidArgument

if TYPE_CHECKING:
    from dpulr.accounting.dominating_pairs import Array, Cells

__all__ = [
    "Charge",
    "GaussianRelease",
    "HiddenDirectionRelease",
    "HiddenSite",
    "Release",
    "SampledStep",
    "Shift",
    "Step",
    "Unaccounted",
    "from_dict",
    "register_release",
    "to_dict",
]


Unit = Literal["record", "person"]
MIXED = "some steps protect records and others people: what holds for one says nothing about the other"


class Shift(NamedTuple):
    """How far one record moves a number of a part of a release, in standard deviations of the noise.

    Never by more than `largest`; and, where its direction is random, with the tails of a normal of this mean and spread.
    """

    largest: float
    mean: float = math.inf
    spread: float = 0.0

    def within(self, log_odds: float) -> float:
        """What a number is not moved beyond, but for a probability of e^-log_odds."""
        return min(self.largest, self.mean + self.spread * math.sqrt(2 * max(log_odds, 0.0)))


class Release:
    """What one step adds noise to and hands out. A mechanism of your own derives from it and calls `register_release`."""

    __slots__ = ()

    kind: ClassVar[str]
    certified: ClassVar[bool] = True  # whether `pair` is proved to dominate the release
    gap: ClassVar[str] = "this mechanism has no proved bound"  # why not, where it is not
    secrets: ClassVar[str] = "noise and batches"  # what must stay secret, in words
    numbers: int = 0  # how many numbers a step hands out, rounded; 0: what is priced is what is computed, or an ideal

    @property
    def mechanism(self) -> str:
        """The name that a privacy statement gives."""
        return self.kind

    @property
    def pure_epsilon(self) -> float | None:
        """Epsilon at delta 0 of one step on a whole data set, where there is one."""
        return None

    @property
    def reasons(self) -> tuple[str, ...]:
        """What voids any claim about this very release, if anything does."""
        return ()

    @property
    def shifts(self) -> tuple[Shift, ...]:
        """How far one record moves the numbers of each part of the release. Needed where `numbers` is not 0."""
        raise InvalidArgument(f"{type(self).__name__} says how many numbers it hands out, but not how far a record moves them.")

    def pair(self) -> Cells:
        """The dominating pair of the release on a whole data set; sampling comes later."""
        raise InvalidArgument(f"{type(self).__name__} has no certified price.")

    def equivalent_noise(self) -> float:
        """The noise multiplier of the Gaussian mechanism that costs about as much. It only starts searches."""
        raise InvalidArgument(f"{type(self).__name__} has no Gaussian equivalent.")

    def scaled(self, factor: float) -> Release:
        """The same release with its noise multiplied by `factor`."""
        raise InvalidArgument(f"{type(self).__name__} has no privacy curve to hold a measurement against.")

    def renyi(self, sample_rate: float) -> tuple[Array, float]:
        """Renyi divergences of a sampled step at `renyi.ORDERS`, and the mass left out of them, which counts as delta."""
        from dpulr.accounting import renyi

        return renyi.of_pair(self, sample_rate)

    def log_ratio(self, along: Array, across: Array) -> Array | None:
        """ln of the likelihood ratio for an attacker who knows the record's signal; None where no formula is known.

        along: the release's part along the signal, across: the length of the rest, both over the bound on a record.
        """
        return None

    def claimed(self) -> Release:
        """The release that an audit holds the mechanism to: itself, unless it has no pair of its own."""
        return self

    @classmethod
    def nominal(cls, charges: Sequence[Charge], delta: float) -> tuple[float, tuple[str, ...]] | None:
        """An unproved formula's epsilon of steps that are all of this kind, and its conditions that fail. None: no formula."""
        return None


ReleaseClass = TypeVar("ReleaseClass", bound=type[Release])


def register_release(cls: ReleaseClass) -> ReleaseClass:
    """Make a release known, so that ledgers can hold it. A certified one must have a pair of its own."""
    if not issubclass(cls, Release):
        raise InvalidArgument(f"{cls.__name__} can't be registered: it must derive from accounting.Release.")
    if cls.certified and cls.pair is Release.pair:
        raise InvalidArgument(f"{cls.__name__} can't be registered: it says that it is certified, but has no method `pair`.")
    return register(cls)


@register_release
@dataclass(frozen=True, slots=True)
class GaussianRelease(Release):
    """A sum of vectors of norm at most C, plus normal noise of standard deviation noise_multiplier * C."""

    kind = "gaussian"

    noise_multiplier: float
    mechanism: str = "gaussian"
    numbers: int = 0

    def __post_init__(self) -> None:
        validate.positive("noise_multiplier", self.noise_multiplier)
        validate.whole_number("numbers", self.numbers, 0)

    @property
    def shifts(self) -> tuple[Shift, ...]:
        return (Shift(1 / self.noise_multiplier),)

    def pair(self) -> Cells:
        from dpulr.accounting.gaussian import gaussian_cells

        return gaussian_cells(self.noise_multiplier)

    def equivalent_noise(self) -> float:
        return self.noise_multiplier

    def scaled(self, factor: float) -> GaussianRelease:
        return replace(self, noise_multiplier=self.noise_multiplier * factor)

    def renyi(self, sample_rate: float) -> tuple[Array, float]:
        from dpulr.accounting.gaussian import sampled_renyi

        return sampled_renyi(self.noise_multiplier, sample_rate), 0.0

    def log_ratio(self, along: Array, across: Array) -> Array:
        from dpulr.accounting.likelihood import gaussian_log_ratio

        return gaussian_log_ratio(along, self.noise_multiplier)


@register
@dataclass(frozen=True, slots=True)
class HiddenSite:
    """One layer of a hidden-direction release: `repeats` secret directions, each uniform on the unit sphere of R^dim.

    noise_ratio is the noise's standard deviation over the layer's clip bound (tau in docs/theory.md, section 6).
    """

    kind: ClassVar[str] = "hidden-site"

    dim: int
    noise_ratio: float
    repeats: int = 1

    def __post_init__(self) -> None:
        validate.whole_number("dim", self.dim)
        validate.positive("noise_ratio", self.noise_ratio)
        validate.whole_number("repeats", self.repeats)

    @property
    def draw_noise(self) -> float:
        """Noise over shift of one direction's pair: t = tau * sqrt(repeats)."""
        return self.noise_ratio * math.sqrt(self.repeats)

    @property
    def shift(self) -> Shift:
        """A number is moved by the mean over draws of products a.z, |a| at most 1, over tau (section 9, step 5)."""
        from dpulr.accounting.small_signal import mean_overlap

        largest = 1 / self.noise_ratio
        if self.dim == 1:
            return Shift(largest)
        return Shift(largest, mean_overlap(self.dim) * largest, largest / math.sqrt((self.dim - 1) * self.repeats))

    @classmethod
    def from_older(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Version 0.1.0 could draw directions in orthonormal frames; a frame of 1 is what is left of them."""
        frame = values.get("frame", 1)
        if isinstance(frame, bool) or frame != 1:
            raise InvalidArgument(f"This ledger has frames of {frame!r} directions: only version 0.1.0 of dpulr can price them.")
        return {name: value for name, value in values.items() if name != "frame"}


@register_release
@dataclass(frozen=True, slots=True)
class HiddenDirectionRelease(Release):
    """Hidden-direction sites, and exact (Gaussian) parts in the same product, given by their noise multipliers."""

    kind = "hidden-direction"
    secrets = "noise, directions and batches"

    sites: tuple[HiddenSite, ...]
    gaussian: tuple[float, ...] = ()
    numbers: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "sites", tuple(self.sites))
        object.__setattr__(self, "gaussian", tuple(self.gaussian))
        if not self.sites and not self.gaussian:
            raise InvalidArgument("A hidden-direction release needs at least one site or one exact part; none was given.")
        for noise in self.gaussian:
            validate.positive("gaussian", noise)
        validate.whole_number("numbers", self.numbers, 0)

    @property
    def shifts(self) -> tuple[Shift, ...]:
        return (*(site.shift for site in self.sites), *(Shift(1 / noise) for noise in self.gaussian))

    def pair(self) -> Cells:
        from dpulr.accounting.hidden_direction import release_pair

        return release_pair(self)

    def equivalent_noise(self) -> float:
        from dpulr.accounting.small_signal import hidden_direction_noise

        return hidden_direction_noise(self)

    def scaled(self, factor: float) -> HiddenDirectionRelease:
        sites = tuple(replace(site, noise_ratio=site.noise_ratio * factor) for site in self.sites)
        return replace(self, sites=sites, gaussian=tuple(noise * factor for noise in self.gaussian))

    def log_ratio(self, along: Array, across: Array) -> Array | None:
        from dpulr.accounting.likelihood import hidden_log_ratio

        if self.gaussian or len(self.sites) > 1 or self.sites[0].repeats > 1:
            return None
        return hidden_log_ratio(along, across, self.sites[0].dim, self.sites[0].noise_ratio)


@register
@dataclass(frozen=True, slots=True)
class Unaccounted:
    """Something was released for which no bound is known; epsilon is infinite from then on."""

    kind: ClassVar[str] = "unaccounted"
    certified: ClassVar[bool] = False

    reason: str

    @property
    def reasons(self) -> tuple[str, ...]:
        return (self.reason,)


@register
@dataclass(frozen=True, slots=True)
class SampledStep:
    """One step on a Poisson sample, redrawn while it holds fewer than rejection_threshold records.

    min_dataset_size is the size of the smaller of two neighbours; it is needed only with rejection. `unit` is what is sampled, and
    what one neighbour has more than the other: a record, or a person with all of his or her records.
    """

    kind: ClassVar[str] = "sampled-step"

    release: Release
    sample_rate: float
    rejection_threshold: int = 0
    min_dataset_size: int | None = None
    unit: Unit = "record"

    def __post_init__(self) -> None:
        validate.one_of("unit", self.unit, get_args(Unit))
        if not isinstance(self.release, Release):
            raise InvalidArgument(f"{type(self.release).__name__} is not a release this version knows.")
        validate.rate(self.sample_rate)
        validate.whole_number("rejection_threshold", self.rejection_threshold, 0)
        if self.min_dataset_size is not None:
            validate.whole_number("min_dataset_size", self.min_dataset_size)
        if self.rejection_threshold == 0:
            return
        if self.min_dataset_size is None:
            raise InvalidArgument("Rejection needs min_dataset_size, the size of the smaller of two neighbouring data sets.")
        if self.rejection_threshold > self.min_dataset_size:
            raise InvalidArgument(
                f"rejection_threshold is {self.rejection_threshold}, above min_dataset_size, which is "
                f"{self.min_dataset_size}: no batch would ever be accepted."
            )

    @property
    def certified(self) -> bool:
        return self.release.certified

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.release.reasons


Step = SampledStep | Unaccounted


def units_of(steps: Iterable[Step]) -> list[Unit]:
    """What these steps protect; more than one means that they have no common guarantee."""
    return list(dict.fromkeys(step.unit for step in steps if isinstance(step, SampledStep)))


@register
@dataclass(frozen=True, slots=True)
class Charge:
    """`count` identical steps."""

    kind: ClassVar[str] = "charge"

    step: Step
    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.step, SampledStep | Unaccounted):
            raise InvalidArgument(f"{type(self.step).__name__} is not a step; its cost cannot be stated.")
        validate.whole_number("count", self.count, 0)
