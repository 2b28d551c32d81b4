"""Secret randomness: true Gaussian tails, one generator for each purpose, fresh entropy each time."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import signal
import threading
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest, poisson
from scipy.stats import norm as normal

from dpulr.randomness import Directions, GaussianNoise, RandomSource, normal_float32
from tests.support.core import CPU, state_of

WORD = 2**64


def driven(first: int, second: int, third: int) -> np.random.Generator:
    """An SFC64 generator whose next three raw outputs are these, by solving its recurrence backwards."""
    c = 12345
    rotated = (c << 24 | c >> 40) % WORD
    b_next, c_next = 9 * c % WORD, (rotated + first) % WORD
    counter = (third - (b_next ^ b_next >> 11) - 9 * c_next - 2) % WORD
    shifted, b = (second - b_next - counter - 1) % WORD, 0
    for _ in range(7):  # undo b ^ (b >> 11)
        b = shifted ^ b >> 11
    generator = np.random.Generator(np.random.SFC64(0))
    words = np.array([(first - b - counter) % WORD, b, c, counter], dtype=np.uint64)
    generator.bit_generator.state = {"bit_generator": "SFC64", "state": {"state": words}, "has_uint32": 0, "uinteger": 0}
    return generator


def uniform(value: float) -> int:
    """The raw output that numpy turns into this uniform."""
    return int(value * 2**53) << 11


def test_the_generator_can_be_driven() -> None:
    assert driven(1, 2, 3).bit_generator.random_raw(3).tolist() == [1, 2, 3]


@pytest.mark.parametrize("size", [5.0, 8.5, 12.0])
def test_noise_reaches_beyond_eight_standard_deviations(size: float) -> None:
    """The ziggurat's tail: strip 0, then r + x with x exponential, kept if 2y > x^2 for another exponential y."""
    r = 3.6541528853610088
    excess = size - r
    tail = WORD - 256  # strip 0, the largest offset: beyond the base strip
    generator = driven(tail, uniform(-math.expm1(-excess * r)), uniform(-math.expm1(-(excess**2) / 2 - 0.1)))
    value = GaussianNoise(1, generator).draw().item()
    assert abs(value) == pytest.approx(size, rel=1e-3)


@pytest.mark.slow
def test_tails_have_the_right_weight() -> None:
    """10^8 draws, |z| > 5 expected 57 times. False-alarm rate 1e-6."""
    noise, expected = GaussianNoise(10_000_000, RandomSource(11).numpy("noise")), 1e8 * 2 * normal.sf(5)
    found = sum(int((noise.draw().abs() > 5).sum()) for _ in range(10))
    assert poisson.ppf(5e-7, expected) <= found <= poisson.isf(5e-7, expected)


def test_float32_of_torch_ends_at_5_77() -> None:
    """Why torch.randn is not used: the largest float32 normal comes from u = 2^-24, and no draw lies beyond it."""
    draws = torch.randn(20_000_000, generator=torch.Generator().manual_seed(0)).abs()
    assert draws.max() <= math.sqrt(48 * math.log(2)) + 1e-5
    assert math.sqrt(48 * math.log(2)) < 5.77 < 8


def test_torch_uses_32_bits_of_its_seed() -> None:
    """Why its CPU generator keeps no secret: four billion streams can be tried."""
    first, second = (torch.Generator().manual_seed(seed) for seed in (5, 5 + 2**32))
    assert torch.equal(torch.randn(50, generator=first), torch.randn(50, generator=second))


def test_noise_is_normal_in_float64() -> None:
    """Kolmogorov-Smirnov at a false-alarm rate of 1e-6."""
    noise = GaussianNoise(200_000, RandomSource(3).numpy("noise")).draw()
    assert noise.dtype == torch.float64
    assert kstest(noise.numpy(), "norm").pvalue > 1e-6
    assert len(noise.unique()) == len(noise)  # no grid


def test_noise_is_never_returned_twice_and_drawn_by_another_thread() -> None:
    noise = GaussianNoise(4, RandomSource(3).numpy("noise"))
    noise.prepare()
    noise.prepare()
    draws = [noise.draw() for _ in range(50)]
    assert len({tuple(draw.tolist()) for draw in draws}) == 50
    plain = RandomSource(3).numpy("noise").standard_normal((50, 4))
    assert np.array_equal(torch.stack(draws).numpy(), plain)  # nothing skipped, nothing repeated
    assert any(thread.name.startswith("dpulr-noise") for thread in threading.enumerate())


def test_fresh_entropy_each_time() -> None:
    states = {state_of(RandomSource().numpy("noise")) for _ in range(20)}
    assert len(states) == 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_draws_other_noise() -> None:
    """Two processes that trained with the same noise on the same data would cancel it out."""
    source = RandomSource()
    noise, directions, batches = GaussianNoise(3, source.numpy("noise")), source.directions(CPU), source.numpy("batches")
    directions.expect([2**24])  # the other thread is at it when the process forks
    noise.prepare()

    def draws() -> list[float]:
        return [*noise.draw().tolist(), *directions.normal(3).tolist(), *batches.standard_normal(3)]

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # rather than wait for a thread that the fork did not take over
        os.write(writer, json.dumps(draws()).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not set(json.loads(os.read(reader, 10_000))) & set(draws())


def test_secret_generators_are_not_copied() -> None:
    generator = RandomSource().numpy("noise")
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="can't be copied or stored"):
            copied(generator)


def test_seeds_of_the_operating_system_are_256_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("secrets.randbits", lambda bits: asked.append(bits) or 7)
    RandomSource().numpy("noise")
    assert sum(asked) == 256


def test_each_purpose_has_its_own_stream() -> None:
    for source in (RandomSource(), RandomSource(1)):
        streams = [source.numpy(purpose).standard_normal(5) for purpose in ("noise", "directions", "batches")]
        assert all(not np.array_equal(a, b) for i, a in enumerate(streams) for b in streams[:i])
    again = [RandomSource(1).numpy("noise").standard_normal(5) for _ in range(2)]
    assert np.array_equal(*again)


def test_global_seeds_change_nothing() -> None:
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        draws.append((GaussianNoise(3, RandomSource().numpy("noise")).draw(), RandomSource().directions(CPU).normal(3)))
    assert not torch.equal(draws[0][0], draws[1][0])
    assert not torch.equal(draws[0][1], draws[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions(dtype: torch.dtype) -> None:
    """Normal (Kolmogorov-Smirnov, false-alarm rate 1e-6); on the sphere of norm 1."""
    directions = Directions(np.random.default_rng(0), CPU, dtype)
    z = directions.normal(100, 1_000)
    assert z.dtype == dtype
    assert kstest(z.flatten().numpy(), "norm").pvalue > 1e-6
    sphere = directions.sphere(30_000, 3)
    torch.testing.assert_close(sphere.norm(dim=-1), torch.ones(30_000, dtype=dtype))
    assert (
        kstest(sphere[:, 0].numpy(), "uniform", args=(-1, 2)).pvalue > 1e-6
    )  # Archimedes: a coordinate is uniform in 3 dimensions


def test_a_direction_of_zeros_is_not_nan() -> None:
    """One pair of 2^25 has a radius of zero. In one dimension it is the whole direction."""

    class Largest(np.random.Generator):
        def integers(self, low: Any, high: Any = None, size: Any = None, dtype: Any = np.int64, endpoint: bool = False) -> Any:
            return np.full(size, high - 1, dtype)

    directions = Directions(Largest(np.random.SFC64(0)), CPU, torch.float32)
    assert not directions.sphere(2, 3, 1).any()


def test_numbers_of_directions_are_normal_and_independent() -> None:
    """Box and Muller, by blocks. Fixed seed; each test would fail by chance once in 1,000 seeds."""
    rng = np.random.Generator(np.random.SFC64(5))
    for size in (1, 7, 2**15, 2**17 + 3):
        assert normal_float32(rng, size).shape == (size,)
    z = normal_float32(rng, 400_000)
    assert z.dtype == np.float32
    assert kstest(z, "norm").pvalue > 1e-3
    for apart in (1, 2, 2**15):  # a pair, neighbours, the same place of two blocks
        assert abs(np.corrcoef(z[:-apart], z[apart:])[0, 1]) < 3.3 / math.sqrt(len(z) - apart)
        assert abs(np.corrcoef(z[:-apart] ** 2, z[apart:] ** 2)[0, 1]) < 3.3 / math.sqrt(len(z) - apart)


def test_numbers_of_directions_reach_as_far_as_their_bits_do() -> None:
    class Smallest(np.random.Generator):
        def integers(self, low: Any, high: Any = None, size: Any = None, dtype: Any = np.int64, endpoint: bool = False) -> Any:
            return np.zeros(size, dtype)

    found = normal_float32(Smallest(np.random.SFC64(0)), 4)
    assert found.tolist() == pytest.approx([6.76, 0, 6.76, 0], abs=0.01)


def test_streams_of_the_operating_system_are_a_cipher() -> None:
    for purpose in ("noise", "directions", "batches"):
        assert type(RandomSource().numpy(purpose).bit_generator).__name__ == "AESCounter"


def test_what_a_model_draws_by_itself_is_secret() -> None:
    """Whatever torch was seeded with; and torch's own generator is put back. Kolmogorov-Smirnov, false alarms 1e-6."""
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        with RandomSource().model_randomness(CPU):
            draws.append(torch.rand(50_000))
        assert torch.equal(torch.get_rng_state(), before)
    assert not (draws[0] == draws[1]).all()
    assert kstest(torch.cat(draws).numpy(), "uniform").pvalue > 1e-6
    torch.manual_seed(0)
    expected = torch.rand(5)
    torch.manual_seed(0)
    with RandomSource(1).model_randomness(CPU):  # an insecure seed: torch's own, so that tests repeat
        assert torch.equal(torch.rand(5), expected)
