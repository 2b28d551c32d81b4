"""Scores: how an attacker tells releases with the canary from releases without it.

Releases are first reduced to a few numbers a step (`Probe`), chosen from what the attacker can simulate: the canary's own signal.
Attacks that learn see the first half of the trials only; what they are worth is measured on the second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpulr.audit.bounds import Array

_MOST_DIRECTIONS = 6


@dataclass(frozen=True)
class Probe:
    """Coordinates along the canary's mean signal and its main directions, then the squared length of the rest."""

    directions: Array  # (k, size), orthonormal; the first points along the mean signal

    @classmethod
    def of(cls, signals: Array) -> Probe:
        """From simulated signals of the canary alone, (simulations, size)."""
        mean = signals.mean(axis=0)
        length = np.linalg.norm(mean)
        rows = [mean / length] if length > 0 else []
        rest = signals - mean
        if np.abs(rest).max() > 1e-6 * max(np.abs(signals).max(), 1e-300) and signals.shape[1] > 1:
            rest = rest - (rest @ rows[0])[:, None] * rows[0] if rows else rest
            _, size, axes = np.linalg.svd(rest, full_matrices=False)
            rows += list(axes[: _MOST_DIRECTIONS - 1][size[: _MOST_DIRECTIONS - 1] > 1e-6 * size[0]])
        if not rows:
            rows = [np.eye(signals.shape[1])[0]]
        orthonormal = np.linalg.qr(np.array(rows).T)[0].T
        signs = np.sign((orthonormal * np.array(rows)).sum(axis=1))
        return cls(orthonormal * signs[:, None])

    def features(self, releases: Array) -> Array:
        """(trials, steps, k + 1) from releases (trials, steps, size)."""
        along = releases @ self.directions.T.astype(releases.dtype)
        rest = np.einsum("ntd,ntd->nt", releases, releases, dtype=np.float64) - np.square(along, dtype=np.float64).sum(-1)
        return np.concatenate([along.astype(np.float64), np.maximum(rest, 0.0)[..., None]], axis=-1)


def along(features: Array) -> Array:
    """(trials, steps): the part of each release along the canary's mean signal."""
    return features[..., 0]


def across(features: Array) -> Array:
    """(trials, steps): the length of all the rest."""
    length: Array = np.sqrt(np.square(features[..., 1:-1]).sum(axis=-1) + features[..., -1])
    return length


Score = Callable[[Array], Array]


@dataclass(frozen=True)
class Attack:
    """A named score of features (trials, steps, k + 1); large means: the canary is in. `fit` learns it from labelled features."""

    name: str
    fit: Callable[[Array, Array], Score]


def fixed(name: str, score: Score) -> Attack:
    return Attack(name, lambda out, inside: score)


def projection() -> Attack:
    return fixed("projection on the canary's direction", lambda features: along(features).sum(axis=1))


def likelihood_ratio(log_ratio: Callable[[Array, Array], Array], sample_rate: float) -> Attack:
    """The exact test of one record: log_ratio(along, across) is that of a step which has drawn it."""

    def score(features: Array) -> Array:
        loss = log_ratio(along(features), across(features))
        if sample_rate < 1:
            loss = np.logaddexp(np.log1p(-sample_rate), np.log(sample_rate) + loss)
        total: Array = loss.sum(axis=1)
        return total

    return fixed("likelihood ratio", score)


def quadratic() -> Attack:
    """Two normals with covariances of their own, learned: the quadratic discriminant."""
    return Attack("quadratic discriminant", _discriminant)


def steps_apart() -> Attack:
    """How far consecutive releases lie apart: where noise comes twice, they differ by the signals alone."""

    def score(features: Array) -> Array:
        moved = np.diff(features[..., :-1], axis=1)
        largest: Array = np.abs(moved).max(axis=(1, 2))
        return largest

    return fixed("difference of two steps", score)


def _discriminant(out: Array, inside: Array) -> Score:
    flat_out, flat_in = out.reshape(len(out), -1), inside.reshape(len(inside), -1)
    pooled = np.concatenate([flat_out, flat_in])
    centre, scale = np.median(pooled, axis=0), _scale(pooled)
    parts = [_normal((group - centre) / scale) for group in (flat_out, flat_in)]

    def score(features: Array) -> Array:
        x = (features.reshape(len(features), -1) - centre) / scale
        difference: Array = _log_density(x, *parts[1]) - _log_density(x, *parts[0])
        return difference

    return score


def _scale(values: Array) -> Array:
    spread = values.std(axis=0)
    usable: Array = np.where(spread > 0, spread, 1.0)
    return usable


def _normal(x: Array) -> tuple[Array, Array, float]:
    covariance = np.atleast_2d(np.cov(x.T)) + 1e-9 * np.eye(x.shape[1])
    factor = np.linalg.cholesky(covariance)
    return x.mean(axis=0), np.linalg.inv(factor), -float(np.log(np.diag(factor)).sum())


def _log_density(x: Array, mean: Array, whitening: Array, log_scale: float) -> Array:
    density: Array = log_scale - 0.5 * np.square((x - mean) @ whitening.T).sum(axis=1)
    return density
