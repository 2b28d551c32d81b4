"""Where secret randomness comes from: a cipher (AES in counter mode), keyed by the operating system, one stream for each purpose.

torch's CPU generator uses 32 bits of its seed only, and its float32 normals end at 5.77 standard deviations (docs/pitfalls.md).
So batches, directions and noise are drawn by numpy from 256 secret bits, and moved to the device.
"""

from __future__ import annotations

import math
import os
import random
import secrets
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from itertools import groupby
from queue import SimpleQueue
from threading import Thread
from typing import Any, NoReturn

import numpy as np
import torch
from randomgen import AESCounter
from torch import Tensor

from dpulr.norms import row_norm


class RandomSource:
    """Makes one independent stream per purpose. With an insecure seed the streams repeat: for tests only.

    A subclass may record or spoil its streams, as audits do; the engine then certifies nothing.
    """

    def __init__(self, insecure_seed: int | None = None) -> None:
        self.insecure_seed = insecure_seed

    @property
    def reason_for_none(self) -> str | None:
        """Why nothing that uses these streams has a guarantee, if so."""
        if self.insecure_seed is not None:
            return "the noise comes from a seed (insecure_noise_seed)"
        return None if type(self) is RandomSource else "the noise comes from a source of one's own (randomness)"

    def numpy(self, purpose: str) -> np.random.Generator:
        if self.insecure_seed is None:
            return SecretGenerator(_fresh())
        return np.random.Generator(np.random.SFC64([self.insecure_seed, zlib.crc32(purpose.encode())]))

    def batches(self) -> np.random.Generator:
        return self.numpy("batches")

    def directions(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Directions:
        return Directions(self.numpy("directions"), device, dtype)

    def noise(self, size: int) -> GaussianNoise:
        return GaussianNoise(size, self.numpy("noise"))

    def laplace_noise(self, size: int, scale: int) -> LaplaceNoise:
        return LaplaceNoise(size, scale, self.numpy("noise"))

    def model_randomness(self, device: torch.device) -> AbstractContextManager[None]:
        """While it lasts, what a model draws by itself is secret. With an insecure seed: the global generators, as they are."""
        return secret_global_generators(device, _for_models(os.getpid())) if self.insecure_seed is None else nullcontext()

    def reading_randomness(self) -> AbstractContextManager[None]:
        """The same for what a data set draws while it is read. It may seed numpy's generator, for a record say: not the user's."""
        own = np.random.MT19937(secrets.randbits(256)) if self.insecure_seed is None else None
        return nullcontext() if own is None else secret_global_generators(_CPU, own)


class SecretGenerator(np.random.Generator):
    """Seeded by the operating system. It can't be copied or stored, and a forked process gets a fresh one: no draw comes twice."""

    def __init__(self, bits: np.random.BitGenerator) -> None:
        super().__init__(bits)
        _secret.add(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError("the generator of secret noise can't be copied or stored: its draws would come twice.")


_secret: weakref.WeakSet[SecretGenerator] = weakref.WeakSet()


def _fresh() -> np.random.BitGenerator:
    """A secret key, and a secret place to start counting."""
    bits: np.random.BitGenerator = AESCounter(key=secrets.randbits(128), counter=secrets.randbits(128))
    return bits


def common_stream(key: int) -> SecretGenerator:
    """The same secret stream on all processes that know its key, 256 random bits."""
    return SecretGenerator(AESCounter(key=key >> 128, counter=key & (2**128 - 1)))


_held: list[SecretGenerator] = []


def _before_fork() -> None:
    """Wait for threads that are drawing: the lock of a generator in use would stay locked in the new process for ever."""
    _held.extend(_secret)
    for generator in _held:
        generator.bit_generator.lock.acquire()


def _after_fork(new: bool) -> None:
    for generator in _held:
        generator.bit_generator.lock.release()
        if new:
            generator.bit_generator.state = _fresh().state
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=lambda: _after_fork(new=False), after_in_child=lambda: _after_fork(new=True)
    )


class Ahead:
    """Calls a drawing function in another thread, so that the numbers are there when they are needed."""

    def __init__(self, draw: Callable[[int], np.ndarray]) -> None:
        self._draw = draw
        self._next: tuple[int, SimpleQueue[Any]] | None = None

    def start(self, size: int) -> None:
        """Start drawing now; `take` will wait for it."""
        process = os.getpid()
        if self._next is None or self._next[0] != process:  # a fork takes over neither the thread nor what it has drawn
            drawn = SimpleQueue[Any]()
            self._next = process, drawn
            _worker(process).put((self._draw, size, drawn))

    def take(self, size: int) -> np.ndarray:
        """Fresh numbers: those that were started, if they are enough. None are ever returned twice."""
        started, self._next = self._next, None
        if started is not None and started[0] == os.getpid():
            numbers = started[1].get()
            if isinstance(numbers, Exception):
                raise numbers
            if len(numbers) >= size:
                return numbers[:size]  # type: ignore[no-any-return]
        return self._draw(size)


@lru_cache(maxsize=1)
def _worker(process: int) -> SimpleQueue[Any]:
    """What the one thread of a process that draws ahead is to do. (A pool of threads takes longer to be told.)"""
    waiting = SimpleQueue[Any]()

    def work() -> None:
        while True:
            draw, size, drawn = waiting.get()
            try:
                drawn.put(draw(size))
            except Exception as problem:  # for whoever waits
                drawn.put(problem)

    Thread(target=work, name="dpulr-noise", daemon=True).start()
    return waiting


_WORTH_A_THREAD = 2**13


class Directions:
    """Fresh secret directions. Nothing keeps them: they live as long as the caller's variable."""

    def __init__(self, rng: np.random.Generator, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._expected: list[int] = []
        self._rng, self._ahead = rng, Ahead(partial(normal_float32, rng))

    def expect(self, sizes: Sequence[int]) -> None:
        """A hint, which only saves time: how many numbers the next calls of `normal` will ask for. They are drawn ahead."""
        self._expected = list(reversed(sizes))
        self._start_next()

    def _start_next(self) -> None:
        size = self._expected.pop() if self._expected else 0
        if size >= _WORTH_A_THREAD:
            self._ahead.start(size)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal."""
        numbers = self._ahead.take(math.prod(shape))
        self._start_next()
        return torch.from_numpy(numbers).view(shape).to(self.device, self.dtype)

    def sphere(self, *shape: int) -> Tensor:
        """Uniform on the unit sphere of the last axis."""
        return self.spheres([shape])[0]

    def spheres(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """One `sphere` for each shape, by one draw. Neighbours of one width are brought to length 1 together."""
        sizes = [math.prod(shape) for shape in shapes]
        flat, start = self.normal(sum(sizes)), 0
        for width, run in groupby(zip(shapes, sizes, strict=True), lambda one: one[0][-1]):
            end = start + sum(size for _, size in run)
            _normalised(flat[start:end].view(-1, width))
            start = end
        return [part.view(shape) for part, shape in zip(flat.split_with_sizes(sizes), shapes, strict=True)]


def normal_float32(rng: np.random.Generator, size: int) -> np.ndarray:
    """Standard normal numbers in float32, by Box and Muller: two of 64 bits, in less than half the time of numpy's ziggurat.

    For directions, which are brought to length 1: values end at 6.8, and the shortest pairs are rounded to 3e-4. Noise has no such
    limits (`GaussianNoise`).
    """
    numbers = np.empty(size + size % 2, dtype=np.float32)
    for start in range(0, size, _BLOCK):  # small enough for the cache
        block = numbers[start : start + _BLOCK]
        bits = rng.integers(0, 2**64, len(block) // 2, dtype=np.uint64).view(np.uint32)
        radius, angle = bits[0::2].astype(np.float32), bits[1::2].astype(np.float32)
        radius *= np.float32(2**-32)
        radius += np.float32(2**-33)  # never 0
        np.log(radius, out=radius)
        radius *= np.float32(-2)
        np.sqrt(radius, out=radius)
        angle *= np.float32(2 * math.pi * 2**-32)
        np.multiply(np.cos(angle), radius, out=block[0::2])
        np.multiply(np.sin(angle), radius, out=block[1::2])
    return numbers[:size]


_BLOCK = 2**15


class SameDirections(Directions):
    """The same directions for every record, of no secret: to see whether all rows are computed alike."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(np.random.default_rng(0), device, dtype)

    def normal(self, *shape: int) -> Tensor:
        repeats, records, dim = shape
        return super().normal(repeats, 1, dim).repeat(1, records, 1)

    def spheres(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        flat = torch.cat([self.normal(*shape).flatten() for shape in shapes])  # one buffer, as drawn in earnest
        parts = zip(flat.split_with_sizes([math.prod(shape) for shape in shapes]), shapes, strict=True)
        return [_normalised(part.view(-1, shape[-1])).view(shape) for part, shape in parts]


def _normalised(rows: Tensor) -> Tensor:
    """Rows brought to length 1 in place, exact to the last digits also in millions of dimensions.

    A row of zeros stays one: in one dimension that happens once in some ten million draws, and must not become NaN.
    """
    return rows.div_(row_norm(rows).clamp_min_(_TINY).unsqueeze(1))


_TINY = 1e-30


class GaussianNoise:
    """Standard normal float64 noise for one flat buffer, drawn by another thread while the step computes.

    numpy's ziggurat in float64 has true tails: it can return values beyond 8, and does so with the right probability.
    """

    def __init__(self, size: int, rng: np.random.Generator) -> None:
        self.size = size
        self._rng, self._ahead = rng, Ahead(rng.standard_normal)

    def prepare(self) -> None:
        """Start drawing now; `draw` will wait for it."""
        self._ahead.start(self.size)

    def draw(self) -> Tensor:
        """A fresh float64 vector. No draw is ever returned twice."""
        self.prepare()
        return torch.from_numpy(self._ahead.take(self.size))


class LaplaceNoise:
    """Whole numbers x with probability proportional to e^(-|x| / scale), exactly: only uniform whole numbers are drawn for them.

    Canonne, Kamath and Steinke 2020, algorithm 2.
    """

    def __init__(self, size: int, scale: int, rng: np.random.Generator) -> None:
        self.size, self.scale, self._rng = size, scale, rng

    def prepare(self) -> None:
        """There is nothing to draw ahead: it is a handful of numbers."""

    def draw(self) -> Tensor:
        """Fresh whole numbers, as float64."""
        return torch.tensor([self._one() for _ in range(self.size)], dtype=torch.float64)

    def _one(self) -> int:
        while True:
            within = int(self._rng.integers(self.scale))
            if not self._exp_coin(within, self.scale):
                continue
            periods = 0
            while self._exp_coin(1, 1):
                periods += 1
            size, negative = within + self.scale * periods, bool(self._rng.integers(2))
            if size or not negative:
                return -size if negative else size

    def _exp_coin(self, numerator: int, denominator: int) -> bool:
        """True with probability e^-(numerator / denominator), a fraction of at most 1."""
        turns = 1
        while int(self._rng.integers(denominator * turns)) < numerator:
            turns += 1
        return turns % 2 == 1


def public_seed(number: int) -> None:
    """`torch.manual_seed`; where there is no accelerator, without the tenth of a millisecond, or more, that it takes for those."""
    if hasattr(torch, "accelerator") and not torch.accelerator.is_available():
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


_CPU = torch.device("cpu")
_TWISTER_WORDS, _TWISTER_OFFSET = 624, 24


@contextmanager
def secret_global_generators(device: torch.device, numpy_bits: np.random.BitGenerator) -> Iterator[None]:
    """Whatever a model or a data set draws from the global generators (torch's, numpy's, Python's) is secret while it lasts.

    After that they go on where they were. All 624 words of torch's CPU generator are a cipher's; Python's generator is seeded by
    256 bits of the operating system, an accelerator's by 64.
    """
    before, numpy_before, python_before = (
        torch.default_generator.get_state(),
        np.random.mtrand.get_bit_generator(),
        random.getstate(),
    )
    elsewhere = None if device.type == "cpu" else torch.get_device_module(device)
    there = None if elsewhere is None else elsewhere.get_rng_state(device)
    try:
        torch.default_generator.set_state(secret_torch_state())
        np.random.mtrand.set_bit_generator(numpy_bits)
        random.seed(secrets.randbits(256))
        if elsewhere is not None:
            elsewhere.manual_seed(secrets.randbits(63))
        yield
    finally:
        torch.default_generator.set_state(before)
        np.random.mtrand.set_bit_generator(numpy_before)
        random.setstate(python_before)
        if elsewhere is not None:
            elsewhere.set_rng_state(there, device)


@lru_cache(maxsize=1)
def _for_models(process: int) -> np.random.BitGenerator:
    """What numpy's global functions draw from during a step. It can't be seeded: a model that tries is told so."""
    return _fresh()


@lru_cache(maxsize=1)
def _for_states(process: int) -> np.random.BitGenerator:
    """Where states of generators come from: a cipher that nobody else draws from."""
    return _fresh()


def secret_torch_state() -> Tensor:
    """A state of torch's CPU generator (a Mersenne twister) whose words are those of a cipher, keyed by the operating system.

    It lasts until the next one is made.
    """
    state, words = _state_for_torch()
    words[:] = _for_states(os.getpid()).random_raw(_TWISTER_WORDS // 2).view(np.uint32)
    return state


@lru_cache(maxsize=1)
def _state_for_torch() -> tuple[Tensor, np.ndarray]:
    """A state, and its words."""
    state = torch.Generator().manual_seed(0).get_state()
    return state, state[_TWISTER_OFFSET : _TWISTER_OFFSET + 8 * _TWISTER_WORDS].numpy().view(np.uint64)
