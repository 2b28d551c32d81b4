"""What was released, as immutable values. Pricing is done elsewhere; an unknown event fails closed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpulr import validate


@dataclass(frozen=True, slots=True)
class GaussianRelease:
    """A sum of vectors of norm at most C, plus normal noise of standard deviation noise_multiplier * C."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        validate.positive("noise_multiplier", self.noise_multiplier)


@dataclass(frozen=True, slots=True)
class HiddenSite:
    """One noise site: `repeats` secret directions on the unit sphere of R^dim, in orthonormal blocks of `frame`.

    noise_ratio is the noise's standard deviation over the site's clip bound (tau in docs/theory.md, section 6).
    """

    dim: int
    noise_ratio: float
    repeats: int = 1
    frame: int = 1

    def __post_init__(self) -> None:
        validate.whole("dim", self.dim, 1)
        validate.positive("noise_ratio", self.noise_ratio)
        validate.whole("repeats", self.repeats, 1)
        validate.whole("frame", self.frame, 1)
        if self.frame > self.dim:
            raise ValueError(f"frame is {self.frame}, but only {self.dim} orthonormal directions fit in dimension {self.dim}.")
        if self.repeats % self.frame:
            raise ValueError(f"repeats is {self.repeats}: it must be a multiple of frame, which is {self.frame}.")

    @property
    def draws(self) -> int:
        """How many independent pairs the site composes: one per block."""
        return self.repeats // self.frame

    @property
    def draw_noise(self) -> float:
        """Noise over shift of one such pair: t = tau * sqrt(repeats), in both theorems."""
        return self.noise_ratio * math.sqrt(self.repeats)


@dataclass(frozen=True, slots=True)
class HiddenDirectionRelease:
    """Hidden-direction sites, and exact (Gaussian) parts in the same product, given by their noise multipliers."""

    sites: tuple[HiddenSite, ...]
    gaussian: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sites", tuple(self.sites))
        object.__setattr__(self, "gaussian", tuple(self.gaussian))
        if not self.sites and not self.gaussian:
            raise ValueError("A hidden-direction release needs at least one site or one exact part; none was given.")
        for noise in self.gaussian:
            validate.positive("gaussian", noise)


@dataclass(frozen=True, slots=True)
class PaperRelease:
    """The paper's release at target deviation sigma0. Never certified: only `paper_nominal_epsilon` prices it."""

    target_std: float
    layers: int = 1

    def __post_init__(self) -> None:
        validate.positive("target_std", self.target_std)
        validate.whole("layers", self.layers, 1)


@dataclass(frozen=True, slots=True)
class Unaccounted:
    """Something was released for which no bound is known; epsilon is infinite from then on."""

    reason: str


NominalRelease = PaperRelease
Release = GaussianRelease | HiddenDirectionRelease | PaperRelease


@dataclass(frozen=True, slots=True)
class SampledStep:
    """One step on a Poisson sample, redrawn while it holds fewer than rejection_threshold records.

    min_dataset_size is the size of the smaller of two neighbours; it is needed only with rejection.
    """

    release: Release
    sample_rate: float
    rejection_threshold: int = 0
    min_dataset_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.release, GaussianRelease | HiddenDirectionRelease | PaperRelease):
            raise ValueError(f"{type(self.release).__name__} is not a release this version knows.")
        validate.rate(self.sample_rate)
        validate.whole("rejection_threshold", self.rejection_threshold, 0)
        if self.min_dataset_size is not None:
            validate.whole("min_dataset_size", self.min_dataset_size, 1)
        if self.rejection_threshold == 0:
            return
        if self.min_dataset_size is None:
            raise ValueError("Rejection needs min_dataset_size, the size of the smaller of two neighbouring data sets.")
        if self.rejection_threshold > self.min_dataset_size:
            raise ValueError(
                f"rejection_threshold is {self.rejection_threshold}, above min_dataset_size, which is "
                f"{self.min_dataset_size}: no batch would ever be accepted."
            )


@dataclass(frozen=True, slots=True)
class Charge:
    """`count` identical steps."""

    step: SampledStep | Unaccounted
    count: int

    def __post_init__(self) -> None:
        validate.whole("count", self.count, 0)


Event = GaussianRelease | HiddenSite | HiddenDirectionRelease | PaperRelease | Unaccounted | SampledStep | Charge

_KINDS: dict[str, type[Any]] = {
    "gaussian": GaussianRelease,
    "hidden-site": HiddenSite,
    "hidden-direction": HiddenDirectionRelease,
    "paper": PaperRelease,
    "unaccounted": Unaccounted,
    "sampled-step": SampledStep,
    "charge": Charge,
}
_NAMES = {cls: kind for kind, cls in _KINDS.items()}


def to_dict(event: Event) -> dict[str, Any]:
    """The event as plain JSON values."""
    kind = _NAMES.get(type(event))
    if kind is None:
        raise ValueError(f"{type(event).__name__} is not an event this version knows.")
    return {"kind": kind, **{name: _plain(getattr(event, name)) for name in type(event).__dataclass_fields__}}


def from_dict(data: Mapping[str, Any]) -> Any:
    """The event written by `to_dict`. An unknown kind or field is an error, never a cheaper event."""
    kind = data.get("kind") if isinstance(data, Mapping) else None
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ValueError(f"Unknown event kind {kind!r}: its cost cannot be stated. Was it written by a newer version?")
    fields = {name: _revive(value) for name, value in data.items() if name != "kind"}
    unknown = set(fields) - set(cls.__dataclass_fields__)
    if unknown:
        raise ValueError(f"Unknown field {sorted(unknown)[0]!r} in an event of kind {kind!r}.")
    try:
        return cls(**fields)
    except TypeError as error:
        raise ValueError(f"Event of kind {kind!r} is incomplete or malformed: {error}.") from error


def _plain(value: Any) -> Any:
    if type(value) in _NAMES:
        return to_dict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _revive(value: Any) -> Any:
    if isinstance(value, Mapping):
        return from_dict(value)
    return tuple(_revive(item) for item in value) if isinstance(value, list | tuple) else value
