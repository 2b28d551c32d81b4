"""Is the randomness what the proofs assume? Tests of the sampler, of the noise and of the directions of a real engine.

Each check gives a p-value: the chance to see something at least as odd if all is well. "No value comes twice" gives 0 or 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

from dpulr import validate
from dpulr.audit.bounds import Array
from dpulr.engine import PrivacyEngine
from dpulr.mechanisms import Mechanism
from dpulr.randomness import Directions, GaussianNoise, RandomSource

Draw = Callable[[], npt.NDArray[np.int64]]
_RECORDS, _RATE = 400, 0.05


@dataclass(frozen=True)
class Check:
    name: str
    p_value: float


@dataclass(frozen=True)
class Report:
    """All checks; `broken` if any p-value is below what the confidence leaves for it."""

    checks: tuple[Check, ...]
    confidence: float

    @property
    def limit(self) -> float:
        return (1 - self.confidence) / len(self.checks)

    @property
    def broken(self) -> bool:
        return any(check.p_value < self.limit for check in self.checks)

    def __str__(self) -> str:
        lines = [f"{'p-value':>9}  check", *(f"{c.p_value:9.3g}  {c.name}{self._mark(c)}" for c in self.checks)]
        end = "BROKEN: the randomness is not what the proofs assume" if self.broken else "as the proofs assume"
        return "\n".join([*lines, "", f"{end} ({len(self.checks)} checks, confidence {self.confidence:g} for all together)"])

    def _mark(self, check: Check) -> str:
        return "   <-- broken" if check.p_value < self.limit else ""

    def to_json(self) -> str:
        return json.dumps({"broken": self.broken, "confidence": self.confidence, "checks": [asdict(c) for c in self.checks]})


# --- the sampler ------------------------------------------------------------------------------------------------------
def sampler_checks(draw: Draw, records: int, sample_rate: float, rejection_threshold: int = 0, batches: int = 4_000) -> list[Check]:
    """Rates, independence between records and between steps, sizes (rejection included)."""
    inside = np.zeros((batches, records), dtype=np.float64)
    repeated = False
    for row in inside:
        drawn = draw()
        repeated |= len(np.unique(drawn)) < len(drawn)
        row[drawn] = 1
    sizes = inside.sum(axis=1).astype(np.int64)
    law = stats.binom(records, sample_rate)
    accepted = float(law.sf(rejection_threshold - 1))
    support = np.arange(rejection_threshold, records + 1)
    mass = law.pmf(support) / accepted
    mean = float((support * mass).sum()) / records
    found = [
        Check("sampler: no record twice in a batch", float(not repeated)),
        Check("sampler: rate of each record", _rates(inside, mean)),
    ]
    found.append(Check("sampler: no batch below the threshold", float(bool((sizes >= rejection_threshold).all()))))
    found.append(Check("sampler: sizes of batches", _sizes(sizes, support, mass)))
    both = float((support * (support - 1) * mass).sum()) / (records * (records - 1))
    found.append(Check("sampler: pairs of records", _pairs(inside, both)))
    found.append(Check("sampler: independent steps", _lag(inside)))
    return found


def _rates(inside: Array, mean: float) -> float:
    """The rarest and the most frequent record, each with its binomial tail; all records paid for."""
    batches, records = inside.shape
    counts = inside.sum(axis=0)
    least, most = stats.binom.cdf(counts.min(), batches, mean), stats.binom.sf(counts.max() - 1, batches, mean)
    spread = min(1.0, 2 * records * min(least, most))
    total = float(counts.sum())
    deviation = (total - batches * records * mean) / math.sqrt(batches * records * mean * (1 - mean))
    return float(min(1.0, 2 * min(spread, 2 * stats.norm.sf(abs(deviation)))))


def _sizes(sizes: npt.NDArray[np.int64], support: npt.NDArray[np.int64], mass: Array) -> float:
    """Chi-square over bins that expect ten batches at least."""
    edges, held = [support[0]], 0.0
    for value, m in zip(support, mass, strict=True):
        held += m
        if held * len(sizes) >= 10:
            edges.append(value + 1)
            held = 0.0
    edges[-1] = support[-1] + 1
    if len(edges) < 3:
        return 1.0
    seen = np.histogram(sizes, bins=edges)[0]
    cumulative = np.concatenate([[0.0], np.cumsum(mass)])
    expected = np.diff(cumulative[np.array(edges) - support[0]]) * len(sizes)
    if seen.sum() < len(sizes):
        return 0.0
    return float(stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue)


def _pairs(inside: Array, both: float) -> float:
    """How often neighbours in the data set are drawn together."""
    half = inside.shape[1] // 2
    together = (inside[:, :half] * inside[:, half : 2 * half]).sum(axis=1)
    return (
        float(stats.ttest_1samp(together, half * both).pvalue)
        if together.std() > 0
        else float(np.isclose(together[0], half * both))
    )


def _lag(inside: Array) -> float:
    """A record in one batch says nothing about the next."""
    centred = inside - inside.mean(axis=0)
    products = (centred[:-1] * centred[1:]).sum(axis=1)
    return float(stats.ttest_1samp(products, 0.0).pvalue) if products.std() > 0 else 1.0


# --- the noise --------------------------------------------------------------------------------------------------------
def noise_checks(noise: Array, parts: Sequence[int], std: float) -> list[Check]:
    """Noise (steps, size), in parts of the layers: variance, law, tails, independence between layers and between steps."""
    unit = noise / std
    flat = unit.ravel()
    square = float((flat**2).sum())
    variance = 2 * min(stats.chi2.cdf(square, flat.size), stats.chi2.sf(square, flat.size))
    found = [
        Check("noise: variance", float(min(variance, 1.0))),
        Check("noise: normal law", float(stats.kstest(flat, "norm").pvalue)),
    ]
    beyond = int((np.abs(flat) > 3.5).sum())
    expected = 2 * flat.size * stats.norm.sf(3.5)
    tails = 2 * min(stats.poisson.cdf(beyond, expected), stats.poisson.sf(beyond - 1, expected))
    found.append(Check("noise: tails beyond 3.5 standard deviations", float(min(tails, 1.0))))
    found.append(Check("noise: independent steps", _correlation(unit[:-1], unit[1:])))
    ends = np.cumsum([0, *parts])
    layers = [unit[:, a:b] for a, b in pairwise(ends)]
    for i in range(len(layers) - 1):
        shared = min(layers[i].shape[1], layers[i + 1].shape[1])
        found.append(
            Check(f"noise: layers {i} and {i + 1} independent", _correlation(layers[i][:, :shared], layers[i + 1][:, :shared]))
        )
    found.append(Check("noise: no value twice", float(len(np.unique(flat)) == flat.size)))
    return found


def _correlation(first: Array, second: Array) -> float:
    """p-value of the correlation of matching numbers, and of numbers in neighbouring places."""
    count = first.size
    straight = float((first * second).sum()) / math.sqrt(count)
    shifted = float((first[:, 1:] * second[:, :-1]).sum()) / math.sqrt(max(count - len(first), 1))
    return float(min(1.0, 2 * 2 * stats.norm.sf(max(abs(straight), abs(shifted)))))


class Recording(RandomSource):
    """Streams as the engine's own, which remember what they handed out."""

    def __init__(self, insecure_seed: int | None = None) -> None:
        super().__init__(insecure_seed)
        self.noises: list[Array] = []
        self.normals: list[Array] = []

    def noise(self, size: int) -> GaussianNoise:
        return _RecordedNoise(size, self.numpy("noise"), self.noises)

    def directions(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Directions:
        return _RecordedDirections(self.numpy("directions"), device, dtype, self.normals)


class _RecordedNoise(GaussianNoise):
    def __init__(self, size: int, rng: np.random.Generator, record: list[Array]) -> None:
        super().__init__(size, rng)
        self._record = record

    def draw(self) -> torch.Tensor:
        found = super().draw()
        self._record.append(found.numpy().copy())
        return found


class _RecordedDirections(Directions):
    def __init__(self, rng: np.random.Generator, device: torch.device, dtype: torch.dtype, record: list[Array]) -> None:
        super().__init__(rng, device, dtype)
        self._record = record

    def normal(self, *shape: int) -> torch.Tensor:
        found = super().normal(*shape)
        self._record.append(found.double().cpu().numpy().ravel())
        return found


def fresh_after_resume(make: Callable[[Recording], PrivacyEngine], source: Callable[[], Recording], steps: int = 20) -> Check:
    """Noise, directions and batches of an engine and of one that goes on from its state have no value in common."""
    before, after = source(), source()
    first = make(before)
    batches = _take_steps(first, steps)
    second = make(after)
    second.load_state_dict(first.state_dict())
    more = _take_steps(second, steps)
    repeated = np.intersect1d(np.concatenate(before.noises), np.concatenate(after.noises)).size
    repeated += len(_threes(before.normals) & _threes(after.normals))
    same_batches = all(np.array_equal(a, b) for a, b in zip(batches, more, strict=True))
    return Check("resume: nothing is drawn again", float(repeated == 0 and not same_batches))


def _threes(record: list[Array]) -> set[bytes]:
    """Three numbers in a row: single ones in float32 do come twice by chance."""
    values = np.concatenate(record) if record else np.empty(0)
    return {values[i : i + 3].tobytes() for i in range(len(values) - 2)}


def _take_steps(engine: PrivacyEngine, steps: int) -> list[Array]:
    """Take steps; return what was in their batches."""
    seen = []
    for inputs, targets in engine.batches(steps):
        seen.append(inputs.double().numpy().ravel())
        engine.step(inputs, targets)
    return seen


# --- directions -------------------------------------------------------------------------------------------------------
def direction_checks(z: Array) -> list[Check]:
    """Directions (draws, records, dim) must be uniform on the sphere, and fresh for each record and draw."""
    draws, records, dim = z.shape
    flat = z.reshape(-1, dim)
    lengths = np.linalg.norm(flat, axis=1)
    found = [Check("directions: length 1", float(bool(np.abs(lengths - 1).max() < 1e-5)))]
    if dim > 1:
        law = stats.beta(0.5, (dim - 1) / 2).cdf
        axes = np.linalg.qr(np.random.default_rng(0).standard_normal((dim, dim)))[0]
        p = [stats.kstest((flat @ axis) ** 2, law).pvalue for axis in (axes[:, 0], axes[:, 1], np.eye(dim)[0], np.eye(dim)[-1])]
        found.append(Check("directions: uniform on the sphere", float(min(1.0, len(p) * min(p)))))
    signs = (flat @ (np.ones(dim) / math.sqrt(dim))) * math.sqrt(dim)
    found.append(Check("directions: no side preferred", float(2 * stats.norm.sf(abs(signs.sum()) / math.sqrt(len(signs))))))
    if records > 1:
        between = (z[:, 1:] * z[:, :-1]).sum(-1).ravel() * math.sqrt(dim)
        found.append(Check("directions: records independent", _standard(between)))
    if draws > 1:
        between = (z[1:] * z[:-1]).sum(-1).ravel() * math.sqrt(dim)
        found.append(Check("directions: draws independent", _standard(between)))
    if dim > 1:  # in float32 and few dimensions a handful meet by chance
        found.append(Check("directions: none twice", float(len(np.unique(flat, axis=0)) > 0.999 * len(flat))))
    return found


def _standard(values: Array) -> float:
    """Mean 0 and variance 1, together. Neighbouring products are uncorrelated, and so are their squares."""
    count = len(values)
    mean = 2 * stats.norm.sf(abs(values.sum()) / math.sqrt(count))
    squares = values**2 - 1
    spread = 2 * stats.norm.sf(abs(squares.mean()) / (squares.std() / math.sqrt(count) + 1e-300))
    return float(min(1.0, 2 * min(mean, spread)))


# --- all of an engine -------------------------------------------------------------------------------------------------
def check_engine(
    mechanism: str | Mechanism = "hidden-direction", *, confidence: float = 0.999, seed: int | None = None, steps: int = 300
) -> Report:
    """All checks, on an engine with two layers that takes real steps. Without `seed`: the operating system's randomness."""
    validate.fraction("confidence", confidence)
    inputs = torch.randn(_RECORDS, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, torch.zeros(_RECORDS, dtype=torch.int64))
    made = iter(range(10**6))

    def source() -> Recording:
        turn = next(made)
        return Recording(None if seed is None else 1_000 * seed + turn)

    def make(randomness: Recording, threshold: int = 0) -> PrivacyEngine:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5))
        return PrivacyEngine(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            data,
            nn.CrossEntropyLoss(reduction="none"),
            mechanism=mechanism,
            expected_batch_size=_RATE * _RECORDS,
            sample_rate=_RATE,
            rejection_threshold=threshold,
            min_dataset_size=_RECORDS - 1 if threshold else None,
            steps=10**6,
            noise_multiplier=1.0,
            randomness=randomness,
        )

    checks: list[Check] = []
    for threshold in (0, 18):
        streams = source()
        sampler, rng = make(streams, threshold).plan.sampler(), streams.batches()
        label = f" (redrawn below {threshold})" if threshold else ""
        found = sampler_checks(lambda s=sampler, r=rng: s.draw(_RECORDS, r), _RECORDS, _RATE, threshold)  # type: ignore[misc]
        checks += [Check(check.name + label, check.p_value) for check in found]
    streams = source()
    engine = make(streams)
    _take_steps(engine, steps)
    checks += noise_checks(np.stack(streams.noises), engine.fitted.part_sizes, 1.0)
    directions = source().directions(torch.device("cpu"))
    for dim in (2, 12):
        z = directions.sphere(20, 500, dim).double().numpy()
        checks += [Check(f"{check.name} ({dim} dimensions)", check.p_value) for check in direction_checks(z)]
    checks.append(fresh_after_resume(make, source))
    return Report(tuple(checks), confidence)
