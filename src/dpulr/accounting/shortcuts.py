"""Releases and epsilons in one call, for the certified mechanisms of this project, by the names everybody knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from dpulr import validate
from dpulr.accounting.events import Charge, GaussianRelease, HiddenDirectionRelease, HiddenSite, Release, SampledStep
from dpulr.accounting.privacy_cost import epsilon
from dpulr.accounting.rejection import AUTO_FRACTION, largest_threshold
from dpulr.errors import InvalidArgument

PerLayer = float | Sequence[float] | None
Threshold = int | Literal["auto"]
MakeRelease = Callable[[float], Release]
"""From a noise multiplier to the release that has it."""


def gaussian_epsilon(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    rejection_threshold: Threshold = 0,
    min_dataset_size: int | None = None,
    method: str = "pld",
) -> float:
    """Epsilon of `steps` Poisson-sampled Gaussian releases (docs/theory.md, sections 3 to 5)."""
    release = GaussianRelease(noise_multiplier)
    return _epsilon(release, sample_rate, steps, delta, rejection_threshold, min_dataset_size, method)


def hidden_direction_epsilon(
    *,
    noise_multiplier: float,
    dims: Sequence[int],
    sample_rate: float,
    steps: int,
    delta: float,
    layer_weights: PerLayer = None,
    repeats: int | Sequence[int] = 1,
    gaussian_weights: Sequence[float] = (),
    rejection_threshold: Threshold = 0,
    min_dataset_size: int | None = None,
    method: str = "pld",
) -> float:
    """Epsilon of `steps` hidden-direction releases (docs/theory.md, section 6).

    noise_multiplier is the noise over the clip bound of a layer of weight 1. gaussian_weights: weights of exact parts.
    """
    release = hidden_direction_release(
        noise_multiplier, dims, layer_weights=layer_weights, repeats=repeats, gaussian_weights=gaussian_weights
    )
    return _epsilon(release, sample_rate, steps, delta, rejection_threshold, min_dataset_size, method)


def _epsilon(
    release: Release,
    sample_rate: float,
    steps: int,
    delta: float,
    rejection_threshold: Threshold,
    min_dataset_size: int | None,
    method: str,
) -> float:
    validate.whole_number("steps", steps, 0)
    if rejection_threshold == "auto":
        if min_dataset_size is None:
            raise InvalidArgument("rejection_threshold='auto' needs min_dataset_size, the size of the smaller of two neighbours.")
        rejection_threshold = auto_rejection_threshold(
            release, sample_rate=sample_rate, steps=steps, delta=delta, min_dataset_size=min_dataset_size
        )
    return epsilon([Charge(SampledStep(release, sample_rate, rejection_threshold, min_dataset_size), steps)], delta, method)


def hidden_direction_release(
    noise_multiplier: float,
    dims: Sequence[int],
    *,
    layer_weights: PerLayer = None,
    repeats: int | Sequence[int] = 1,
    gaussian_weights: Sequence[float] = (),
) -> HiddenDirectionRelease:
    """The release with tau_l = noise_multiplier / weight_l."""
    validate.positive("noise_multiplier", noise_multiplier)
    if len(dims) == 0 and len(gaussian_weights) == 0:
        raise InvalidArgument("dims is empty; give the dimension of at least one layer.")
    weights = validate.per_layer("layer_weights", layer_weights, len(dims), 1)
    directions = validate.per_layer("repeats", repeats, len(dims), 1)
    sites = tuple(
        HiddenSite(dim, noise_multiplier / validate.positive("layer_weights", weight), validate.whole_number("repeats", count))
        for dim, weight, count in zip(dims, weights, directions, strict=True)
    )
    exact = tuple(noise_multiplier / validate.positive("gaussian_weights", weight) for weight in gaussian_weights)
    return HiddenDirectionRelease(sites, exact)


_GAUSSIAN = ("gaussian", "gradient", "zeroth-order")  # a clipped vector per record: one price


def release_maker(mechanism: str | MakeRelease, **layers: Any) -> MakeRelease:
    """From a name to what makes its release; layers: the arguments of `hidden_direction_release`. A function stays as it is."""
    if callable(mechanism) or mechanism in _GAUSSIAN:
        if layers:
            name = "given" if callable(mechanism) else mechanism
            raise InvalidArgument(f"{sorted(layers)[0]} means nothing to the {name} mechanism.")
        return mechanism if callable(mechanism) else GaussianRelease
    validate.one_of("mechanism", mechanism, (*_GAUSSIAN, "hidden-direction"))
    return lambda noise: hidden_direction_release(noise, **layers)


def auto_rejection_threshold(
    release: Release,
    *,
    sample_rate: float,
    steps: int,
    delta: float,
    min_dataset_size: int,
    fraction: float = AUTO_FRACTION,
) -> int:
    """What rejection_threshold="auto" stands for: the largest one that raises epsilon by at most `fraction` of it."""

    def epsilon_at(threshold: int) -> float:
        return epsilon([Charge(SampledStep(release, sample_rate, threshold, min_dataset_size), steps)], delta)

    return largest_threshold(epsilon_at, sample_rate=sample_rate, min_dataset_size=min_dataset_size, fraction=fraction)
