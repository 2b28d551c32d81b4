"""The tests of randomness pass on the engine, and each catches what it is for. Fixed seeds; limit 0.001 over all checks."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from dpulr.audit.randomness import (
    Check,
    Recording,
    Report,
    check_engine,
    direction_checks,
    fresh_after_resume,
    noise_checks,
    sampler_checks,
)
from dpulr.engine import PrivacyEngine
from dpulr.sampling import PoissonSampling, ShuffledSampling

RECORDS, RATE = 200, 0.1


def failing(checks: list[Check]) -> set[str]:
    return {check.name for check in checks if check.p_value < 0.001 / len(checks)}


@pytest.mark.parametrize("mechanism", ["hidden-direction", "gaussian"])
@pytest.mark.slow
def test_the_engine_passes(mechanism: str) -> None:
    report = check_engine(mechanism, seed=1)
    assert not report.broken
    assert len(report.checks) > 25
    assert "as the proofs assume" in str(report)
    assert json.loads(report.to_json())["broken"] is False


@pytest.mark.slow
def test_the_operating_systems_randomness_passes() -> None:
    """False alarm 1e-6."""
    assert not check_engine(confidence=1 - 1e-6).broken


def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def sampler(kind: str) -> Callable[[], np.ndarray]:
    source, state = rng(), {"last": np.arange(20)}
    poisson, fixed = PoissonSampling(RATE), ShuffledSampling(20)

    def draw() -> np.ndarray:
        if kind == "poisson":
            return poisson.draw(RECORDS, source)
        if kind == "fixed size":
            return fixed.draw(RECORDS, source)
        if kind == "rate off by a tenth":
            return PoissonSampling(1.1 * RATE).draw(RECORDS, source)
        if kind == "one record preferred":
            return np.unique(np.append(poisson.draw(RECORDS, source), [7] if source.random() < 0.1 else []).astype(np.int64))
        if kind == "pairs":
            first = np.flatnonzero(source.random(RECORDS // 2) < RATE)
            return np.concatenate([first, first + RECORDS // 2])
        if kind == "with replacement":
            return source.integers(RECORDS, size=source.binomial(RECORDS, RATE))
        if source.random() < 0.5:  # the last batch again
            state["last"] = poisson.draw(RECORDS, source)
        return state["last"]

    return draw


@pytest.mark.parametrize(
    ("kind", "caught"),
    [
        ("poisson", None),
        ("fixed size", "sizes"),
        ("rate off by a tenth", "rate"),
        ("one record preferred", "rate"),
        ("pairs", "pairs"),
        ("with replacement", "twice"),
        ("batches repeated", "independent steps"),
    ],
)
def test_samplers(kind: str, caught: str | None) -> None:
    found = failing(sampler_checks(sampler(kind), RECORDS, RATE))
    assert found == set() if caught is None else any(caught in name for name in found)


def test_rejection() -> None:
    source = rng()
    redrawn = PoissonSampling(RATE, 18)
    assert failing(sampler_checks(lambda: redrawn.draw(RECORDS, source), RECORDS, RATE, 18)) == set()
    plain = sampler("poisson")
    assert any("threshold" in name for name in failing(sampler_checks(plain, RECORDS, RATE, 18)))
    assert any("sizes" in name for name in failing(sampler_checks(lambda: redrawn.draw(RECORDS, source), RECORDS, RATE)))


def noise(kind: str) -> np.ndarray:
    values = rng().standard_normal((300, 200))
    if kind == "two per cent short":
        values *= 0.98
    elif kind == "uniform":
        values = rng().uniform(-np.sqrt(3), np.sqrt(3), values.shape)
    elif kind == "cut tails":
        values = np.clip(values, -3.4, 3.4)
    elif kind == "layers share it":
        values[:, 100:] = values[:, :100]
    elif kind == "steps share it":
        values[1::2] = values[::2]
    return values


@pytest.mark.parametrize(
    ("kind", "caught"),
    [
        ("good", None),
        ("two per cent short", "variance"),
        ("uniform", "normal law"),
        ("cut tails", "tails"),
        ("layers share it", "layers 0 and 1"),
        ("steps share it", "independent steps"),
        ("steps share it", "no value twice"),
    ],
)
def test_noise(kind: str, caught: str | None) -> None:
    found = failing(noise_checks(noise(kind), [100, 100], 1.0))
    assert found == set() if caught is None else any(caught in name for name in found)


def directions(kind: str) -> np.ndarray:
    z = rng().standard_normal((20, 300, 6))
    if kind == "cube":
        z = rng().uniform(-1, 1, z.shape)
    elif kind == "half a sphere":
        z = np.where(z.sum(-1, keepdims=True) < 0, -z, z)
    elif kind == "records share them":
        z[:, 1::2] = z[:, ::2]
    elif kind == "draws share them":
        z[1:] = z[:1]
    z /= np.linalg.norm(z, axis=-1, keepdims=True)
    return 1.01 * z if kind == "too long" else z


@pytest.mark.parametrize(
    ("kind", "caught"),
    [
        ("good", None),
        ("cube", "uniform"),
        ("half a sphere", "side"),
        ("records share them", "records"),
        ("draws share them", "draws"),
        ("draws share them", "twice"),
        ("too long", "length"),
    ],
)
def test_directions(kind: str, caught: str | None) -> None:
    found = failing(direction_checks(directions(kind)))
    assert found == set() if caught is None else any(caught in name for name in found)


def test_a_resume_that_repeats_itself_is_caught() -> None:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    def make(source: Recording) -> PrivacyEngine:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2))
        return PrivacyEngine(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            TensorDataset(torch.randn(50, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(50, dtype=torch.int64)),
            nn.CrossEntropyLoss(reduction="none"),
            batch_size=10,
            steps=100,
            noise_multiplier=1.0,
            randomness=source,
        )

    assert fresh_after_resume(make, lambda: Recording(4)).p_value == 0  # the same stream each time
    assert fresh_after_resume(make, Recording).p_value == 1


def test_report_names_what_is_broken() -> None:
    report = Report((Check("fine", 0.5), Check("noise: variance", 1e-9)), 0.99)
    assert report.broken
    assert "noise: variance   <-- broken" in str(report)
