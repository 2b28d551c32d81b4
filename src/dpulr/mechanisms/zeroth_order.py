"""`zeroth-order`: differences of losses along public directions, clipped and noised (docs/theory.md, section 3).

Each step draws `repeats` directions in the space of all parameters, from public randomness, the same for the whole batch. A record
gives one slope per direction. That short vector is all that is private: it is clipped, summed and noised, and the update is put
together from the directions afterwards. Epsilon is that of the Gaussian mechanism, whatever the number of directions.

The published family are presets: `ZerothOrder.dpzero()`, `.dp_aggzo(directions=64)`, `.dp_zo(noise="laplace")`. Directions are made
again from their seeds and weights are moved operation by operation (model/moved_weights.py): no copy of them is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpulr import validate
from dpulr.accounting.events import GaussianRelease, Release
from dpulr.accounting.laplace import CELLS_PER_BOUND, LaplaceRelease
from dpulr.errors import InvalidArgument, ModelRefused
from dpulr.mechanisms.base import LEAST_BOUND, Batch, FittedMechanism, Gradients, Mechanism, WorstCase
from dpulr.mechanisms.chunks import Chunks
from dpulr.model.batches import call_on_copy
from dpulr.model.forward import Forward
from dpulr.model.moved_weights import BLOCK, Direction, Moved, put_back_later
from dpulr.model.people import People
from dpulr.model.rescue import not_too_few
from dpulr.model.row_sizes import agreeing
from dpulr.model.sites import Site
from dpulr.plan import Plan
from dpulr.randomness import Directions, GaussianNoise, LaplaceNoise, RandomSource, public_seed

Seeds = list[int]
_WITH_MARGIN = 1 - 1e-3
"""The rounding of all losses is divided by the radius: a bound is met with more room than elsewhere."""
_LEAST_RADIUS = 5e-4
"""Rounding of losses is divided by twice the radius: at this one it moves the sum of 400 records by about 0.001 of the bound."""


_AGREE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}
_TRIED = 0.05
"""How far weights are moved to see whether the model takes them."""


@dataclass(frozen=True)
class ZerothOrder(Mechanism):
    """Settings.

    repeats        public directions per step
    radius         how far each parameter is moved, as a standard deviation; both ways
    max_grad_norm  the bound on a record's vector of slopes, one per direction
    directions     "normal", or "sphere" of radius sqrt(number of parameters)
    noise          "gaussian", or "laplace" (one direction only): pure epsilon, and noise_multiplier is its scale over the bound
    precision      "float32" (whatever the model has), or "bfloat16" for the passes: losses, sums and noise stay as they are.
                   Each record then has passes of its own: in a batch, the coarse rounding of one could depend on the others

    The update keeps the length of a gradient: it is the sum of slope times direction over sqrt(repeats * parameters), where the
    unbiased estimate would be longer by sqrt(parameters / repeats). That is a public factor of the learning rate.
    """

    repeats: int = 16
    radius: float = 1e-3
    max_grad_norm: float = 1.0
    directions: Literal["normal", "sphere"] = "normal"
    noise: Literal["gaussian", "laplace"] = "gaussian"
    precision: Literal["float32", "bfloat16"] = "float32"
    name: ClassVar[str] = "zeroth-order"
    bounds_people: ClassVar[bool] = True
    shares_parameters: ClassVar[bool] = True
    uses_sites: ClassVar[bool] = False
    takes_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        validate.whole_number("repeats", self.repeats)
        validate.at_least("radius", self.radius, _LEAST_RADIUS)
        validate.at_least("max_grad_norm", self.max_grad_norm, LEAST_BOUND)
        validate.one_of("directions", self.directions, ("normal", "sphere"))
        validate.one_of("noise", self.noise, ("gaussian", "laplace"))
        validate.one_of("precision", self.precision, ("float32", "bfloat16"))
        if self.noise == "laplace" and self.repeats != 1:
            raise InvalidArgument(f"repeats is {self.repeats}; Laplace noise bounds a single number, so it must be 1.")

    @classmethod
    def dpzero(cls, **more: Any) -> ZerothOrder:
        """DPZero (ICML 2024): one direction on the sphere, a record's slope clipped, one noised number."""
        return cls(**{"repeats": 1, "directions": "sphere", **more})

    @classmethod
    def dp_aggzo(cls, directions: int = 64, **more: Any) -> ZerothOrder:
        """DP-AggZO (USENIX Security 2025): a record's vector of slopes along all directions is clipped as one."""
        return cls(repeats=directions, **more)

    @classmethod
    def dp_zo(cls, noise: Literal["gaussian", "laplace"] = "gaussian", **more: Any) -> ZerothOrder:
        """DP-ZO (TMLR 2025): one normal direction, and Gaussian or Laplace noise on the clipped slope."""
        return cls(**{"repeats": 1, "noise": noise, **more})

    def release(self, sites: Sequence[Site], noise_multiplier: float) -> Release:
        if self.noise == "laplace":
            return LaplaceRelease(noise_multiplier, mechanism=self.name)
        return GaussianRelease(noise_multiplier, mechanism=self.name, numbers=self.repeats)

    def passes(self, sites: Sequence[Site]) -> int:
        return 2 * self.repeats

    def fit(self, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> FittedZerothOrder:
        kind = FittedWithLaplace if self.noise == "laplace" else FittedZerothOrder
        return kind(self, forward, plan, memory_limit=memory_limit, seed=seed)

    @classmethod
    def worst_case(cls) -> WorstCase:
        """One direction and one dimension; directions are public, so the attacker computes what the canary adds."""
        return WorstCase(cls(repeats=1), dim=1, many_per_step=False, trials=10_000, signal_is_public=True)


class FittedZerothOrder(FittedMechanism[Seeds]):
    """The release has one number per direction, not one per parameter."""

    def __init__(self, settings: ZerothOrder, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> None:
        self.settings, self.forward = settings, forward
        self.size, self.divisor = settings.repeats, plan.expected_batch_size
        self.noise_std = plan.noise_multiplier * settings.max_grad_norm
        self.parameters, self.offsets, self.dim = {}, {}, 0
        for site in forward.sites:
            for name, parameter in site.parameters.items():
                self.parameters[f"{site.name}.{name}" if site.name else name] = parameter
                self.offsets[parameter] = self.dim
                self.dim += parameter.numel()
        self.chunks = Chunks(forward, (), self.size, memory_limit)
        self.alone = forward.recordwise or settings.precision == "bfloat16"
        self.rows = None if self.alone else self.row_sizes(plan, self._rows_agree)
        self._public = torch.Generator().manual_seed(seed)
        try:
            self._in_place = not self._takes_moved_weights()
        except Exception as problem:
            if settings.precision == "float32":
                raise
            raise ModelRefused(
                f"the model does not run in {settings.precision} ({type(problem).__name__}: {problem}). A box of numpy, say, takes "
                "no such numbers: leave out precision=."
            ) from problem

    def _rows_agree(self, sizes: Sequence[int]) -> int:
        """Tried on synthetic records."""

        def numbers(batch: Batch) -> list[Tensor]:
            output, losses = self._run(self.direction(1), _TRIED, *batch)
            return [losses, *(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and len(leaf) == len(losses))]

        return agreeing(numbers, self.forward.probe, sizes)

    @property
    def streams(self) -> list[list[int]]:
        """Neighbouring sites, as many as have about a block of numbers."""
        groups: list[list[int]] = []
        held = BLOCK
        for i, site in enumerate(self.forward.sites):
            own = sum(parameter.numel() for parameter in site.parameters.values())
            if held + own > BLOCK:
                groups.append([])
                held = 0
            groups[-1].append(i)
            held += own
        return groups

    def draw_public(self, step: int) -> Seeds:
        """A seed per direction."""
        seeds: Seeds = torch.randint(2**63 - 1, (self.size,), generator=self._public).tolist()
        return seeds

    def sum_of_bounded_signals(self, batch: Batch, public: Seeds, directions: Directions) -> Tensor:
        """(repeats,): the sum of the records' clipped slopes. Nothing is drawn in secret."""
        return self._sum(batch, None, public)

    def sum_over_people(self, batch: Batch, people: People, public: Seeds, directions: Directions) -> Tensor:
        return self._sum(batch, people, public)

    def _sum(self, batch: Batch, people: People | None, public: Seeds) -> Tensor:
        total = torch.zeros(self.size, device=self.forward.device, dtype=torch.float64)
        for chunk, own in self.chunks.parts(batch, people, self.chunks.most if self.rows is None else self.rows.largest):
            slopes = torch.stack([self.slopes(*chunk, self.direction(seed)) for seed in public], dim=1)
            bounded = self.clipped(slopes, own).t()
            total += (bounded if own is not None else self.forward.weighed(bounded, chunk[1])).sum(1)
        return total

    def gradients(self, values: Tensor, public: Seeds, into: Gradients) -> None:
        """For the sites that have buffers."""
        wanted = [
            (views[name], self.offsets[parameter])
            for site, views in zip(self.forward.sites, into, strict=True)
            if views
            for name, parameter in site.parameters.items()
        ]
        for view, _ in wanted:
            view.zero_()
        scale = 1 / math.sqrt(self.size * self.dim)
        for seed, slope in zip(public, values.div(self.divisor).tolist(), strict=True):
            direction = self.direction(seed)
            for view, offset in wanted:
                direction.add_to(view, offset, slope * scale)

    def direction(self, seed: int) -> Direction:
        """A public direction for all parameters, made again from its seed rather than kept."""
        sphere = self.settings.directions == "sphere"
        return Direction(seed, self.dim, self.forward.dtype, self.forward.device, sphere=sphere)

    def slopes(self, inputs: Any, targets: Any, direction: Direction) -> Tensor:
        """(records,): central differences of each record's loss along the direction, in float32 or better."""
        radius = self.settings.radius
        plus, minus = (self.losses(direction, way, inputs, targets) for way in (radius, -radius))
        return (plus - minus) / (2 * radius)

    def losses(self, direction: Direction, length: float, inputs: Any, targets: Any) -> Tensor:
        """One loss per record with weights moved so far; NaN for a record whose pass raises."""
        return self.forward.loss_of_each(
            partial(self._pass, direction, length),
            inputs,
            targets,
            alone=self.alone,
            alive=lambda: self.forward.check_alive([]),
            size=not_too_few if self.rows is None else self.rows.of,
        )

    def _pass(self, direction: Direction, length: float, inputs: Any, targets: Any) -> Tensor:
        return self._run(direction, length, inputs, targets)[1]

    def _run(self, direction: Direction, length: float, inputs: Any, targets: Any) -> tuple[Any, Tensor]:
        """The model's output and the losses with weights moved so far."""
        move = self._moved_in_place if self._in_place else partial(Moved, self.offsets)
        with move(direction, length), self._precision():
            output = call_on_copy(self.forward.model, inputs)
        return output, self.forward.loss_fn(pytree.tree_map(_in_full, output), targets)

    @contextmanager
    def _moved_in_place(self, direction: Direction, length: float) -> Iterator[None]:
        with put_back_later(self.parameters.values()):
            with torch.inference_mode(False), torch.no_grad():
                for parameter, offset in self.offsets.items():
                    moved = parameter.detach().clone()
                    direction.add_to(moved, offset, length)
                    parameter.copy_(moved)
            yield

    def _precision(self) -> AbstractContextManager[Any]:
        if self.settings.precision == "float32":
            return nullcontext()
        return torch.autocast(self.forward.device.type, dtype=torch.bfloat16)

    def _takes_moved_weights(self) -> bool:
        """Whether operations see moved weights: tried on synthetic records, beside weights that are really moved.

        A module may use its parameters in ways that no operation shows: memory that it shares with them, say.
        """
        found = []
        with torch.inference_mode(), self.forward.checked_mode(), torch.random.fork_rng():
            for self._in_place in (False, True):
                public_seed(0)
                found.append(self._pass(self.direction(1), _TRIED, *self.forward.probe))
        return torch.allclose(found[0], found[1], **_AGREE)

    def clipped(self, slopes: Tensor, people: People | None = None) -> Tensor:
        """(records, repeats) slopes, or means over people, each scaled to the bound. What is not finite becomes zero."""
        slopes = torch.where(torch.isfinite(slopes), slopes, 0).double()
        if people is not None:
            slopes = people.mean(slopes.t()).t()
        norms = torch.linalg.vector_norm(slopes, dim=1, keepdim=True)
        scale: Tensor = (_WITH_MARGIN * self.settings.max_grad_norm / norms).clamp(max=1)
        return slopes * scale


class FittedWithLaplace(FittedZerothOrder):
    """The sum is rounded to a grid, and the noise is a whole number of its cells (accounting/laplace.py)."""

    def __init__(self, settings: ZerothOrder, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> None:
        super().__init__(settings, forward, plan, memory_limit=memory_limit, seed=seed)
        self.cell = settings.max_grad_norm / CELLS_PER_BOUND
        self.scale = LaplaceRelease(plan.noise_multiplier).scale if plan.noise_multiplier else 0
        self.noise_std = math.sqrt(2) * self.scale * self.cell

    def noise(self, source: RandomSource) -> GaussianNoise | LaplaceNoise:
        return source.laplace_noise(self.size, self.scale)

    def spacing(self, largest: float) -> float | None:
        return None

    def privatise(self, total: Any, noise: Tensor) -> Tensor:
        """Here noise is added: whole numbers of cells, to a whole number of cells."""
        released: Tensor = total.double().div(self.cell).round_().add_(noise).mul_(self.cell)
        return released


def _in_full(leaf: Any) -> Any:
    """Half precision as float32."""
    half = isinstance(leaf, Tensor) and leaf.dtype in (torch.bfloat16, torch.float16)
    return leaf.float() if half else leaf
