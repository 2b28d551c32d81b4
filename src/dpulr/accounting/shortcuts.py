"""Epsilon in one call, for the mechanisms of this project, by the names everybody knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dpulr import validate
from dpulr.accounting.events import Charge, GaussianRelease, HiddenDirectionRelease, HiddenSite, Release, SampledStep
from dpulr.accounting.privacy_cost import epsilon
from dpulr.accounting.rejection import AUTO_FRACTION, largest_threshold

PerLayer = float | int | Sequence[float] | None
Threshold = int | Literal["auto"]


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
    return _price(GaussianRelease(noise_multiplier), sample_rate, steps, delta, rejection_threshold, min_dataset_size, method)


def hidden_direction_epsilon(
    *,
    noise_multiplier: float,
    dims: Sequence[int],
    sample_rate: float,
    steps: int,
    delta: float,
    layer_weights: PerLayer = None,
    repeats: int | Sequence[int] = 1,
    frames: int | Sequence[int] = 1,
    gaussian_weights: Sequence[float] = (),
    rejection_threshold: Threshold = 0,
    min_dataset_size: int | None = None,
    method: str = "pld",
) -> float:
    """Epsilon of `steps` hidden-direction releases (docs/theory.md, section 6).

    noise_multiplier is the noise over the clip bound of a layer of weight 1. gaussian_weights: weights of exact parts.
    """
    release = hidden_direction_release(
        noise_multiplier,
        dims,
        layer_weights=layer_weights,
        repeats=repeats,
        frames=frames,
        gaussian_weights=gaussian_weights,
    )
    return _price(release, sample_rate, steps, delta, rejection_threshold, min_dataset_size, method)


def _price(
    release: Release,
    sample_rate: float,
    steps: int,
    delta: float,
    rejection_threshold: Threshold,
    min_dataset_size: int | None,
    method: str,
) -> float:
    validate.whole("steps", steps, 0)
    if rejection_threshold == "auto":
        if min_dataset_size is None:
            raise ValueError("rejection_threshold='auto' needs min_dataset_size, the size of the smaller of two neighbours.")
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
    frames: int | Sequence[int] = 1,
    gaussian_weights: Sequence[float] = (),
) -> HiddenDirectionRelease:
    """The release with tau_l = noise_multiplier / weight_l."""
    validate.positive("noise_multiplier", noise_multiplier)
    if len(dims) == 0 and len(gaussian_weights) == 0:
        raise ValueError("dims is empty; give the dimension of at least one layer.")
    weights = validate.per_layer("layer_weights", layer_weights, len(dims), 1)
    draws = validate.per_layer("repeats", repeats, len(dims), 1)
    blocks = validate.per_layer("frames", frames, len(dims), 1)
    sites = tuple(
        HiddenSite(dim, noise_multiplier / validate.positive("layer_weights", weight), repeat, frame)  # type: ignore[arg-type]
        for dim, weight, repeat, frame in zip(dims, weights, draws, blocks, strict=True)
    )
    exact = tuple(noise_multiplier / validate.positive("gaussian_weights", weight) for weight in gaussian_weights)
    return HiddenDirectionRelease(sites, exact)


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
