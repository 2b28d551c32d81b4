"""A mechanism from outside is tried on synthetic records: one more of them may move the sum by no more than the release states.

This shows mistakes; it proves nothing. Where it finds one, or can't look, the run has no guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpulr.accounting.events import Release
from dpulr.errors import InvalidArgument
from dpulr.mechanisms.base import Batch, FittedMechanism, Mechanism, on_grid
from dpulr.model.batches import copied, join, rows, synthetic
from dpulr.model.equal_rows import EqualRows
from dpulr.model.forward import Forward
from dpulr.model.people import People
from dpulr.model.trials import other_weights
from dpulr.plan import Plan
from dpulr.randomness import Directions, public_seed

_SEED = 20_240_303  # public: only synthetic records depend on it
_OTHERS = (22, 0)  # sizes of batches that a record joins; 22 and 23 are unlikely to be the length of any other axis
_WEIGHTS = (1.0, 30.0)  # how far weights are scaled: small ones make small slopes, which no bound has to stop
_ODD = (0.0, 1.0, -1.0, 1e-40, 1e20, -1e20, math.nan, math.inf)
_RAISES = "a label that the model does not know"
_MARGIN = 1.001
_AGREE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-9}


def is_foreign(mechanism: Mechanism) -> bool:
    """Whether the mechanism is none of the package's own."""
    return type(mechanism).__module__.partition(".")[0] != "dpulr"


def check_mechanism(fitted: FittedMechanism[Any], forward: Forward, plan: Plan) -> str | None:
    """Why the guarantee of this mechanism could not be shown, in words; None if nothing speaks against it.

    It draws from `fitted` in public: give it one that was fitted for this.
    """
    if plan.step is None:
        return None  # no noise, no guarantee anyway
    std = fitted.noise_std
    if not (math.isfinite(std) and std > 0):
        return f"its noise_std is {std}: it must be the standard deviation of the noise on every number of the release"
    bound = bound_of(plan.step.release, std)
    if bound is None:
        return (
            f"its release ({type(plan.step.release).__name__}) does not say how far one record may move the sum: give it a "
            "noise_multiplier, or the property shifts"
        )
    with torch.inference_mode(), forward.checked_mode(), torch.random.fork_rng():
        try:
            public = fitted.draw_public(0)
            reason = _unlike_noise(fitted, std)
            for scale in _WEIGHTS:
                with other_weights(forward.parameters(), keep=scale):
                    reason = reason or _beyond_bound(fitted, forward, public, bound, plan.per_person)
            return reason
        except Exception as problem:
            return f"a step on synthetic records raises {type(problem).__name__}: {problem}"


def bound_of(release: Release, noise_std: float) -> float | None:
    """How far one record may move the sum, in length, if the release is to be what it says under this noise."""
    stated = getattr(release, "bound", None)
    if callable(stated):
        return float(stated(noise_std))
    with suppress(InvalidArgument):
        return noise_std * math.hypot(*(shift.largest for shift in release.shifts))
    multiplier = getattr(release, "noise_multiplier", None)
    return noise_std / float(multiplier) if isinstance(multiplier, int | float) and multiplier > 0 else None


def _unlike_noise(fitted: FittedMechanism[Any], std: float) -> str | None:
    """`privatise` must add the noise it is given, times noise_std, to every number."""
    if type(fitted).privatise is FittedMechanism.privatise:
        return None
    generator = torch.Generator().manual_seed(_SEED)
    total, noise = torch.randn(2, fitted.size, generator=generator, dtype=torch.float64)
    found = fitted.privatise(total.clone(), noise.clone())
    expected = on_grid(total + std * noise, std)
    if found.shape == expected.shape and torch.allclose(found.double().cpu(), expected, **_AGREE):
        return None
    return "its privatise does not add noise of standard deviation noise_std to every number"


def _beyond_bound(fitted: FittedMechanism[Any], forward: Forward, public: Any, bound: float, most: int) -> str | None:
    """`most`: the most records of a person, where people are protected. The one who joins has so many."""
    example = rows(forward.probe, 0, 1)
    generator = torch.Generator().manual_seed(_SEED)
    for size in _OTHERS:
        others = synthetic(example, size, generator, forward.device)
        owners = list(range(size))
        before, random = _total(fitted, forward, others, owners, public, most)
        if before.shape != (fitted.size,):
            return f"its sum over {size} records has shape {tuple(before.shape)}, not ({fitted.size},)"
        for name, record in _odd_records(example, generator, forward.device):
            for place in {0, size}:
                batch = join([rows(others, 0, place), *[record] * most, rows(others, place, size)])
                joined = [*owners[:place], *[size] * most, *owners[place:]]
                moved = float(torch.linalg.vector_norm(_total(fitted, forward, batch, joined, public, most)[0] - before))
                if name == _RAISES and random:
                    continue  # the others are run anew, and draw anew
                if not moved <= _MARGIN * bound:
                    one = "one synthetic record" if most == 1 else f"a person with {most} synthetic records"
                    return f"{one} ({name}) beside {size} others moves the sum by {moved:.4g}, but its release allows {bound:.4g}"
    return None


def _total(
    fitted: FittedMechanism[Any], forward: Forward, batch: Batch, owners: list[int], public: Any, most: int
) -> tuple[Tensor, bool]:
    """The sum over a batch in which every record draws the same numbers, and whether the model draws any."""
    public_seed(_SEED)
    more = 0 if fitted.rows is None or forward.recordwise else fitted.rows.of(len(owners)) - len(owners)  # a pass is filled up
    records, people = max(len(owners), 1) + more, max(len(set(owners)), 1) + more
    directions = _EqualDirections((records, people), forward.device, forward.dtype)
    with EqualRows(records, public=True) as equal:
        if most == 1:
            total: Tensor = fitted.sum_of_bounded_signals(copied(batch), public, directions)
        else:
            theirs = People.of(np.array(owners, dtype=np.int64), most, forward.device)
            total = fitted.sum_over_people(copied(batch), theirs, public, directions)
    return total.double().flatten() if total.dim() != 1 else total.double(), equal.calls > 0


def _odd_records(example: Batch, generator: torch.Generator, device: torch.device) -> Iterator[tuple[str, Batch]]:
    """Batches of one record: an ordinary one, and some whose numbers are all the same."""
    yield "values between 0 and 1", synthetic(example, 1, generator, device)

    def filled(value: float) -> Any:
        def fill(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            whole = not (leaf.is_floating_point() or leaf.is_complex())
            return torch.full_like(leaf, int(value == 1) if whole else value)

        return fill

    for value in _ODD:
        inputs, targets = example
        yield f"all values {value}", (pytree.tree_map(filled(value), inputs), pytree.tree_map(filled(abs(value) <= 1), targets))
    inputs, targets = synthetic(example, 1, generator, device)
    yield _RAISES, (inputs, pytree.tree_map(_unknown, targets))


def _unknown(leaf: Any) -> Any:
    """A whole number for which a loss raises: so must nothing for the other records."""
    whole = isinstance(leaf, Tensor) and leaf.dtype in (torch.int32, torch.int64)
    return torch.full_like(leaf, 10**6) if whole else leaf


class _EqualDirections(Directions):
    """Secret directions, but the same ones for every record, or person: the axis of their number is known by its length."""

    def __init__(self, lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(np.random.default_rng(_SEED), device, dtype)
        self._lengths, self._calls = lengths, 0

    def expect(self, sizes: Sequence[int]) -> None:
        """Nothing is drawn ahead."""

    def normal(self, *shape: int) -> Tensor:
        axis = next((shape.index(length) for length in self._lengths if length in shape), None)
        one = tuple(1 if a == axis else length for a, length in enumerate(shape))
        self._calls += 1
        drawn = np.random.default_rng(self._calls).standard_normal(one, dtype=np.float32)
        return torch.from_numpy(drawn).to(self.device, self.dtype).expand(shape).clone()

    def spheres(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        drawn = [self.normal(*shape) for shape in shapes]
        return [z / torch.linalg.vector_norm(z, dim=-1, keepdim=True) for z in drawn]
