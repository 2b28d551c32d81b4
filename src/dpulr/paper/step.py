"""Algorithm 1: a step of DP-ULR as its paper prints it, with its privacy controller. It has no privacy guarantee.

In each step and layer: one clean pass gives the Jacobians and losses, from which the privacy controller takes the standard
deviation sigma of the noise (eq:sigma), or the extra noise that is missing; K normal perturbations of the layer's output give a
record's gradient by the one-sided likelihood ratio; it is clipped to C, layer by layer; the update is the sum over N_B.
"""

from __future__ import annotations

import math
import warnings
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dpulr.errors import InvalidArgument, ModelRefused
from dpulr.mechanisms.base import Batch, FittedMechanism, Gradients, weighted
from dpulr.mechanisms.chunks import Chunks
from dpulr.model.forward import Forward
from dpulr.model.layers import Call
from dpulr.model.layers.affine import AffineRule
from dpulr.model.passes import Clean
from dpulr.model.sites import OutputSite, Site
from dpulr.norms import flat_norm
from dpulr.paper.covariance import Covariance, RowBlocks, blocks_of
from dpulr.plan import Plan
from dpulr.randomness import Directions

if TYPE_CHECKING:
    from dpulr.paper.mechanism import Paper


class Controls(NamedTuple):
    """What holds for one layer in one step."""

    target_std: float
    repeats: int
    clip: float
    sigma: float


class StepSettings(NamedTuple):
    """What holds for all layers in one step: a number per layer each."""

    target_std: tuple[float, ...]
    repeats: tuple[float, ...]
    clip: tuple[float, ...]
    sigma: tuple[float, ...]
    divisors: tuple[float, ...]


class PaperTotal(NamedTuple):
    """The sum of the clipped gradients, what the controller decided, and the covariances where extra noise is missing.

    All of it depends on the batch; nothing covers what it tells.
    """

    flat: Tensor
    controls: list[Controls]
    extra: list[Covariance | None]


class FittedPaper(FittedMechanism[StepSettings]):
    def __init__(self, settings: Paper, forward: Forward, plan: Plan, *, memory_limit: int | None) -> None:
        self.settings, self.forward, self.plan = settings, forward, plan
        self.sites, self.device, self.dtype = forward.sites, forward.device, forward.dtype
        self.size = sum(self.part_sizes)
        self.chunks = Chunks(forward, self.sites, self.size, memory_limit)
        self.blocks = [blocks_of(site) for site in self.sites]
        self._schedules = settings.schedules(len(self.sites))
        self._warned: set[str] = set()
        if settings.simultaneous:
            self._check_simultaneous()

    @cached_property
    def part_sizes(self) -> list[int]:
        return [site.size for site in self.sites]

    # --- one step -----------------------------------------------------------------------------------------------------
    def draw_public(self, step: int) -> StepSettings:
        """Nothing is drawn; these are the settings of the step."""
        plan, layers = self.plan.at(step), len(self.sites)
        given = {name: schedule.at(step) for name, schedule in self._schedules.items()}
        divisor = float(plan.rejection_threshold or plan.expected_batch_size)  # N_B; without one, the expected batch size
        return StepSettings(
            target_std=given.get("target_std", (plan.noise_multiplier,) * layers),
            repeats=given["repeats"],
            clip=given["max_grad_norm"],
            sigma=given["sigma"],
            divisors=given.get("rejection_threshold", (divisor,) * layers),
        )

    def sum_of_bounded_signals(self, batch: Batch, public: StepSettings, directions: Directions) -> PaperTotal:
        """Sum of the clipped gradients. To choose sigma, the controller needs the clean losses and Jacobians of the whole batch."""
        chunks = [part for part, _ in self.chunks.parts(batch, None, self.chunks.most)]
        given_sigma = self.settings.remedy == "extra-noise"
        precise = self.dtype if given_sigma else torch.float64  # eq:sigma needs the smallest eigenvalue
        covariances = [Covariance(blocks, precise, self.device) for blocks in self.blocks]
        flat = torch.zeros(self.size, device=self.device, dtype=self.dtype)
        parts = self.parts(flat)
        at_once = given_sigma and len(chunks) > 1  # sigma is given: one clean pass does for both
        controls, extra = self._control(public, covariances) if at_once else ([], [])
        cleans: list[Clean] = []
        for chunk in chunks:
            cleans = self.forward.clean(*chunk)
            for clean in cleans:
                for blocks, call, covariance, std in zip(self.blocks, clean.calls, covariances, public.target_std, strict=True):
                    if std > 0:
                        blocks.add(call, clean.losses, covariance)
                if at_once:
                    self.add(clean, controls, directions, parts)
        if not at_once:
            controls, extra = self._control(public, covariances)
        for chunk in () if at_once else chunks:
            if len(chunks) > 1:
                cleans = self.forward.clean(*chunk)
            for clean in cleans:
                self.add(clean, controls, directions, parts)
        return PaperTotal(flat, controls, extra)

    def add(self, clean: Clean, controls: list[Controls], directions: Directions, parts: list[Tensor]) -> None:
        """Add the clipped gradients of the records of one clean pass."""
        if self.settings.simultaneous:
            self._add_together(clean, controls, directions, parts)
            return
        for i, (site, call, control) in enumerate(zip(self.sites, clean.calls, controls, strict=True)):
            signal = self.estimate(clean, i, directions, control)
            gradients = self._record_gradients(site, call, signal)
            if gradients is not None:
                scale = (control.clip / flat_norm(gradients)).clamp(max=1)
                site.add_record_gradients(gradients, scale, parts[i])
            else:
                scale = (control.clip / site.norms(call, signal)).clamp(max=1)
                site.add(call, signal, scale, parts[i])

    def estimate(self, clean: Clean, index: int, directions: Directions, control: Controls) -> Tensor:
        """(records, dim): the mean over the repeats of z L(v + z) / sigma^2, z normal with standard deviation sigma."""
        site, call, sigma = self.sites[index], clean.calls[index], control.sigma
        signal = torch.zeros(clean.records, site.dim, device=self.device, dtype=self.dtype)
        for repeats in self.chunks.repeats(self.chunks.row_bytes[index], clean.records, control.repeats):
            z = directions.normal(repeats, clean.records, site.dim)
            losses = self.forward.losses(clean, index, site.moved(call, z, sigma))
            signal += weighted(torch.where(torch.isfinite(losses), losses, 0), z)
        return signal.div_(control.repeats * sigma)

    @staticmethod
    def _record_gradients(site: Site, call: Call, signal: Tensor) -> Tensor | None:
        """(records, parameters), where it pays to make them: then they serve both the norms and the sum."""
        if isinstance(site, OutputSite) and isinstance(site.rule, AffineRule):
            return site.rule.record_gradients(call, signal.view(-1, *site.output_shape))
        return None

    def privatise(self, total: PaperTotal, noise: Tensor) -> Tensor:
        """The sum, with extra noise along the eigenvectors where the remedy asks for it."""
        values = total.flat.clone()
        everything = zip(self.parts(values), self.parts(noise), self.blocks, total.controls, total.extra, strict=True)
        for part, normal, blocks, control, covariance in everything:
            if covariance is not None:
                packed = blocks.pack(blocks.site.rule.split(normal.to(covariance.dtype)))
                credit = 1 / (control.repeats * control.sigma**2)
                extra = blocks.unpack(covariance.extra_noise(packed, control.target_std * control.clip, credit))
                for name, view in blocks.site.rule.split(part).items():
                    view += extra[name]
        return values

    def gradients(self, values: Tensor, public: StepSettings, into: Gradients) -> None:
        for site, part, divisor, views in zip(self.sites, self.parts(values), public.divisors, into, strict=True):
            site.lift(part / divisor, None, views)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """The sites' parts of a release."""
        return list(flat.split_with_sizes(self.part_sizes))

    # --- the privacy controller ---------------------------------------------------------------------------------------
    def _control(self, public: StepSettings, covariances: list[Covariance]) -> tuple[list[Controls], list[Covariance | None]]:
        """Choose sigma for each layer (eq:sigma), or the extra noise."""
        controls: list[Controls] = []
        extras: list[Covariance | None] = []
        self._check_shared(public.repeats)
        settings = zip(public.target_std, public.repeats, public.clip, public.sigma, strict=True)
        for i, (std, repeats, clip, most) in enumerate(settings):
            most *= self.sites[i].scale
            sigma, extra = most, None
            if std > 0:
                if math.isinf(clip):
                    raise InvalidArgument("max_grad_norm is infinite, but target_std is not 0: noise is scaled by the clip bound.")
                if self.settings.remedy == "extra-noise":
                    extra = covariances[i]
                else:
                    smallest = covariances[i].smallest()
                    if smallest > 0:
                        sigma = min(most, math.sqrt(smallest / repeats) / (clip * std))
                    else:
                        self._report_deficiency(i, covariances[i])
                        extra = covariances[i]
            controls.append(Controls(std, int(repeats), clip, sigma))
            extras.append(extra)
        return controls, extras

    def _report_deficiency(self, index: int, covariance: Covariance) -> None:
        """Say it once per layer; without a remedy, stop: no sigma meets eq:sigma."""
        blocks, label = self.blocks[index], self.sites[index].label
        if label in self._warned:
            return
        text = (
            f"the batch's gradients have no noise in some directions of {label}: the covariance has rank "
            f"{covariance.rank() * blocks.copies} of {blocks.count * blocks.copies * blocks.width}"
        )
        if self.settings.remedy == "none":
            raise ModelRefused(f"{text}. No sigma meets the paper's condition. Use remedy='extra-noise' or 'parameters'.")
        self._warned.add(label)
        warnings.warn(f"{text}, so extra noise is added along its eigenvectors", stacklevel=2)

    # --- noise at all layers at once ----------------------------------------------------------------------------------
    def _add_together(self, clean: Clean, controls: list[Controls], directions: Directions, parts: list[Tensor]) -> None:
        """The Jacobians are those of the noisy inputs, so a record's gradient is a sum over repeats, like one over positions."""
        sites = self.sites
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in sites]
        largest = max(self.chunks.row_bytes)
        for repeats in self.chunks.repeats(largest, clean.records, controls[0].repeats):
            z = [directions.normal(repeats, clean.records, site.dim) for site in sites]
            deltas = [control.sigma * draw for control, draw in zip(controls, z, strict=True)]
            losses, inputs = self.forward.all_shifted(clean, deltas)
            losses = torch.where(torch.isfinite(losses), losses, 0)
            for i, (site, blocks, control) in enumerate(zip(sites, self.blocks, controls, strict=True)):
                assert isinstance(blocks, RowBlocks)
                good = torch.isfinite(inputs[i]).flatten(1).all(1)  # other rows add nothing
                x = inputs[i].masked_fill(~good.view(-1, *[1] * (inputs[i].dim() - 1)), 0)
                u = (losses * good.view_as(losses)).unsqueeze(2) * z[i] / (control.repeats * control.sigma)
                rows, signals = blocks.rows(x), blocks.signals(u.view(-1, *site.output_shape))
                found[i].append((_by_record(rows, clean.records), _by_record(signals, clean.records)))
        for i, (blocks, control) in enumerate(zip(self.blocks, controls, strict=True)):
            rows, signals = (torch.cat(tensors, dim=2) for tensors in zip(*found[i], strict=True))
            scale = control.clip / _norms(rows, signals)
            signals = signals * torch.where(torch.isfinite(scale), scale.clamp(max=1), 1.0).view(-1, 1, 1, 1)
            gradient = blocks.unpack(torch.einsum("ngpc,ngpw->gcw", signals, rows))
            for name, view in blocks.site.rule.split(parts[i]).items():
                view += gradient[name]

    def _check_simultaneous(self) -> None:
        for site, blocks in zip(self.sites, self.blocks, strict=True):
            if not isinstance(blocks, RowBlocks):
                raise ModelRefused(f"simultaneous noise needs layers with an output space of rows; {site.label} has none.")
        if self.forward.recordwise:
            raise ModelRefused("simultaneous noise needs a model that runs on whole batches.")
        for step in (0, *getattr(self.settings.repeats, "keys", tuple)()):
            self._check_shared(self._schedules["repeats"].at(int(step)))

    def _check_shared(self, repeats: tuple[float, ...]) -> None:
        if self.settings.simultaneous and len(set(repeats)) > 1:
            raise InvalidArgument("with simultaneous noise all layers share the passes: repeats must be the same for all.")


def _by_record(rows: Tensor, records: int) -> Tensor:
    """(repeats * records, blocks, positions, width) as (records, blocks, repeats * positions, width)."""
    split = rows.view(-1, records, *rows.shape[1:])
    return split.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _norms(rows: Tensor, signals: Tensor) -> Tensor:
    """Norm of each record's sum over positions of signal (outer) row, by Gram matrices or directly, whichever is smaller."""
    positions, width, copies, dtype = rows.shape[2], rows.shape[3], signals.shape[3], signals.dtype
    if positions * positions > width * copies:
        return flat_norm(signals.transpose(2, 3) @ rows)
    rows, signals = rows.double(), signals.double()
    square = ((rows @ rows.transpose(2, 3)) * (signals @ signals.transpose(2, 3))).sum((1, 2, 3))
    norms: Tensor = square.clamp_min(0).sqrt().to(dtype)
    return norms
