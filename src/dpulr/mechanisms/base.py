"""What every mechanism does in one step: estimate a signal per record and layer, bound it, sum it up.

A mechanism is a frozen dataclass of public settings. `bind` ties it to a model's sites and gives a `Bound` mechanism, which owns
the numbers that must agree: the bound on a record, the standard deviation of the noise, and the event that is charged for it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpulr.accounting.events import Release
from dpulr.mechanisms.coordinates import Coordinates
from dpulr.model.batches import rows
from dpulr.model.replay import Clean, Forward
from dpulr.model.sites import Site, Space
from dpulr.randomness import Directions

Guarantee = Literal["certified", "nominal", "none"]

ROUNDING = 1 - 1e-5
"""Bounds are met with this much room, so that float32 rounding can't push a record above them."""


_FAST = 64 * 2**20
"""Repeats are taken together while their replays need less: tensors that leave the cache cost more than they save."""


def check_spaces(space: object, subspace: object) -> None:
    """Refuse a space or a subspace that does not exist."""
    if space not in ("auto", "output", "weight"):
        raise ValueError(f"space is {space!r}; it must be 'auto', 'output' or 'weight'.")
    if subspace not in ("auto", None) and (isinstance(subspace, bool) or not isinstance(subspace, int) or subspace < 1):
        raise ValueError(f"subspace is {subspace!r}; it must be None or a whole number of at least 1.")


def weighted(factors: Tensor, z: Tensor) -> Tensor:
    """(records, dim): the sum over repeats of factors (repeats, records) times z (repeats, records, dim), which is overwritten."""
    z *= factors.unsqueeze(2)
    return z.sum(0) if len(z) > 1 else z[0]


class Mechanism(ABC):
    """Public settings of a mechanism."""

    name: ClassVar[str]
    guarantee: ClassVar[Guarantee] = "certified"
    space: Space

    @property
    def owns_noise(self) -> bool:
        """Whether the settings fix the noise themselves, so that the engine is given none."""
        return False

    @abstractmethod
    def bind(self, forward: Forward, *, memory_limit: int | None, seed: int) -> Bound: ...


class Bound(ABC):
    """A mechanism tied to the sites of a model. The release is one flat vector of `size` numbers, a part for each site.

    `step` counts from 0; the engine sets it. Settings that change with it make a mechanism one that `varies`.
    """

    varies = False

    def __init__(self, forward: Forward, *, memory_limit: int | None, seed: int, subspace: int | None) -> None:
        self.forward = forward
        some = next(iter(forward.sites[0].parameters.values()))
        self.device, self.dtype = some.device, some.dtype
        self.coordinates = [Coordinates(site, subspace, self.dtype, self.device) for site in forward.sites]
        self.size = sum(coordinates.size for coordinates in self.coordinates)
        self.memory_limit = self._room(memory_limit)
        self.noise_multiplier = math.nan
        self.step = 0
        self._public = torch.Generator().manual_seed(seed)

    @abstractmethod
    def event_at(self, noise_multiplier: float) -> Release:
        """What one step with this noise releases."""

    def use(self, noise_multiplier: float) -> None:
        """Fix the noise."""
        self.noise_multiplier = noise_multiplier

    @property
    def own_noise(self) -> float | None:
        """The noise multiplier, where the mechanism and not the engine fixes it."""
        return None

    @property
    def rejection_threshold(self) -> int | None:
        """The threshold of this step's batch, where the mechanism and not the engine fixes it."""
        return None

    @property
    def without_noise(self) -> str:
        """What a noise multiplier of 0 means."""
        return "no noise was added"

    def denominator(self, expected_batch_size: float, rejection_threshold: int) -> float:
        """What the release is divided by: a public number."""
        return expected_batch_size

    @property
    @abstractmethod
    def noise_std(self) -> float:
        """Standard deviation of the noise on every number of the release."""

    @abstractmethod
    def add(self, clean: Clean, directions: Directions, parts: list[Tensor]) -> None:
        """Add the bounded signals of the records of one clean pass to the sites' parts of the release."""

    def total(self, inputs: Any, targets: Any, directions: Directions) -> Tensor:
        """Sum of the bounded signals over the batch, in chunks that respect the memory limit."""
        for coordinates in self.coordinates:
            coordinates.draw(self._public)
        total = torch.zeros(self.size, device=self.device, dtype=self.dtype)
        parts = self._parts(total)
        for chunk in self.record_chunks(inputs, targets):
            directions.plan(self.draws(_records(chunk[1])))
            clean = self.forward.surviving(*chunk)
            if clean is not None:
                self.add(clean, directions, parts)
        return total

    def draws(self, records: int) -> list[int]:
        """How many normal numbers `add` will draw for so many records, draw by draw: so that they can be drawn ahead."""
        return []

    def release(self, total: Tensor, noise: Tensor, denominator: float) -> Tensor:
        """What leaves a step: the noised sum over a public constant. `noise` is standard normal, in float64."""
        return total.double().add_(noise, alpha=self.noise_std).div_(denominator).to(total.dtype)

    def gradients(self, release: Tensor, into: list[dict[str, Tensor]]) -> None:
        """Write the parameters' gradients that a release stands for, site by site."""
        for coordinates, part, views in zip(self.coordinates, self._parts(release), into, strict=True):
            coordinates.lift(part, views)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        return list(flat.split_with_sizes([coordinates.size for coordinates in self.coordinates]))

    # --- memory -------------------------------------------------------------------------------------------------------
    def _room(self, memory_limit: int | None) -> int:
        """What the limit leaves for records beside the release, which is held twice in float64 and twice in the model's type.

        Without a limit: 128 MiB, or four times what one record needs if that is more. More is slower: it leaves the cache.
        """
        fixed = (16 + 2 * self.dtype.itemsize) * self.size
        least = fixed + self._record_bytes()
        if memory_limit is None:
            return max(2 * _FAST, 4 * (least - fixed))
        if memory_limit < least:
            raise ValueError(f"memory_limit is {memory_limit} bytes, but a step on one record of this model takes about {least}.")
        return memory_limit - fixed

    def _record_bytes(self) -> int:
        """Bytes that one record costs in the clean pass and in one pair of replays."""
        return self.forward.bytes_per_row + 2 * max(self.row_bytes(site) for site in self.forward.sites)

    def row_bytes(self, site: Site) -> int:
        """Bytes that one record costs in one replay: what the pass allocates, its perturbation, the next one, the output."""
        return site.replay_bytes + self.dtype.itemsize * (5 * site.dim + 3 * math.prod(site.output_shape))

    def record_chunks(self, inputs: Any, targets: Any) -> Iterator[tuple[Any, Any]]:
        """The batch in parts whose clean pass, and one pair of replays, stay below the memory limit."""
        records = _records(targets)
        size = max(1, self.memory_limit // self._record_bytes())
        if records <= size:
            if records > 0:
                yield inputs, targets
            return
        for start in range(0, records, size):
            yield rows((inputs, targets), start, start + size)

    def replays(self, bytes_per_record: int, records: int) -> int:
        """How many replays that take so much fit into one pass: below the memory limit, and small enough to stay in the cache."""
        room = min(self.memory_limit - records * self.forward.bytes_per_row, _FAST)
        return room // (max(records, 1) * bytes_per_record)

    def repeat_chunks(self, bytes_per_record: int, records: int, repeats: int) -> Iterator[int]:
        """Repeats in parts that fit into one pass."""
        most = max(1, self.replays(bytes_per_record, records))
        while repeats > 0:
            part = min(most, repeats)
            yield part
            repeats -= part


def _records(targets: Any) -> int:
    return next(leaf.shape[0] for leaf in pytree.tree_leaves(targets) if isinstance(leaf, Tensor))
